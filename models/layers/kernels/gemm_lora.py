"""Adapters inside a tiled GEMM: the first programs of its grid make A x, the shrink, and the others add B (A x), the
expansion, to their tiles before they store them.

Programs of a grid start in the order of their numbers, so all of the shrink have started before any other waits for
them. The others multiply meanwhile; a tile without adapters waits for nothing. In kernels of their own, the shrink's
launches alone took 7.5 % of a step that had no adapter at all.

Reference: models.layers.lora.add_lora. Units are sorted by adapter, so that a tile has few of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.gemm_configs import fitted_for
from models.layers.kernels.gemm_types import Tile
from models.layers.kernels.gpu import current_gpu
from models.layers.kernels.launch import wait_for_previous
from models.layers.kernels.lora import LINE, ask_for, edges, padded
from models.layers.lora import GemmLora

_MOST_RANK = 32
_SINGLE_ROWS, _DEPTH = 16, 64
"""Rows of a block of the shrink where a unit is one row, and inputs that a block multiplies at a time."""
_LEAST_SHARE, _MOST_SHARE = 512, 1024
"""Inputs of a block, if these divide all inputs, in tiles of few rows and of many, which take longer."""
_MOST_STAGES = 6
_LEAST_PROGRAMS, _MOST_PROGRAMS = 8, 64
_SMALL_WARPS = 4
_MOST_REGISTERS = 128
"""Of a thread, for what a tile holds while it adds adapters. With 160, and so more adapters at a time, 64 streams with
11 of them were slower on an H100."""
_RESERVED = 1 << 10
"""Bytes of shared memory that CUDA takes of each thread block."""
_CONSTANTS = "RANK WIDTH A_SHARE SECOND THIRD PADDED GROUP SHRINK_M SHRINK_R SHRINK_K SHRINK_STAGES"
WITHOUT_LORA = dict.fromkeys(_CONSTANTS.split(), 0)
"""The constants of a GEMM without adapters."""


class Lora(NamedTuple):
    """Adapters inside a kernel: the pointers of Adapters, strides between the slots of A and of B, rows of x, rows of a
    unit, and numbers of adapters' tiles, of programs of the shrink and of tiles of the GEMM."""

    x: Any
    a: Any
    b: Any
    tiles: Any
    hidden: Any
    arrivals: Any
    stride_a: Any
    stride_b: Any
    rows: Any
    unit: Any
    num_tiles: Any
    programs: Any
    gemm_tiles: Any


class Met(NamedTuple):
    """Adapters of a tile of rows: [PADDED] the indices of the adapters' tiles that have some of them, PADDED for the
    others; the least of them; first units, numbers of units and slots of GROUP tiles from there on, [GROUP]."""

    indices: Any
    index: Any
    first_unit: Any
    units: Any
    slot: Any


