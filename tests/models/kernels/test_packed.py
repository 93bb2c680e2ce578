from __future__ import annotations

import pytest
import torch
from torch import nn

from models.layers import packed
from models.layers.kernels.packed import (
    add_layer_norm_cuda,
    byte_lookup_cuda,
    quick_gelu_cuda,
    rotate_packed_cuda,
)
from tests.models.kernels.checking import relative_error, replayed, wide

EPS = 1e-6


@pytest.mark.parametrize(("rows", "width"), [(3, 96), (5, 1152), (2, 1280)])
def test_layer_norm(device, rows, width) -> None:
    x, residual = (torch.randn(rows, width, device=device) + 3 for _ in range(2))
    weight, bias = torch.randn(width, device=device), torch.randn(width, device=device)
    norm = nn.LayerNorm(width, eps=EPS).requires_grad_(False).double()
    norm.weight.copy_(weight)
    norm.bias.copy_(bias)
    out = replayed(device, lambda: add_layer_norm_cuda(x, None, weight, bias, EPS))
    assert relative_error(out, packed.layer_norm(*wide(x), norm)) < 1e-6
    kept = residual.clone()
    total = residual.clone()

    def add() -> torch.Tensor:
        total.copy_(residual)
        return add_layer_norm_cuda(x, total, weight, bias, EPS)

    out = replayed(device, add)
    (expected,) = wide(kept)
    assert relative_error(out, packed.add_layer_norm(*wide(x), expected, norm)) < 1e-6
    assert relative_error(total, expected) < 1e-6


@pytest.mark.parametrize(("heads", "width"), [(3, 12), (5, 16), (16, 80), (16, 72)])
def test_rotate_packed(device, heads, width) -> None:
    qkv = torch.randn(7, 3 * heads, width, device=device)
    cos, sin = torch.randn(7, width // 2, device=device), torch.randn(7, width // 2, device=device)
    turned = qkv.clone()

    def rotate() -> torch.Tensor:
        turned.copy_(qkv)
        rotate_packed_cuda(turned, 2 * heads, cos, sin)
        return turned

    out = replayed(device, rotate)
    expected, wide_cos, wide_sin = wide(qkv, cos, sin)
    expected = expected.clone()
    packed.rotate_packed(expected, 2 * heads, wide_cos.float(), wide_sin.float())
    assert relative_error(out, expected) < 1e-6
    assert torch.equal(out[:, 2 * heads :], qkv[:, 2 * heads :])


def test_quick_gelu(device) -> None:
    x = torch.randn(3, 1000, device=device) * 3
    y = x.clone()

    def run() -> torch.Tensor:
        y.copy_(x)
        return quick_gelu_cuda(y)

    assert relative_error(replayed(device, run), packed.quick_gelu(*wide(x))) < 1e-6


@pytest.mark.parametrize("channels", [1, 3])
def test_byte_lookup(device, channels) -> None:
    pixels = torch.randint(0, 256, (5, 3 * 98), dtype=torch.uint8, device=device)
    table = torch.randn(channels, 256, device=device)
    out = replayed(device, lambda: byte_lookup_cuda(pixels, table))
    assert torch.equal(out, packed.byte_lookup(pixels, table))
