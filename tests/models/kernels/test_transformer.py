"""The kernels of transformer blocks and of packed rows against their references."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.layers import packed
from models.layers.fused import rotary_dense_attention
from models.layers.norms import add_rms_norm
from models.layers.packed import add_table_rows
from tests.models.kernels.checking import relative_error, replayed, wide_in_place
from tests.support.slow import slow

EPS = 1e-5


LIMIT = 8e-3


def test_residuals_need_not_lie_together(device) -> None:
    """The kept rows of every sequence: a view with gaps."""
    whole, weight = torch.randn(3, 11, 96, device=device), torch.randn(96, device=device)
    for residual in (whole[:, 7:11], whole[:, ::3], whole.transpose(0, 1)):
        x = torch.randn(residual.shape, device=device)
        normed, total = replayed(device, lambda: add_rms_norm.kernel(x, residual, weight, EPS))  # noqa: B023
        expected_normed, expected_total = add_rms_norm.reference(*wide_in_place(x, residual, weight), EPS)
        assert relative_error(normed, expected_normed) < 1e-6
        assert relative_error(total, expected_total) < 1e-6


@pytest.mark.parametrize(
    ("sequences", "length", "heads", "kv_heads", "width", "first", "heads_here"),
    [
        slow(3, 11, 4, 2, 16, 0, 1),
        (2, 11, 4, 2, 16, 7, 2),
        slow(2, 5, 4, 2, 12, 0, None),
        slow(2, 11, 16, 2, 128, 0, 8),
    ],
)
def test_local_attention(device, sequences, length, heads, kv_heads, width, first, heads_here) -> None:
    qkv = torch.randn(sequences, length, heads + 2 * kv_heads, width, device=device)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=2)
    q = q[:, first:]
    cos, sin = torch.randn(length, width // 2, device=device), torch.randn(length, width // 2, device=device)
    out = replayed(device, lambda: rotary_dense_attention.kernel(q, k, v, cos, sin, first, heads_here=heads_here))
    reference = rotary_dense_attention.reference(*wide_in_place(q, k, v, cos, sin), first)
    assert relative_error(out, reference) < 2e-6


@pytest.mark.gpu
@pytest.mark.parametrize("sequences", [2, 16, 128])
@pytest.mark.parametrize("length", [5, 11])
def test_local_attention_at_size(sequences, length) -> None:
    device = torch.device("cuda")
    qkv = torch.randn(sequences, length, 20, 128, device=device, dtype=torch.bfloat16)
    q, k, v = qkv.split((16, 2, 2), dim=2)
    angles = torch.rand(length, 64, device=device) * 6
    cos, sin = angles.cos(), angles.sin()
    out = replayed(device, lambda: rotary_dense_attention.kernel(q, k, v, cos, sin, 0))
    reference = rotary_dense_attention.reference(*wide_in_place(q, k, v, cos, sin), 0)
    assert relative_error(out, reference) < LIMIT


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
