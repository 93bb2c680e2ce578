"""Adapters of mixed batches: the kernels against plain PyTorch, and what is computed against each row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.layers.deferred_norm import DeferredNorm
from models.layers.lora import TILE_UNITS, LoraPair, LoraRows, add_lora, rows_arrays
from tests.models.kernels.checking import relative_error, replayed, upcast

SLOTS = 5


def pair_of(device: torch.device, dtype: torch.dtype, inputs: int, widths: tuple[int, ...], rank: int) -> LoraPair:
    """Slots that lie apart, as in a block that holds other layers too."""
    height, columns = len(widths) * rank, sum(widths)
    table = torch.randn(SLOTS, height * inputs + columns * rank + 64, device=device) * inputs**-0.5
    table = table.to(dtype)
    a = table[:, : height * inputs].view(SLOTS, height, inputs)
    b = table[:, height * inputs : height * inputs + columns * rank].view(SLOTS, columns, rank)
    return LoraPair(a, b, widths)


def rows_of(slots: list[int], device: torch.device) -> LoraRows:
    arrays = rows_arrays(np.array(slots, dtype=np.int32), SLOTS)
    return LoraRows(**{name: torch.from_numpy(array).to(device) for name, array in arrays.items()})


def wide(pair: LoraPair, rows: LoraRows) -> tuple[LoraPair, LoraRows]:
    a, b = upcast(pair.a, pair.b)
    return LoraPair(a, b, pair.widths), LoraRows(rows.slots.cpu(), rows.order.cpu(), rows.tiles.cpu())


def by_hand(y: Tensor, x: Tensor, pair: LoraPair, slots: list[int]) -> Tensor:
    """Each row for itself, with the matrix that its adapter adds, in float64."""
    unit = x.shape[0] // len(slots)
    y, x, a, b = upcast(y, x, pair.a, pair.b)
    for row in range(x.shape[0]):
        if (slot := slots[row // unit]) >= 0:
            layers = zip(a[slot].split(pair.rank), b[slot].split(pair.widths), strict=True)
            y[row] += torch.cat([upper @ lower for lower, upper in layers]) @ x[row]
    return y


CASES = [
    ([0], 1, 64, (32, 16, 16), 16),
    ([-1, -1, -1], 1, 64, (32,), 16),
    ([3, -1, 3, 0, 1, 3, -1], 1, 512, (64, 16, 16), 16),
    ([2, 0, -1], 22, 64, (32, 16, 16), 32),
    ([4, 4, 1, -1, 0], 8, 256, (48,), 16),
    ([1] * (TILE_UNITS + 3) + [-1, 0], 1, 64, (32,), 16),
    ([1] * (TILE_UNITS + 1) + [0], 8, 32, (16,), 16),
    ([0, 3, 3, -1, 3, 1], 22, 64, (64, 64, 64), 64),
    ([1] * (2 * TILE_UNITS) + [4, 0, 4], 11, 32, (32, 16, 16), 16),
]


@pytest.mark.parametrize("slots, unit, inputs, widths, rank", CASES)
def test_each_row_gets_what_its_own_adapter_adds(
    device: torch.device, slots: list[int], unit: int, inputs: int, widths: tuple[int, ...], rank: int
) -> None:
    pair, rows = pair_of(device, torch.float32, inputs, widths, rank), rows_of(slots, device)
    x, y = (torch.randn(len(slots) * unit, width, device=device) for width in (inputs, sum(widths)))
    expected = by_hand(y.clone(), x, pair, slots)
    out = replayed(device, lambda: add_lora.kernel(y.clone(), x, pair, rows))
    assert relative_error(out, expected) < 2e-6
    assert relative_error(add_lora.reference(y.clone(), x, pair, rows), expected) < 2e-6
    wide_pair, wide_rows = wide(pair, rows)
    assert relative_error(add_lora(*upcast(y.clone(), x), wide_pair, wide_rows), expected) < 1e-12
    untouched = [row for row in range(len(x)) if slots[row // unit] < 0]
    assert torch.equal(out[untouched], y[untouched])


def test_tiles_without_units_between_others_are_passed_over(device: torch.device) -> None:
    """As the fallback of the flow solve has them."""
    pair, rows, slots = pair_of(device, torch.float32, 32, (32,), 16), rows_of([3, -1, 3, 1], device), [3, -1, 3, 1]
    assert rows.tiles[:, 1].tolist()[-1] == 0
    x, y = (torch.randn(8 * 11, 32, device=device) for _ in range(2))
    out = replayed(device, lambda: add_lora.kernel(y.clone(), x, pair, rows.twice()))
    assert relative_error(out, by_hand(y.clone(), x, pair, slots + slots)) < 2e-6


def test_a_norm_that_waits_is_applied_to_what_the_adapters_read(device: torch.device) -> None:
    pair, rows = pair_of(device, torch.float32, 64, (32, 16, 16), 16), rows_of([2, -1, 0], device)
    x, y = torch.randn(3, 64, device=device), torch.randn(3, 64, device=device)
    parts = torch.stack((x[:, :40].square().sum(1), x[:, 40:].square().sum(1)), dim=1)
    scaled = x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5)
    expected = by_hand(y.clone(), scaled, pair, [2, -1, 0])
    out = replayed(device, lambda: add_lora.kernel(y.clone(), DeferredNorm(x, parts, 1e-5), pair, rows))
    assert relative_error(out, expected) < 2e-6
    assert relative_error(add_lora.reference(y.clone(), DeferredNorm(x, parts, 1e-5), pair, rows), expected) < 2e-6


def test_sixteen_bits_are_rounded_where_the_published_layer_rounds(device: torch.device) -> None:
    # The interpreter has no bfloat16 arithmetic of its own; float16 takes the same paths.
    kind = torch.bfloat16 if device.type == "cuda" else torch.float16
    slots = [3, -1, 0, 3, 1]
    pair, rows = pair_of(device, kind, 256, (64, 32, 32), 32), rows_of(slots, device)
    x, y = (torch.randn(5 * 22, width, device=device).to(kind) for width in (256, 128))
    expected = by_hand(y.clone(), x, pair, slots)
    assert relative_error(replayed(device, lambda: add_lora.kernel(y.clone(), x, pair, rows)), expected) < 3e-3
    assert relative_error(add_lora.reference(y.clone(), x, pair, rows), expected) < 3e-3


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=70))
def test_tiles_hold_each_unit_with_an_adapter_once(slots: list[int]) -> None:
    arrays = rows_arrays(np.array(slots), SLOTS)
    seen = []
    for first, count, slot in arrays["tiles"]:
        assert 0 <= count <= TILE_UNITS
        units = arrays["order"][first : first + count]
        assert all(slots[unit] == slot for unit in units)
        seen += list(units)
    assert sorted(seen) == [unit for unit, slot in enumerate(slots) if slot >= 0]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=20))
def test_a_batch_behind_itself_uses_the_same_adapters(slots: list[int]) -> None:
    twice = rows_of(slots, torch.device("cpu")).twice()
    assert twice.slots.tolist() == slots + slots
    seen = [
        (unit, slot)
        for first, count, slot in twice.tiles.tolist()
        for unit in twice.order[first : first + count].tolist()
    ]
    assert sorted(seen) == [(unit, slot) for unit, slot in enumerate(slots + slots) if slot >= 0]
