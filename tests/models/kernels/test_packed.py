from __future__ import annotations

import pytest
import torch
from torch import nn

from models.layers import packed
from models.layers.kernels.packed import (
    add_layer_norm_cuda,
    add_quick_gelu_cuda,
    byte_lookup_cuda,
    rotary_cos_sin_cuda,
    rotate_packed_cuda,
)
from models.layers.rotary import inverse_frequencies, rotary_cos_sin_reference
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

    def add() -> tuple[torch.Tensor, torch.Tensor]:
        total = residual * 1  # a kernel, not a copy: dependent launches follow kernels only
        return add_layer_norm_cuda(x, total, weight, bias, EPS), total

    out, total = replayed(device, add)
    (expected,) = wide(kept)
    assert relative_error(out, packed.add_layer_norm(*wide(x), expected, norm)) < 1e-6
    assert relative_error(total, expected) < 1e-6


@pytest.mark.parametrize(("heads", "width"), [(3, 12), (5, 16), (16, 80), (16, 72)])
def test_rotate_packed(device, heads, width) -> None:
    qkv = torch.randn(7, 3 * heads, width, device=device)
    cos, sin = torch.randn(7, width // 2, device=device), torch.randn(7, width // 2, device=device)

    def rotate() -> torch.Tensor:
        turned = qkv * 1
        rotate_packed_cuda(turned, 2 * heads, cos, sin)
        return turned

    out = replayed(device, rotate)
    expected, wide_cos, wide_sin = wide(qkv, cos, sin)
    expected = expected.clone()
    packed.rotate_packed(expected, 2 * heads, wide_cos.float(), wide_sin.float())
    assert relative_error(out, expected) < 1e-6
    assert torch.equal(out[:, 2 * heads :], qkv[:, 2 * heads :])


def test_quick_gelu(device) -> None:
    x, bias = torch.randn(3, 1000, device=device) * 3, torch.randn(1000, device=device)
    expected = packed.linear_quick_gelu(*wide(x, torch.eye(1000), bias))
    assert relative_error(replayed(device, lambda: add_quick_gelu_cuda(x * 1, bias)), expected) < 1e-6


@pytest.mark.parametrize("channels", [1, 3])
def test_byte_lookup(device, channels) -> None:
    pixels = torch.randint(0, 256, (5, 3 * 98), dtype=torch.uint8, device=device)
    table = torch.randn(channels, 256, device=device)
    out = replayed(device, lambda: byte_lookup_cuda(pixels, table))
    assert torch.equal(out, packed.byte_lookup(pixels, table))


@pytest.mark.parametrize("num_axes", [0, 2, 3])
def test_rotary_cos_sin(device, num_axes) -> None:
    frequencies = inverse_frequencies(72, 10_000.0).to(device)
    positions = torch.randint(0, 30_000, (9, num_axes or 1), device=device, dtype=torch.int32).T
    axes = torch.arange(36, device=device) % num_axes if num_axes else None
    positions = positions if num_axes else positions[0]
    cos, sin = replayed(device, lambda: rotary_cos_sin_cuda(positions, frequencies, axes, 1.25))
    expected = rotary_cos_sin_reference(positions.cpu(), frequencies.cpu(), axes.cpu() if num_axes else None, 1.25)
    assert relative_error(cos, expected[0]) < 1e-6
    assert relative_error(sin, expected[1]) < 1e-6