@triton.jit
def shrink(
    lora,
    squares_ptr,
    stride_x,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    A_SHARE: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    SQUARES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """What one program of the shrink makes of A x: blocks of BLOCK_M rows of one adapter over A_SHARE inputs, dealt to
    the programs in turn. hidden float32 [shares, rows, WIDTH]. SQUARES > 0: rows are scaled by the squares of their
    inputs, [rows, SQUARES]. The first block's A and B are brought into the L2 cache."""
    SHARES: tl.constexpr = K // A_SHARE
    every = tl.arange(0, PADDED)
    entries = lora.tiles + every * 3
    first = tl.load(entries, mask=every < lora.num_tiles, other=0) * lora.unit
    count = tl.load(entries + 1, mask=every < lora.num_tiles, other=0) * lora.unit
    slots = tl.load(entries + 2, mask=every < lora.num_tiles, other=0)
    blocks = (count + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(blocks, 0)
    items = tl.sum(blocks, 0) * SHARES
    r = tl.arange(0, BLOCK_R)
    used = r < WIDTH
    if PDL and tl.program_id(0) < items:
        own = every == tl.sum((ends <= tl.program_id(0) // SHARES).to(tl.int32), 0)
        slot = tl.sum(tl.where(own, slots, 0), 0).to(tl.int64)
        a_line = tl.arange(0, triton.next_power_of_2((A_SHARE + LINE - 1) // LINE)) * LINE
        first_a = lora.a + slot * lora.stride_a + tl.program_id(0) % SHARES * A_SHARE
        lines = first_a + r[:, None] * K + a_line[None, :]
        ask_for(tl.where(used[:, None] & (a_line < A_SHARE)[None, :], lines, first_a))
        if tl.program_id(0) % SHARES == 0:
            b_line = tl.arange(0, triton.next_power_of_2((N * RANK + LINE - 1) // LINE)) * LINE
            ask_for(lora.b + slot * lora.stride_b + tl.where(b_line < N * RANK, b_line, 0))
    wait_for_previous(PDL)
    for item in range(tl.program_id(0), items, lora.programs):
        block = item // SHARES
        own = every == tl.sum((ends <= block).to(tl.int32), 0)
        begin = tl.sum(tl.where(own, first + (block - ends + blocks) * BLOCK_M, 0), 0)
        end = tl.sum(tl.where(own, first + count, 0), 0)
        slot = tl.sum(tl.where(own, slots, 0), 0).to(tl.int64)
        m = begin + tl.arange(0, BLOCK_M)
        here = m < end
        k = item % SHARES * A_SHARE + tl.arange(0, BLOCK_K)
        x_rows = lora.x + m[:, None].to(tl.int64) * stride_x + k[None, :]
        a_rows = lora.a + slot * lora.stride_a + r[None, :] * K + k[:, None]
        acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for start in tl.range(0, A_SHARE, BLOCK_K, num_stages=STAGES):
            x = tl.load(x_rows + start, mask=here[:, None], other=0.0)
            a = tl.load(a_rows + start, mask=used[None, :], other=0.0)
            acc = tl.dot(x, a, acc=acc)
        if SQUARES > 0:
            part = tl.arange(0, triton.next_power_of_2(SQUARES))[None, :]
            squares = tl.load(
                squares_ptr + m[:, None] * SQUARES + part, mask=here[:, None] & (part < SQUARES), other=0.0
            )
            acc *= tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
        place = lora.hidden + (item % SHARES * lora.rows + m[:, None]).to(tl.int64) * WIDTH + r[None, :]
        tl.store(place, acc, mask=here[:, None] & used[None, :])
    tl.debug_barrier()
    tl.atomic_add(lora.arrivals, lora.gemm_tiles + 1, sem="release")


@triton.jit
def _wait_for_shrink(lora):
    """A program of the shrink counts gemm_tiles + 1 when it has ended, a tile 1 when it need not wait any longer. So
    the counter comes to a multiple of `period` at the end of each launch and need not be cleared."""
    all_ended = lora.programs.to(tl.int64) * (lora.gemm_tiles + 1)
    period = all_ended + lora.gemm_tiles
    while tl.atomic_add(lora.arrivals, 0, sem="acquire") % period < all_ended:
        pass
    tl.debug_barrier()


@triton.jit
def _met_from(index, indices, lora, GROUP: tl.constexpr):
    tile = index + tl.arange(0, GROUP)
    entry = lora.tiles + tile * 3
    first = tl.load(entry, mask=tile < lora.num_tiles, other=0)
    count = tl.load(entry + 1, mask=tile < lora.num_tiles, other=0)
    slot = tl.load(entry + 2, mask=tile < lora.num_tiles, other=0).to(tl.int64)
    return Met(indices, index, first, count, slot)


@triton.jit
def adapters_met(lora, first_row, PADDED: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Met of a tile of BLOCK_M rows."""
    every = tl.arange(0, PADDED)
    first = tl.load(lora.tiles + every * 3, mask=every < lora.num_tiles, other=0) * lora.unit
    count = tl.load(lora.tiles + every * 3 + 1, mask=every < lora.num_tiles, other=0) * lora.unit
    own = (count > 0) & (first < first_row + BLOCK_M) & (first + count > first_row)
    indices = tl.where(own, every, PADDED)
    return _met_from(tl.min(indices, 0), indices, lora, GROUP)


@triton.jit
def _b_of(met, b_tile, stride_b, RANK: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr):
    """B of GROUP adapters, [GROUP * RANK, BLOCK_N]. b_tile: where the tile's columns lie in a slot, [RANK, BLOCK_N]."""
    b = tl.load(b_tile[None] + (met.slot * stride_b)[:, None, None], mask=(met.units > 0)[:, None, None], other=0.0)
    return tl.reshape(b, (GROUP * RANK, BLOCK_N))


@triton.jit
def expand(
    acc,
    lora,
    met,
    first_row,
    first_column,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARES: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """acc float32 [BLOCK_M, BLOCK_N] of a tile, whose rows and columns begin at these, plus B (A x) of its rows, for
    GROUP adapters at a time. SECOND, THIRD: the columns where the second and the third layer begin."""
    if met.index < PADDED:
        n = first_column + tl.arange(0, BLOCK_N)
        r = tl.arange(0, RANK)
        b_tile = lora.b + n[None, :] * RANK + r[:, None]
        b = _b_of(met, b_tile, lora.stride_b, RANK, GROUP, BLOCK_N)
        _wait_for_shrink(lora)
        m = first_row + tl.arange(0, BLOCK_M)
        part = (first_column >= SECOND).to(tl.int32) + (first_column >= THIRD).to(tl.int32)
        sources = lora.hidden + m[:, None].to(tl.int64) * WIDTH + part * RANK + r[None, :]
        total = tl.zeros((BLOCK_M, RANK), tl.float32)
        for share in tl.static_range(SHARES):
            # Not by the L1 cache, which may hold what was there before.
            source = sources + share * lora.rows.to(tl.int64) * WIDTH
            total += tl.load(source, mask=m[:, None] < lora.rows, other=0.0, cache_modifier=".cg")
        hidden = total.to(b.dtype)[:, None, :]
        while met.index < PADDED:
            # Rows without an adapter have no A x: what lies there is not read into a product.
            begin, end = met.first_unit * lora.unit, (met.first_unit + met.units) * lora.unit
            own = (m[:, None] >= begin[None, :]) & (m[:, None] < end[None, :])
            of_group = tl.reshape(tl.where(own[:, :, None], hidden, 0.0), (BLOCK_M, GROUP * RANK))
            following = tl.min(tl.where(met.indices >= met.index + GROUP, met.indices, PADDED), 0)
            met = _met_from(following, met.indices, lora, GROUP)
            next_b = _b_of(met, b_tile, lora.stride_b, RANK, GROUP, BLOCK_N)
            acc = tl.dot(of_group, b, acc=acc)
            b = next_b
    tl.atomic_add(lora.arrivals, 1, sem="relaxed")
    return acc


class Adapters(NamedTuple):
    """What a launch of a tiled GEMM needs for its adapters."""

    pointers: tuple[Tensor, ...]
    """x [n, K]; the stacked A and B; the adapters' tiles; hidden float32 [shares, n, width of A], written only for rows
    with an adapter; arrivals int64 [1] (_wait_for_shrink)."""
    sizes: tuple[int, ...]
    """Number of tiles, rows of a unit, programs of the shrink, and the strides between slots of A and of B."""
    constants: dict[str, int]


def takes_lora(lora: GemmLora, tile: Tile) -> bool:
    """Whether a GEMM of this tile adds these adapters: each of its programs in the columns of one layer, and, as was
    measured on an H100, of ranks whose product fits into registers beside its own."""
    return (
        current_gpu().capability == (9, 0)
        and lora.rows.in_order
        and lora.rows.tiles.shape[0] > 0
        and lora.pair.rank <= _MOST_RANK
        and not any(width % tile.columns for width in lora.pair.widths)
    )


def beside_shrink(tile: Tile, programs: int) -> tuple[Tile, int]:
    """For a GEMM of so many programs: its tile, and the number of programs of the shrink, as many as do not lengthen
    the waves of the GEMM; one that finds nothing to do ends at once. Small tiles have so few stages, where no place
    would be left, that two of them run on a multiprocessor."""
    gpu = current_gpu()
    free = -programs % gpu.num_sms
    if free < _LEAST_PROGRAMS and tile.warps <= _SMALL_WARPS:
        tile = fitted_for(tile, replace(gpu, shared_memory=gpu.shared_memory // 2 - _RESERVED))
        free = -programs % (2 * gpu.num_sms)
    return tile, min(max(free, _LEAST_PROGRAMS), _MOST_PROGRAMS)


def adapters(x: Tensor, lora: GemmLora, tile: Tile, programs: int, gemm_tiles: int) -> Adapters:
    """For a launch of a GEMM of x [n, K] in so many tiles, with so many programs of the shrink."""
    pair, rows = lora.pair, lora.rows
    count, depth, width = *x.shape, pair.a.shape[1]
    unit = count // rows.slots.shape[0]
    block_m = _SINGLE_ROWS if unit == 1 else 128 if tile.rows >= 128 else 64
    block_r, block_k = max(16, triton.next_power_of_2(width)), min(_DEPTH, tile.depth)
    share = _MOST_SHARE if tile.rows >= 128 else _LEAST_SHARE
    shares = depth // share if depth % share == 0 else 1
    second, third = edges(pair)
    hidden = torch.empty((shares, count, width), device=x.device, dtype=torch.float32)
    arrivals = rows.counters.of(programs * (gemm_tiles + 1) + gemm_tiles, x.device)
    constants = {
        "RANK": pair.rank,
        "WIDTH": width,
        "A_SHARE": depth // shares,
        "SECOND": second,
        "THIRD": third,
        "PADDED": padded(rows.tiles.shape[0]),
        "GROUP": _group(tile, pair.rank),
        "SHRINK_M": block_m,
        "SHRINK_R": block_r,
        "SHRINK_K": block_k,
        "SHRINK_STAGES": max(2, min(_MOST_STAGES, _elements(tile) // ((block_m + block_r) * block_k))),
    }
    pointers = x, pair.a, pair.b, rows.tiles, hidden, arrivals
    sizes = rows.tiles.shape[0], unit, programs, pair.a.stride(0), pair.b.stride(0)
    return Adapters(pointers, sizes, constants)


def _group(tile: Tile, rank: int) -> int:
    """Adapters that a tile adds at a time: A x of their rows is in registers beside the tile's own products."""
    group = 8
    while group > 1 and _registers(tile, group * rank) > _MOST_REGISTERS:
        group //= 2
    return group


def _registers(tile: Tile, ranks: int) -> int:
    """Registers of a thread for its products, in float32, and for A x and two B of so many ranks, in 16 bits."""
    products = tile.rows * tile.columns + (tile.rows // 2 + tile.columns) * ranks
    return products // (32 * tile.warps)


def _elements(tile: Tile) -> int:
    """Elements that it holds in shared memory."""
    return tile.stages * (tile.rows + tile.columns) * tile.depth
