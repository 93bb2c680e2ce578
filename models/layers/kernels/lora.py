"""Adapters of a batch on a GPU: shrink, A x in shares of K, and the expansion, which adds B (A x) to y.

Reference: models.layers.lora.add_lora. A program takes rows of one adapter, so that its A and B are read once for up to
64 rows; rows of no adapter are in no program. Under programmatic dependent launch a program finds its rows and asks for
its A or B while the kernel before still runs: order and tiles are inputs of the step, which no kernel of it writes.

Where the units of a batch are sorted by adapter, a tiled GEMM does both by itself (models.layers.kernels.gemm_lora).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.launch import dot_precision, launch, release_next, wait_for_previous
from models.layers.lora import TILE_UNITS, LoraPair, LoraRows
from models.layers.norms import DeferredNorm, TileRows

_SHARE = 256
"""Inputs of one program of the shrink, where K is a multiple of them: the other shares run beside it."""
_DEPTH = 64
_MOST_TOGETHER = 128
"""Rows of A that a program multiplies at most: q's, k's and v's together up to a rank of 32, so that x is read once."""
_LEAST_PADDED = 64
LINE = tl.constexpr(64)
"""Elements of 16 bits in a line of the L2 cache."""


@triton.jit
def _rows_of_program(order_ptr, tiles_ptr, num_tiles, UNIT: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr):
    """(rows [BLOCK_M], which of them are there [BLOCK_M], slot, whether there is any) of this program.

    PADDED 0: a program for each tile. Else programs are dealt to the tiles in turn, to each as many as its rows need,
    and those behind the last have no rows: a grid for the worst case would be several times as large.
    """
    program = tl.program_id(0)
    if PADDED > 0:
        every = tl.arange(0, PADDED)
        units = tl.load(tiles_ptr + every * 3 + 1, mask=every < num_tiles, other=0)
        blocks = (units * UNIT + BLOCK_M - 1) // BLOCK_M
        index = tl.sum((tl.cumsum(blocks, 0) <= program).to(tl.int32), 0)
        before = (program - tl.sum(tl.where(every < index, blocks, 0), 0)) * BLOCK_M
    else:
        index = program
        before = 0
    tile = tiles_ptr + index * 3
    exists = index < num_tiles
    first = tl.load(tile, mask=exists, other=0)
    count = tl.load(tile + 1, mask=exists, other=0)
    slot = tl.load(tile + 2, mask=exists, other=0)
    m = before + tl.arange(0, BLOCK_M)
    here = m < count * UNIT
    unit = tl.load(order_ptr + first + m // UNIT, mask=here, other=0)
    return unit.to(tl.int64) * UNIT + m % UNIT, here, slot.to(tl.int64), before < count * UNIT


@triton.jit
def ask_for(pointers):
    """Brings the lines of these addresses into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["rows", "num_tiles"])
def _shrink_kernel(
    x_ptr,
    squares_ptr,
    a_ptr,
    order_ptr,
    tiles_ptr,
    hidden_ptr,
    rows,
    num_tiles,
    stride_x,
    stride_slot,
    eps,
    K: tl.constexpr,
    K_SHARE: tl.constexpr,
    KLINES: tl.constexpr,
    WIDTH: tl.constexpr,
    SQUARES: tl.constexpr,
    UNIT: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_M rows of one adapter times BLOCK_R rows of its A, over a share of K. hidden float32 [shares,
    rows, WIDTH]. SQUARES > 0: rows are scaled by the squares of their inputs, [rows, SQUARES]."""
    release_next(PDL)
    row, here, slot, any_here = _rows_of_program(order_ptr, tiles_ptr, num_tiles, UNIT, PADDED, BLOCK_M)
    share = tl.program_id(2)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    used = r < WIDTH
    if PDL and any_here:
        line = tl.arange(0, KLINES) * LINE
        asked = used[:, None] & (line < K_SHARE)[None, :]
        lines = a_ptr + slot * stride_slot + r[:, None] * K + share * K_SHARE + line[None, :]
        ask_for(tl.where(asked, lines, a_ptr + slot * stride_slot))
    wait_for_previous(PDL)
    if any_here:
        k = share * K_SHARE + tl.arange(0, BLOCK_K)
        x_rows = x_ptr + row[:, None] * stride_x
        a_rows = a_ptr + slot * stride_slot + r[None, :] * K
        acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for start in range(0, K_SHARE, BLOCK_K):
            column = k + start
            inside = column < K
            x = tl.load(x_rows + column[None, :], mask=here[:, None] & inside[None, :], other=0.0)
            a = tl.load(a_rows + column[:, None], mask=inside[:, None] & used[None, :], other=0.0)
            acc = tl.dot(x, a, acc=acc, input_precision=PRECISION)
        if SQUARES > 0:
            part = tl.arange(0, triton.next_power_of_2(SQUARES))[None, :]
            squares = tl.load(
                squares_ptr + row[:, None] * SQUARES + part, mask=here[:, None] & (part < SQUARES), other=0.0
            )
            acc *= tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
        place = hidden_ptr + (share * rows + row[:, None]) * WIDTH + r[None, :]
        tl.store(place, acc, mask=here[:, None] & used[None, :])


@triton.jit(do_not_specialize=["rows", "num_tiles"])
def _expand_kernel(
    hidden_ptr,
    b_ptr,
    order_ptr,
    tiles_ptr,
    y_ptr,
    rows,
    num_tiles,
    stride_slot,
    N: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARES: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    UNIT: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_N columns of y for BLOCK_M rows of one adapter. SECOND, THIRD: the columns where the second
    and the third layer begin."""
    release_next(PDL)
    row, here, slot, any_here = _rows_of_program(order_ptr, tiles_ptr, num_tiles, UNIT, PADDED, BLOCK_M)
    first = tl.program_id(1) * BLOCK_N
    if PDL and any_here:
        line = tl.arange(0, BLOCK_N * RANK // LINE) * LINE
        ask_for(b_ptr + slot * stride_slot + first * RANK + line)
    wait_for_previous(PDL)
    if any_here:
        kind = y_ptr.dtype.element_ty
        part = (first >= SECOND).to(tl.int32) + (first >= THIRD).to(tl.int32)
        n = first + tl.arange(0, BLOCK_N)
        r = tl.arange(0, RANK)
        sources = hidden_ptr + row[:, None] * WIDTH + part * RANK + r[None, :]
        hidden = tl.zeros((BLOCK_M, RANK), tl.float32)
        for share in tl.static_range(SHARES):
            hidden += tl.load(sources + share * rows.to(tl.int64) * WIDTH, mask=here[:, None], other=0.0)
        b = tl.load(b_ptr + slot * stride_slot + n[None, :] * RANK + r[:, None])
        place = y_ptr + row[:, None] * N + n[None, :]
        y = tl.load(place, mask=here[:, None], other=0.0).to(tl.float32)
        y += tl.dot(hidden.to(kind), b, input_precision=PRECISION).to(kind).to(tl.float32)
        tl.store(place, y.to(kind), mask=here[:, None])


def add_lora(y: Tensor, x: TileRows, pair: LoraPair, rows: LoraRows) -> Tensor:
    """models.layers.lora.add_lora. Layers' widths are multiples of 16, and so is the rank, a power of two."""
    plain = x.rows if isinstance(x, DeferredNorm) else x
    if plain.numel() == 0 or rows.tiles.shape[0] == 0:
        return y
    hidden = _shrink(x, pair, rows)
    outputs = y.view(-1, y.shape[-1])
    programs, tile = _programs(outputs.shape[0], rows)
    columns, rank = pair.b.shape[1:]
    block_n = math.gcd(_columns(tile["UNIT"], rank), *pair.widths)
    second, third = edges(pair)
    launch(
        _expand_kernel,
        (programs, columns // block_n),
        hidden,
        pair.b,
        rows.order,
        rows.tiles,
        outputs,
        outputs.shape[0],
        rows.tiles.shape[0],
        pair.b.stride(0),
        N=columns,
        RANK=rank,
        WIDTH=pair.a.shape[1],
        SHARES=hidden.shape[0],
        SECOND=second,
        THIRD=third,
        BLOCK_N=block_n,
        PRECISION=dot_precision(plain),
        num_warps=4 if tile["BLOCK_M"] * block_n <= 64 * 128 and rank < 64 else 8,
        **tile,
    )
    return y


def _shrink(x: TileRows, pair: LoraPair, rows: LoraRows) -> Tensor:
    """A x in shares of K, float32 [shares, rows, width]."""
    before, x = (x, x.rows) if isinstance(x, DeferredNorm) else (None, x)
    inputs = x.reshape(-1, x.shape[-1])
    count, depth, width = *inputs.shape, pair.a.shape[1]
    share = _SHARE if depth % _SHARE == 0 else depth
    shares = depth // share
    block_r = max(16, triton.next_power_of_2(width)) if width <= _MOST_TOGETHER else min(pair.rank, 64)
    hidden = torch.empty((shares, count, width), device=inputs.device, dtype=torch.float32)
    programs, tile = _programs(count, rows)
    launch(
        _shrink_kernel,
        (programs, triton.cdiv(width, block_r), shares),
        inputs,
        before.squares if before is not None else hidden,
        pair.a,
        rows.order,
        rows.tiles,
        hidden,
        count,
        rows.tiles.shape[0],
        inputs.stride(0),
        pair.a.stride(0),
        before.eps if before is not None else 0.0,
        K=depth,
        K_SHARE=share,
        KLINES=triton.next_power_of_2(triton.cdiv(share, 64)),
        WIDTH=width,
        SQUARES=before.squares.shape[1] if before is not None else 0,
        BLOCK_R=block_r,
        BLOCK_K=min(_DEPTH, max(16, triton.next_power_of_2(share))),
        PRECISION=dot_precision(inputs),
        num_warps=4,
        **tile,
    )
    return hidden


def _programs(count: int, rows: LoraRows) -> tuple[int, dict[str, int]]:
    """How many programs `count` rows take, and the constants of _rows_of_program."""
    unit, num_tiles = count // rows.slots.shape[0], rows.tiles.shape[0]
    block_m = 16 if unit == 1 else 64
    one_each = TILE_UNITS * unit <= block_m
    programs = (
        num_tiles
        if one_each
        else min(num_tiles * triton.cdiv(TILE_UNITS * unit, block_m), num_tiles + count // block_m)
    )
    return programs, {"UNIT": unit, "PADDED": 0 if one_each else padded(num_tiles), "BLOCK_M": block_m}


def padded(num_tiles: int) -> int:
    return max(_LEAST_PADDED, triton.next_power_of_2(num_tiles))


def edges(pair: LoraPair) -> tuple[int, int]:
    """The columns where the second and the third layer begin."""
    if len(pair.widths) < 3:
        return pair.b.shape[1], pair.b.shape[1]
    return pair.widths[0], pair.widths[0] + pair.widths[1]


def _columns(unit: int, rank: int) -> int:
    """Columns of y in a program of the expand. Many rows: more, since every program reads the shares of A x anew; a
    large rank: fewer, since B's rows must fit beside them."""
    return 128 if unit == 1 or rank > 32 else 256
