"""The kernels over packed rows of the encoders against their references."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.layers import packed
from models.layers.one_segment import lengthen
from models.layers.packed import add_table_rows
from tests.models.kernels.checking import relative_error, replayed

EPS = 1e-6


def test_widened_inputs_read_zeros() -> None:
    linear = nn.Linear(10, 3).requires_grad_(False)
    x = torch.randn(4, 10)
    expected = linear(x)
    packed.widen_inputs(linear, 8)
    assert linear.in_features == 16 and linear.weight.shape == (3, 16)
    torch.testing.assert_close(linear(nn.functional.pad(x, (0, 6))), expected)


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


@pytest.mark.parametrize(
    ("windows", "heads", "width", "dtype"), [(9, 3, 20, torch.float32), (2, 2, 72, torch.bfloat16)]
)
def test_window_attention(device, windows, heads, width, dtype) -> None:
    """More rows than one program has, and a head that fills no power of two; a window of NaN stays alone."""
    qkv = torch.randn(windows * packed.WINDOW, 3 * heads * width, device=device).to(dtype)
    qkv[-packed.WINDOW :] = float("nan")
    out = replayed(device, lambda: packed.window_attention.kernel(qkv, heads)).cpu()
    expected = packed.window_attention.reference(qkv.cpu().float(), heads)
    assert out[-packed.WINDOW :].isnan().all() and out[: -packed.WINDOW].isfinite().all()
    left = slice(0, -packed.WINDOW)
    assert relative_error(out[left], expected[left]) < (1e-6 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize(("heads", "width", "dtype"), [(3, 12, torch.float32), (16, 80, torch.bfloat16)])
def test_lengthen(device, heads, width, dtype) -> None:
    qkv = torch.randn(7, 3 * heads, width, device=device).to(dtype)
    cos, sin = torch.randn(7, width // 2, device=device), torch.randn(7, width // 2, device=device)
    qkv[5:], cos[5:], sin[5:] = float("nan"), float("nan"), float("nan")
    ends = torch.tensor([0, 5], dtype=torch.int32, device=device)

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        packed_heads = qkv * 1
        return lengthen.kernel(packed_heads, cos, sin, ends), packed_heads

    out, left = replayed(device, make)
    expected_left = qkv.cpu().clone()
    expected = lengthen.reference(expected_left, cos.cpu(), sin.cpu(), ends.cpu())
    # The features that set padding apart are exact; rotations are rounded once.
    assert torch.equal(out[..., width:].cpu(), expected[..., width:])
    assert relative_error(out[..., :width], expected[..., :width]) < (1e-6 if dtype == torch.float32 else 8e-3)
    torch.testing.assert_close(left.cpu(), expected_left, equal_nan=True, atol=0, rtol=0)
