"""Routing of a mixture, places of rows by expert, rows at their places, and their weighted sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.layers.moe import combine, expert_places, route
from tests.models.kernels.checking import relative_error, replayed, sixteen_bits, upcast
from tests.support.slow import slow

WIDTH = 700
"""No multiple of a block."""


def chosen(rows: int, num_experts: int, top_k: int) -> Tensor:
    return torch.rand(rows, num_experts).argsort(-1)[:, :top_k].contiguous()


ROUTINGS = {
    "one row": lambda: (chosen(1, 64, 6), 64),
    "experts without rows": lambda: (chosen(3, 64, 6), 64),
    "in one block": lambda: (chosen(19, 12, 5), 12),
    "in several blocks": lambda: (chosen(384, 7, 6), 7),
    "many rows": lambda: (chosen(520, 9, 8), 9),
    "all to the last experts": lambda: (torch.arange(5, 8).expand(40, 3).contiguous(), 8),
    "all to one expert": lambda: (torch.full((2049, 1), 2), 4),
    "all of padding to the first expert": lambda: (torch.cat((chosen(9, 12, 5), torch.zeros(7, 5).long())), 12),
}


QUICK = ("in one block", "in several blocks", "all of padding to the first expert")


@pytest.mark.parametrize("routing", [name if name in QUICK else slow(name) for name in ROUTINGS])
def test_places_equal_those_of_a_stable_sort(device, routing) -> None:
    experts, num_experts = ROUTINGS[routing]()
    given = experts.to(device)
    places, ends = replayed(device, lambda: expert_places.kernel(given, num_experts))
    assert places.dtype == torch.int64 and ends.dtype == torch.int32
    order = torch.argsort(experts.flatten(), stable=True)
    assert torch.equal(places.flatten().cpu()[order], torch.arange(experts.numel()))
    assert torch.equal(ends.cpu(), torch.bincount(experts.flatten(), minlength=num_experts).cumsum(0).int())
    for out, reference in zip((places, ends), expert_places.reference(experts, num_experts), strict=True):
        assert torch.equal(out.cpu(), reference)


def test_a_sum_is_taken_in_the_order_of_a_rows_experts_and_rounded_before_the_base_is_added(device) -> None:
    kind = sixteen_bits(device)
    places = torch.randperm(15).view(5, 3).to(device)
    y, weights = torch.randn(15, WIDTH, device=device).to(kind), torch.rand(5, 3, device=device)
    base = torch.randn(5, WIDTH, device=device).to(kind)
    out = replayed(device, lambda: combine.kernel(y, weights, base, places))
    exact = combine.reference(*upcast(y, weights, torch.zeros_like(base), places)).to(kind).to(device) + base
    # A sum that lies between two values to the last bit of float32 may go to either.
    assert (out != exact).float().mean() < 0.01
    assert relative_error(out, exact) < 1e-4
    assert torch.equal(out, replayed(device, lambda: combine.kernel(y, weights, base, places)))


def test_a_row_of_nan_stays_inside_the_stack(device) -> None:
    logits = torch.full((1, 2, 12), float("nan"), device=device)
    _, chosen = replayed(device, lambda: route.kernel(logits, None, 5))
    assert chosen.min() >= 0 and chosen.max() < 12
