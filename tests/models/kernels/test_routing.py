"""Routing of a mixture, and the sum of its experts, against their references."""

from __future__ import annotations

import pytest
import torch

from models.layers.moe import route_softmax, router_logits
from tests.models.kernels.checking import relative_error, replayed
from tests.support.slow import slow


@pytest.mark.parametrize(
    ("rows", "width", "splits"),
    [slow(5, 2048, 32), (40, 200, 4), slow(100, 512, 8), slow(600, 2048, 16), slow(1100, 64, 1)],
)
def test_logits_are_as_exact_as_in_float32(device, rows, width, splits) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # The interpreter multiplies no bfloat16.
    x = torch.randn(rows, width + 8, device=device, dtype=dtype)[:, :width]
    weight = torch.randn(12, width, device=device)
    out = replayed(device, lambda: router_logits.kernel(x, weight))
    assert out.shape == (splits, rows, 12)
    assert relative_error(out.sum(0), x.double() @ weight.double().T) < 2e-6


def test_a_row_of_nan_stays_inside_the_stack(device) -> None:
    logits = torch.full((1, 2, 12), float("nan"), device=device)
    _, chosen = replayed(device, lambda: route_softmax.kernel(logits, 5))
    assert chosen.min() >= 0 and chosen.max() < 12
