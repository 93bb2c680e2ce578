"""The kernels over packed rows of the encoders against their references."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.layers import packed
from models.layers.gemm import gemm
from models.layers.kernels.packed import add_quick_gelu
from models.layers.one_segment import lengthen
from models.layers.packed import add_table_rows, byte_lookup, residual_layer_norm, rotate_packed
from models.layers.rotary import inverse_frequencies, rotary_cos_sin
from tests.models.kernels.checking import relative_error, replayed, upcast

EPS = 1e-6


@pytest.mark.parametrize(("rows", "width"), [(3, 96), (5, 1152), (2, 1280)])
def test_layer_norm(device, rows, width) -> None:
    x, residual = (torch.randn(rows, width, device=device) + 3 for _ in range(2))
    weight, bias = torch.randn(width, device=device), torch.randn(width, device=device)
    norm = nn.LayerNorm(width, eps=EPS).requires_grad_(False).double()
    norm.weight.copy_(weight)
    norm.bias.copy_(bias)
    out = replayed(device, lambda: residual_layer_norm.kernel(x, None, weight, bias, EPS))
    assert relative_error(out, packed.layer_norm(*upcast(x), norm)) < 1e-6
    kept = residual.clone()

    def add() -> tuple[torch.Tensor, torch.Tensor]:
        total = residual * 1  # a kernel, not a copy: dependent launches follow kernels only
        return residual_layer_norm.kernel(x, total, weight, bias, EPS), total

    out, total = replayed(device, add)
    (expected,) = upcast(kept)
    assert relative_error(out, packed.add_layer_norm(*upcast(x), expected, norm)) < 1e-6
    assert relative_error(total, expected) < 1e-6


@pytest.mark.parametrize(("heads", "width"), [(3, 12), (5, 16), (16, 80), (16, 72)])
def test_rotate_packed(device, heads, width) -> None:
    qkv = torch.randn(7, 3 * heads, width, device=device)
    cos, sin = torch.randn(7, width // 2, device=device), torch.randn(7, width // 2, device=device)

    def rotate() -> torch.Tensor:
        turned = qkv * 1
        rotate_packed.kernel(turned, 2 * heads, cos, sin)
        return turned

    out = replayed(device, rotate)
    expected, wide_cos, wide_sin = upcast(qkv, cos, sin)
    expected = expected.clone()
    packed.rotate_packed(expected, 2 * heads, wide_cos.float(), wide_sin.float())
    assert relative_error(out, expected) < 1e-6
    assert torch.equal(out[:, 2 * heads :], qkv[:, 2 * heads :])


def test_quick_gelu(device) -> None:
    x, bias = torch.randn(3, 1000, device=device) * 3, torch.randn(1000, device=device)
    expected = gemm.reference(*upcast(x, torch.eye(1000), bias), "quick_gelu")
    assert relative_error(replayed(device, lambda: add_quick_gelu(x * 1, bias)), expected) < 1e-6


@pytest.mark.parametrize("width", [None, 294, 320])
@pytest.mark.parametrize("channels", [1, 3])
def test_byte_lookup(device, channels, width) -> None:
    pixels = torch.randint(0, 256, (5, 3 * 98), dtype=torch.uint8, device=device)
    table = torch.randn(channels, 256, device=device)
    out = replayed(device, lambda: byte_lookup.kernel(pixels, table, width))
    assert out.shape == (5, width or 294)
    assert torch.equal(out, byte_lookup.reference(pixels, table, width))
    assert not out[:, 294:].any()


def test_widened_inputs_read_zeros() -> None:
    linear = nn.Linear(10, 3).requires_grad_(False)
    x = torch.randn(4, 10)
    expected = linear(x)
    packed.widen_inputs(linear, 8)
    assert linear.in_features == 16 and linear.weight.shape == (3, 16)
    torch.testing.assert_close(linear(nn.functional.pad(x, (0, 6))), expected)


@pytest.mark.parametrize(("rows", "width"), [(3, 96), (5, 1152), (2, 1024)])
def test_table_rows(device, rows, width) -> None:
    x, table = torch.randn(rows, width, device=device), torch.randn(9, width, device=device)
    places = torch.randint(0, 9, (rows, 4), dtype=torch.int32, device=device)
    weights = torch.rand(rows, 4, device=device)

    def add() -> torch.Tensor:
        total = x * 1
        add_table_rows.kernel(total, table, places, weights)
        return total

    (expected, *rest) = upcast(x, table, places, weights)
    packed.add_table_rows(expected, *rest)
    assert relative_error(replayed(device, add), expected) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_table_rows_are_rounded_as_their_reference_rounds(device, dtype) -> None:
    """Products and sums of these numbers are exact in float32, in any order. The interpreter cuts bfloat16."""
    x = torch.randn(7, 1152, device=device).to(dtype)
    table = (torch.randint(-127, 128, (9, 1152), device=device) / 16).to(dtype)
    places = torch.randint(0, 9, (7, 4), dtype=torch.int32, device=device)
    weights = torch.randint(0, 65, (7, 4), device=device) / 64

    def add() -> torch.Tensor:
        total = x * 1
        add_table_rows.kernel(total, table, places, weights)
        return total

    expected = x.cpu().clone()
    add_table_rows.reference(expected, table.cpu(), places.cpu(), weights.cpu())
    out = replayed(device, add).cpu()
    if dtype == torch.float16 or device.type == "cuda":
        assert torch.equal(out, expected)
    else:
        assert relative_error(out, expected) < 8e-3


@pytest.mark.parametrize("num_axes", [0, 2, 3])
def test_rotary_cos_sin(device, num_axes) -> None:
    frequencies = inverse_frequencies(72, 10_000.0).to(device)
    positions = torch.randint(0, 30_000, (9, num_axes or 1), device=device, dtype=torch.int32).T
    axes = torch.arange(36, device=device) % num_axes if num_axes else None
    positions = positions if num_axes else positions[0]
    cos, sin = replayed(device, lambda: rotary_cos_sin.kernel(positions, frequencies, axes, 1.25))
    expected = rotary_cos_sin.reference(positions.cpu(), frequencies.cpu(), axes.cpu() if num_axes else None, 1.25)
    assert relative_error(cos, expected[0]) < 1e-6
    assert relative_error(sin, expected[1]) < 1e-6


@pytest.mark.parametrize("with_values", [False, True])
@pytest.mark.parametrize(("heads", "width", "dtype"), [(3, 12, torch.float32), (16, 80, torch.bfloat16)])
def test_lengthen(device, heads, width, dtype, with_values) -> None:
    qkv = torch.randn(7, 3 * heads, width, device=device).to(dtype)
    cos, sin = torch.randn(7, width // 2, device=device), torch.randn(7, width // 2, device=device)
    qkv[5:], cos[5:], sin[5:] = float("nan"), float("nan"), float("nan")
    ends = torch.tensor([0, 5], dtype=torch.int32, device=device)

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        packed_heads = qkv * 1
        return lengthen.kernel(packed_heads, cos, sin, ends, with_values), packed_heads

    out, left = replayed(device, make)
    expected_left = qkv.cpu().clone()
    expected = lengthen.reference(expected_left, cos.cpu(), sin.cpu(), ends.cpu(), with_values)
    # The features that set padding apart are exact; rotations are rounded once.
    assert torch.equal(out[..., width:].cpu(), expected[..., width:])
    assert relative_error(out[..., :width], expected[..., :width]) < (1e-6 if dtype == torch.float32 else 8e-3)
    torch.testing.assert_close(left.cpu(), expected_left, equal_nan=True, atol=0, rtol=0)
