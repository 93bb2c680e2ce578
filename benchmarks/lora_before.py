"""What models.layers.kernels.lora was before, for `python -m benchmarks.lora --before`. Adapters of a batch on a GPU,
in two kernels: shrink, A x in shares of K, and expand, which adds B (A x) to y.

Reference: models.layers.lora.add_lora. A program takes rows of one adapter, so that its A and B are read once for up to
16 streams; rows of no adapter are in no tile.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.deferred_norm import DeferredNorm, Normed
from models.layers.kernels.launch import dot_precision, launch, release_next, wait_for_previous
from models.layers.lora import TILE_UNITS, LoraPair, LoraRows

_SHARE = 256
"""Inputs of one program of the shrink, where K is a multiple of them: the other shares run beside it."""
_DEPTH = 128


@triton.jit
def _rows_of_tile(order_ptr, tiles_ptr, UNIT: tl.constexpr, SUBTILES: tl.constexpr, BLOCK_M: tl.constexpr):
    """(rows [BLOCK_M], which of them are there [BLOCK_M], slot, whether there is any) of this program."""
    tile = tiles_ptr + tl.program_id(0) // SUBTILES * 3
    before = tl.program_id(0) % SUBTILES * BLOCK_M
    first = tl.load(tile)
    count = tl.load(tile + 1)
    slot = tl.load(tile + 2)
    m = before + tl.arange(0, BLOCK_M)
    here = m < count * UNIT
    unit = tl.load(order_ptr + first + m // UNIT, mask=here, other=0)
    return unit.to(tl.int64) * UNIT + m % UNIT, here, slot.to(tl.int64), before < count * UNIT


@triton.jit(do_not_specialize=["rows"])
def _shrink_kernel(
    x_ptr,
    squares_ptr,
    a_ptr,
    order_ptr,
    tiles_ptr,
    hidden_ptr,
    rows,
    stride_x,
    stride_slot,
    eps,
    K: tl.constexpr,
    K_SHARE: tl.constexpr,
    WIDTH: tl.constexpr,
    SQUARES: tl.constexpr,
    UNIT: tl.constexpr,
    SUBTILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_M rows of one adapter times BLOCK_R rows of its A, over a share of K. hidden float32 [shares,
    rows, WIDTH]. SQUARES > 0: rows are scaled by the squares of their inputs, [rows, SQUARES]."""
    release_next(PDL)
    wait_for_previous(PDL)
    row, here, slot, any_here = _rows_of_tile(order_ptr, tiles_ptr, UNIT, SUBTILES, BLOCK_M)
    if any_here:
        share = tl.program_id(2)
        r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        k = share * K_SHARE + tl.arange(0, BLOCK_K)
        x_rows = x_ptr + row[:, None] * stride_x
        a_rows = a_ptr + slot * stride_slot + r[None, :] * K
        acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for start in range(0, K_SHARE, BLOCK_K):
            column = k + start
            inside = column < K
            x = tl.load(x_rows + column[None, :], mask=here[:, None] & inside[None, :], other=0.0)
            a = tl.load(a_rows + column[:, None], mask=inside[:, None], other=0.0)
            acc = tl.dot(x, a, acc=acc, input_precision=PRECISION)
        if SQUARES > 0:
            part = tl.arange(0, triton.next_power_of_2(SQUARES))[None, :]
            squares = tl.load(
                squares_ptr + row[:, None] * SQUARES + part, mask=here[:, None] & (part < SQUARES), other=0.0
            )
            acc *= tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
        place = hidden_ptr + (share * rows + row[:, None]) * WIDTH + r[None, :]
        tl.store(place, acc, mask=here[:, None])


@triton.jit(do_not_specialize=["rows"])
def _expand_kernel(
    hidden_ptr,
    b_ptr,
    order_ptr,
    tiles_ptr,
    y_ptr,
    rows,
    stride_slot,
    N: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARES: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    UNIT: tl.constexpr,
    SUBTILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_N columns of y for BLOCK_M rows of one adapter. SECOND, THIRD: the columns where the second
    and the third layer begin."""
    release_next(PDL)
    wait_for_previous(PDL)
    row, here, slot, any_here = _rows_of_tile(order_ptr, tiles_ptr, UNIT, SUBTILES, BLOCK_M)
    if any_here:
        kind = y_ptr.dtype.element_ty
        first = tl.program_id(1) * BLOCK_N
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


def add_lora(y: Tensor, x: Normed, pair: LoraPair, rows: LoraRows) -> Tensor:
    """models.layers.lora.add_lora. Layers' widths are multiples of 16, and so is the rank, a power of two."""
    before, x = (x, x.rows) if isinstance(x, DeferredNorm) else (None, x)
    inputs, outputs = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
    count, units = inputs.shape[0], rows.slots.shape[0]
    if count == 0 or rows.tiles.shape[0] == 0:
        return y
    unit = count // units
    block_m = 16 if unit == 1 else 64
    subtiles = triton.cdiv(TILE_UNITS * unit, block_m)
    depth, (columns, rank), width = inputs.shape[1], pair.b.shape[1:], pair.a.shape[1]
    share = _SHARE if depth % _SHARE == 0 else depth
    shares = depth // share
    edges = [sum(pair.widths[:part]) for part in (1, 2)] if len(pair.widths) == 3 else [columns, columns]
    block_n = math.gcd(128, *pair.widths)
    block_r = min(rank, 64)
    hidden = torch.empty((shares, count, width), device=inputs.device, dtype=torch.float32)
    tile = {"UNIT": unit, "SUBTILES": subtiles, "BLOCK_M": block_m, "PRECISION": dot_precision(inputs)}
    programs = rows.tiles.shape[0] * subtiles
    launch(
        _shrink_kernel,
        (programs, width // block_r, shares),
        inputs,
        before.squares if before is not None else hidden,
        pair.a,
        rows.order,
        rows.tiles,
        hidden,
        count,
        inputs.stride(0),
        pair.a.stride(0),
        before.eps if before is not None else 0.0,
        K=depth,
        K_SHARE=share,
        WIDTH=width,
        SQUARES=before.squares.shape[1] if before is not None else 0,
        BLOCK_R=block_r,
        BLOCK_K=min(_DEPTH, max(16, triton.next_power_of_2(share))),
        num_warps=4,
        **tile,
    )
    launch(
        _expand_kernel,
        (programs, columns // block_n),
        hidden,
        pair.b,
        rows.order,
        rows.tiles,
        outputs,
        count,
        pair.b.stride(0),
        N=columns,
        RANK=rank,
        WIDTH=width,
        SHARES=shares,
        SECOND=edges[0],
        THIRD=edges[1],
        BLOCK_N=block_n,
        num_warps=4 if rank < 64 else 8,
        **tile,
    )
    return y
