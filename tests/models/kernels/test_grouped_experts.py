"""Routing of a mixture, places of rows by expert, rows at their places, and their weighted sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.layers.moe import combine, expert_places, grouped_gemm, route
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


@pytest.mark.parametrize("rows", [5, 70])
def test_grouped_gemms(device, rows) -> None:
    """Experts without rows, with one, and with more than a tile, however large the tile is."""
    kind = sixteen_bits(device)
    stack = torch.randn(4, 64, 256, device=device).to(kind)
    experts = torch.where(torch.arange(rows) < 3, 1, 3)[:, None].to(device)
    experts[0] = 0
    _, ends = expert_places(experts, 4)
    x = torch.randn(rows, 256, device=device).to(kind)
    out = replayed(device, lambda: grouped_gemm.kernel(x, stack, ends))
    expected = torch.stack(
        [stack[int(e)].double() @ row.double() for e, row in zip(experts.sort(0).values, x, strict=True)]
    )
    assert relative_error(out, expected) < 3e-3


def test_a_shared_part_is_gated(device) -> None:
    kind = sixteen_bits(device)
    chosen, weights = torch.randn(6, WIDTH, device=device).to(kind), torch.rand(3, 2, device=device)
    shared, x = torch.randn(2, 3, WIDTH, device=device).to(kind).unbind(0)
    gate = x, (torch.randn(1, WIDTH, device=device) / WIDTH**0.5).to(kind)
    out = replayed(device, lambda: combine.kernel(chosen, weights, shared, None, gate))
    wide = combine.reference(*upcast(chosen, weights, shared), None, tuple(upcast(*gate)))
    assert relative_error(out, wide) < 4e-3


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
