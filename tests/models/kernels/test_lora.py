"""Adapters of mixed batches: the kernels against plain PyTorch, and what is computed against each row alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.layers.gemm import gemm, gemm_add_norm
from models.layers.kernels import gemm_configs, gpu
from models.layers.kernels.gemm_types import Choice, Shape, Tile, Variant
from models.layers.kernels.tiled_gemm import gemm_add_deferred_norm, split_gemm_add_norm, tiled_gemm
from models.layers.lora import TILE_UNITS, GemmLora, LoraPair, LoraRows, add_lora, rows_arrays
from models.layers.norms import DeferredNorm
from tests.models.kernels.checking import relative_error, replayed, sixteen_bits, upcast
from tests.support.slow import slow

SLOTS = 5
EPS = 1e-5
LIMIT = 8e-3
"""Of sums and norms behind them, which bfloat16 rounds three times."""


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
    tensors = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    return LoraRows(**tensors, in_order=slots == sorted(slots))


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
    slow([0], 1, 64, (32, 16, 16), 16),
    slow([-1, -1, -1], 1, 64, (32,), 16),
    ([3, -1, 3, 0, 1, 3, -1], 1, 512, (64, 16, 16), 16),
    ([2, 0, -1], 22, 64, (32, 16, 16), 32),
    slow([4, 4, 1, -1, 0], 8, 256, (48,), 16),
    slow([1] * (TILE_UNITS + 3) + [-1, 0], 1, 64, (32,), 16),
    ([1] * (TILE_UNITS + 1) + [0], 8, 32, (16,), 16),
    slow([0, 3, 3, -1, 3, 1], 22, 64, (64, 64, 64), 64),
    slow([1] * (2 * TILE_UNITS) + [4, 0, 4], 11, 32, (32, 16, 16), 16),
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
    kind = sixteen_bits(device)
    slots = [3, -1, 0, 3, 1]
    pair, rows = pair_of(device, kind, 256, (64, 32, 32), 32), rows_of(slots, device)
    x, y = (torch.randn(5 * 22, width, device=device).to(kind) for width in (256, 128))
    expected = by_hand(y.clone(), x, pair, slots)
    assert relative_error(replayed(device, lambda: add_lora.kernel(y.clone(), x, pair, rows)), expected) < 3e-3
    assert relative_error(add_lora.reference(y.clone(), x, pair, rows), expected) < 3e-3


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-1, SLOTS - 1), min_size=1, max_size=70), st.booleans())
def test_tiles_hold_each_unit_with_an_adapter_once(slots: list[int], twice: bool) -> None:
    """Also of a batch that stands behind itself."""
    rows = rows_of(slots, torch.device("cpu"))
    if twice:
        rows, slots = rows.twice(), slots + slots
        assert rows.slots.tolist() == slots
    seen = []
    for first, count, slot in rows.tiles.tolist():
        assert 0 <= count <= TILE_UNITS
        units = rows.order[first : first + count].tolist()
        assert all(slots[unit] == slot for unit in units)
        seen += units
    assert sorted(seen) == [unit for unit, slot in enumerate(slots) if slot >= 0]


FUSED = [
    ([-1, 0, 0, 3], 1, False),
    ([-1, -1, -1], 11, False),
    ([2] * (TILE_UNITS + 5), 11, False),
    ([-1, 0, 1, 1, 1, 2, 4], 11, True),
    ([-1, -1, 3], 4, True),
    ([0, 1, 2, 3, 4], 22, True),
]
"""Adapters of sorted units, rows of a unit, and whether the batch stands there twice."""
FUSED_TILES = [Tile(64, 32, 32, stages=3), Tile(16, 32, 64, stages=2, swap=True), Tile(128, 64, 32, 8, 2, tma=True)]


QUICK = {(3, 0), (4, 1)}
FUSED_CASES = [
    (*case, tile) if (i, j) in QUICK else slow(*case, tile)
    for i, case in enumerate(FUSED)
    for j, tile in enumerate(FUSED_TILES)
]


class AdaptedGemm:
    """Operands of a GEMM of 128 inputs with adapters, and its product in float64."""

    def __init__(
        self, device: torch.device, slots: list[int], unit: int, widths: tuple[int, ...], *, twice: bool
    ) -> None:
        kind = sixteen_bits(device)
        pair, rows = pair_of(device, kind, 128, widths, 16), rows_of(slots, device)
        self.slots, self.unit = slots * (2 if twice else 1), unit
        self.lora = GemmLora(pair, rows.twice() if twice else rows)
        count, columns = len(self.slots) * unit, sum(widths)
        self.x = torch.randn(count, 128, device=device).to(kind)
        self.weight = (torch.randn(columns, 128, device=device) / 8).to(kind)
        self.bias, self.norm = (torch.randn(columns, device=device).to(kind) for _ in range(2))
        self.residual = torch.randn(count, columns, device=device).to(kind)

    def product(self, x: Tensor) -> Tensor:
        x, weight, bias = upcast(x, self.weight, self.bias)
        return by_hand(x @ weight.T + bias, x, self.lora.pair, self.slots)

    def sum_and_norm(self) -> tuple[Tensor, Tensor]:
        total = self.product(self.x) + upcast(self.residual)[0]
        return total * torch.rsqrt(total.square().mean(1, keepdim=True) + EPS) * upcast(self.norm)[0], total


@pytest.mark.parametrize("slots, unit, twice, tile", FUSED_CASES)
def test_a_tiled_gemm_adds_the_adapters_of_its_rows(
    device: torch.device, slots: list[int], unit: int, twice: bool, tile: Tile
) -> None:
    given = AdaptedGemm(device, slots, unit, (64, 64, 64), twice=twice)
    out = replayed(device, lambda: tiled_gemm(given.x, given.weight, given.bias, tile, lora=given.lora))
    assert relative_error(out, given.product(given.x)) < 3e-3
    plain = replayed(device, lambda: tiled_gemm(given.x, given.weight, given.bias, tile))
    untouched = [row for row in range(len(given.x)) if given.slots[row // unit] < 0]
    assert torch.equal(out[untouched], plain[untouched])


@pytest.mark.parametrize("tile", [FUSED_TILES[0], *map(slow, FUSED_TILES[1:])], ids=str)
def test_a_tiled_gemm_scales_by_a_norm_that_waits_and_adds_adapters(device: torch.device, tile: Tile) -> None:
    given = AdaptedGemm(device, [-1, 0, 0, 3, 4], 11, (64, 64, 64), twice=True)
    parts = given.x.float().square().view(len(given.x), 2, 64).sum(2)
    scaled = upcast(given.x)[0] * torch.rsqrt(upcast(given.x)[0].square().mean(1, keepdim=True) + EPS)
    waiting = DeferredNorm(given.x, parts, EPS)
    out = replayed(device, lambda: tiled_gemm(waiting, given.weight, given.bias, tile, lora=given.lora))
    assert relative_error(out, given.product(scaled)) < 3e-3


@pytest.mark.parametrize("slots, unit, twice, tile", FUSED_CASES)
def test_adapters_before_a_residual_and_a_norm(
    device: torch.device, slots: list[int], unit: int, twice: bool, tile: Tile
) -> None:
    given = AdaptedGemm(device, slots, unit, (64,), twice=twice)
    expected = given.sum_and_norm()
    operands = given.x, given.weight, given.bias, given.residual, given.norm, EPS
    for split in (1, 2):
        made = replayed(device, lambda s=split: split_gemm_add_norm(*operands, split=s, tile=tile, lora=given.lora))
        assert all(relative_error(out, one) < LIMIT for out, one in zip(made, expected, strict=True))
    waiting, total = replayed(device, lambda: gemm_add_deferred_norm(*operands, tile, lora=given.lora))
    assert relative_error(total, expected[1]) < LIMIT
    assert relative_error(waiting.normed(), expected[0]) < LIMIT


def few_sms(monkeypatch: pytest.MonkeyPatch, device: torch.device, count: int) -> None:
    """Launches as for a GPU with so few multiprocessors, so that few programs make A x."""
    real = gpu.INTERPRETER if device.type == "cpu" else gpu.probe()
    monkeypatch.setattr(gpu, "probe", lambda: replace(real, num_sms=count))


@pytest.mark.slow
@pytest.mark.parametrize("sms", [9, 132])
def test_few_programs_make_a_x_of_many_adapters_in_every_launch(
    device: torch.device, sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches of two sizes take turns; each counts its programs where the last of its size has left off."""
    few_sms(monkeypatch, device, sms)
    given = AdaptedGemm(device, [-1, 0, 0, 1, 2, 3, 3, 4], 11, (64, 64, 64), twice=True)
    others = [AdaptedGemm(device, [1, 2], 4, (64,), twice=False) for _ in range(2)]
    for other in others:
        other.lora = GemmLora(other.lora.pair, replace(other.lora.rows, counters=given.lora.rows.counters))

    def launches() -> list[Tensor]:
        made = []
        for one in (given, *others, given, others[0], given):
            made.append(tiled_gemm(one.x, one.weight, one.bias, FUSED_TILES[0], lora=one.lora))
        return made

    for _ in range(3):
        for one, out in zip((given, *others, given, others[0], given), replayed(device, launches), strict=True):
            assert relative_error(out, one.product(one.x)) < 3e-3


