"""Low-rank adapters (LoRA, arXiv:2106.09685) of linear layers, several in one batch: y += B (A x), where each row has
the A and B of its own slot or none.

Slots are rows of stacked tensors at fixed addresses, so that captured graphs stay valid while adapters come and go. A
row without an adapter is not touched. B includes the factor alpha / r.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from models.layers.norms import Normed
from models.layers.op import op

TILE_UNITS = 16
"""Number of units of one adapter that a tile holds at most."""


@dataclass(frozen=True, eq=False)
class LoraPair:
    """A and B for linear layers that read the same x and whose outputs lie one after the other, with `widths` columns
    each (q, k and v).

    a [slots, len(widths) * rank, K], the layers' own A one after the other; b [slots, sum(widths), rank]. Both have any
    stride between slots and are contiguous inside one. Ranks below `rank` are filled with zeros.
    """

    a: Tensor
    b: Tensor
    widths: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.b.shape[2]


class Counters:
    """Counters of kernels, one for each period: a launch brings it from one multiple of its period to the next."""

    def __init__(self) -> None:
        self._of: dict[int, Tensor] = {}

    def of(self, period: int, device: torch.device) -> Tensor:
        """int64 [1], 0 at first."""
        if period not in self._of:
            self._of[period] = torch.zeros(1, dtype=torch.int64, device=device)
        return self._of[period]


@dataclass(frozen=True, eq=False)
class LoraRows:
    """Which slot each unit of a batch uses. A unit is a group of consecutive rows of x: x has the same number of rows
    for each entry of `slots`.

    slots int32 [units], -1 for none. For kernels: order int32 [units], units sorted by slot; tiles int32 [tiles, 3],
    (first, count, slot) of each run in `order`, of TILE_UNITS units at most; unused tiles have count 0. in_order: the
    units are sorted already, so that `order` counts up; in a batch that stands there twice, in each half. counters: of
    the kernels that use these rows, which run one after the other.
    """

    slots: Tensor
    order: Tensor
    tiles: Tensor
    in_order: bool = False
    counters: Counters = field(default_factory=Counters)

    def twice(self) -> LoraRows:
        """The rows of a batch that holds the same units twice, one after the other."""
        units = self.slots.shape[0]
        behind = self.tiles.clone()
        behind[:, 0] += units
        order, tiles = torch.cat((self.order, self.order + units)), torch.cat((self.tiles, behind))
        # Last: kernels read order and tiles before what stands ahead of them has ended, but not before this has begun.
        slots = self.slots.repeat(2)
        return LoraRows(slots, order, tiles, self.in_order, self.counters)


@dataclass(frozen=True, eq=False)
class LoraLayer:
    """Adapters of an attention's projections."""

    qkv: LoraPair
    out: LoraPair


@dataclass(frozen=True, eq=False)
class GemmLora:
    """Adapters of one GEMM, and the rows of the batch that it multiplies."""

    pair: LoraPair
    rows: LoraRows


@dataclass(frozen=True, eq=False)
class StackLora:
    """Adapters of a stack's layers, and the rows of the batch that runs through it."""

    layers: Sequence[LoraLayer]
    rows: LoraRows

    def qkv(self, layer: int) -> GemmLora:
        return GemmLora(self.layers[layer].qkv, self.rows)

    def out(self, layer: int) -> GemmLora:
        return GemmLora(self.layers[layer].out, self.rows)


def num_tiles(units: int, slots: int) -> int:
    """Number of tiles that a batch of `units` units needs at most."""
    return min(units, slots) + units // TILE_UNITS


def rows_arrays(slots: np.ndarray, num_slots: int) -> dict[str, np.ndarray]:
    """The fields of LoraRows as host arrays. slots: int32 [units], -1 for none."""
    slots = slots.astype(np.int32)
    order = np.argsort(slots, kind="stable").astype(np.int32)
    tiles = np.zeros((num_tiles(len(slots), num_slots), 3), dtype=np.int32)
    made, first = 0, int((slots < 0).sum())
    for slot, count in zip(*np.unique(slots[slots >= 0], return_counts=True), strict=True):
        for start in range(first, first + count, TILE_UNITS):
            tiles[made] = start, min(TILE_UNITS, first + count - start), slot
            made += 1
        first += count
    return {"slots": slots, "order": order, "tiles": tiles}


def _add_lora_host(y: Tensor, x: Normed, pair: LoraPair, rows: LoraRows) -> Tensor:
    """Applies each adapter once, to its own rows. Does nothing on the meta device, whose rows have no slots."""
    if y.is_meta:
        return y
    inputs, outputs, of_row = _flat(y, x, rows)
    for slot in of_row.unique().tolist():
        if slot >= 0:
            index = (of_row == slot).nonzero()[:, 0]
            outputs[index] += _delta(inputs[index], pair, slot)
    return y


@op(cuda="models.layers.kernels.lora:add_lora", cpu=_add_lora_host)
def add_lora(y: Tensor, x: Normed, pair: LoraPair, rows: LoraRows) -> Tensor:
    """y [..., N], contiguous, += the adapters' B (A x) of x [..., K], in place; returns y. A x is rounded to x's dtype,
    as in the published layer."""
    inputs, outputs, of_row = _flat(y, x, rows)
    for slot in range(pair.a.shape[0]):
        outputs.copy_(torch.where((of_row == slot)[:, None], outputs + _delta(inputs, pair, slot), outputs))
    return y


def _flat(y: Tensor, x: Normed, rows: LoraRows) -> tuple[Tensor, Tensor, Tensor]:
    """x [n, K], y [n, N] as a view, and the slot of every row [n]."""
    x = x if isinstance(x, Tensor) else x.normed()
    inputs, outputs = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
    units = rows.slots.shape[0]
    return inputs, outputs, rows.slots.repeat_interleave(inputs.shape[0] // units if units else 1)


def _delta(x: Tensor, pair: LoraPair, slot: int) -> Tensor:
    hidden = (x @ pair.a[slot].T).split(pair.rank, dim=1)
    parts = pair.b[slot].split(pair.widths)
    return torch.cat([h @ b.T for h, b in zip(hidden, parts, strict=True)], dim=1)
