"""The kernels over packed rows of the encoders against their references."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.layers import packed
from models.layers.packed import add_table_rows
from tests.models.kernels.checking import relative_error, replayed


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