@pytest.mark.parametrize("slots", [[-1, 0, 0, 3], slow([3, 0, -1, 0]), slow([2])])
@pytest.mark.parametrize(
    "variant",
    [
        None,
        slow(Variant(FUSED_TILES[0])),
        slow(Variant(FUSED_TILES[0], split=2)),
        Variant(FUSED_TILES[0], deferred=True),
    ],
)
def test_adapters_of_any_batch_by_any_kernel(device: torch.device, slots: list[int], variant: Variant | None) -> None:
    """Sorted or not, in the GEMM or beside it, a vector or rows."""
    given = AdaptedGemm(device, slots, 1, (64,), twice=False)
    assert given.lora.rows.in_order == (slots == sorted(slots))
    choices = () if variant is None else (Choice(1, 64, variant),)
    shapes = [Shape(kind, 128, 64) for kind in ("plain", "add_norm")]
    with gemm_configs.using(dict.fromkeys(shapes, choices)):
        out = replayed(device, lambda: gemm.kernel(given.x, given.weight, given.bias, lora=given.lora))
        assert relative_error(out, given.product(given.x)) < 3e-3
        operands = given.x, given.weight, given.bias, given.residual, given.norm, EPS, given.lora
        before = given.residual.clone()
        for deferrable in (False, True):
            normed, total = replayed(device, lambda d=deferrable: gemm_add_norm.kernel(*operands, deferrable=d))
            normed = normed.normed() if isinstance(normed, DeferredNorm) else normed
            for made, expected in zip((normed, total), given.sum_and_norm(), strict=True):
                assert relative_error(made, expected) < LIMIT
        assert torch.equal(given.residual, before)
    reference = gemm_add_norm.reference(*operands)
    assert all(relative_error(out, one) < LIMIT for out, one in zip(reference, given.sum_and_norm(), strict=True))
