"""The tiled GEMM with what stands around it: a norm's scale before; adapters, a gate, a GELU, or a residual and a norm
behind.

Few rows are bound by reading the weight once; six stages of weights are in flight in every thread block then.
Prefetching them into L2 while the kernel before still runs was slower: 1563 us without, 1731 us with for VoxCPM2's
language model at one row. References: models.layers.gemm.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from models.layers.deferred_norm import DeferredNorm, Normed
from models.layers.e4m3 import GROUP, E4M3Weight, Weight
from models.layers.gemm import Epilogue
from models.layers.kernels.e4m3 import HALF_GROUP, low_inputs, narrow_halves, parts
from models.layers.kernels.gemm_configs import default_split, streaming_tile
from models.layers.kernels.gemm_operands import AddNorm, Operand, operand_of
from models.layers.kernels.gemm_types import Tile
from models.layers.kernels.gpu import current_gpu
from models.layers.kernels.launch import launch, release_next, wait_for_previous
from models.layers.kernels.lora import Expansion, add_expansion, expansion
from models.layers.kernels.norms import sum_add_rms_norm
from models.layers.lora import GemmLora

_ROW_TILES_TOGETHER = tl.constexpr(8)
"""Row tiles whose programs run side by side over all columns, so that both operands come from L2."""
_MOST_RANK = 32
_WITHOUT_LORA = dict.fromkeys(("RANK", "WIDTH", "SHARES", "SECOND", "THIRD", "PADDED"), 0)


@triton.jit(do_not_specialize=["rows", "num_tiles", "unit"])
def _linear_kernel(
    x_source,
    weight_source,
    scale_ptr,
    row_scale_ptr,
    bias_ptr,
    residual_ptr,
    norm_ptr,
    squares_ptr,
    out_ptr,
    scaled_ptr,
    hidden_ptr,
    b_ptr,
    tiles_ptr,
    rows,
    stride_x,
    stride_weight,
    eps,
    num_tiles,
    unit,
    stride_slot,
    N: tl.constexpr,
    K: tl.constexpr,
    K_SHARE: tl.constexpr,
    ONE_ROW_TILE: tl.constexpr,
    SQUARES: tl.constexpr,
    PARTIAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    E4M3: tl.constexpr,
    SCALED: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARES: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_M rows of BLOCK_N columns over a share of K_SHARE inputs. The sources are pointers, with TMA
    descriptors.

    SQUARES > 0: rows are scaled by the squares of their K inputs, [rows, SQUARES]. ACTIVATION "silu_mul": weight and
    bias hold gate, then up, 2 * N in all. PARTIAL: out is float32 [shares, rows, N]. ADD: out is the sum with the
    residual, scaled is the sum times the norm's weight, and squares [rows, N // BLOCK_N] is written. E4M3: how the
    weight is widened where it is in e4m3, read in units of two. SCALED: it is in e4m3, times the factors of its rows.
    ROW_SCALED: x is in e4m3, too, times the factors of its rows. RANK > 0: with adapters, whose shrink, the kernel
    before, runs while this one multiplies."""
    if ONE_ROW_TILE:
        first_row = 0
        column_tile = tl.program_id(0)
    else:
        row_tiles = tl.cdiv(rows, BLOCK_M)
        together = _ROW_TILES_TOGETHER * (N // BLOCK_N)
        first_tile = tl.program_id(0) // together * _ROW_TILES_TOGETHER
        tiles_here = tl.minimum(row_tiles - first_tile, _ROW_TILES_TOGETHER)
        first_row = (first_tile + tl.program_id(0) % together % tiles_here) * BLOCK_M
        column_tile = tl.program_id(0) % together // tiles_here
    first_column = column_tile * BLOCK_N
    n = first_column + tl.arange(0, BLOCK_N)
    m = first_row + tl.arange(0, BLOCK_M)
    x_here = m[:, None] < rows
    share = tl.program_id(1)
    release_next(PDL)
    if RANK == 0:
        wait_for_previous(PDL)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    acc_up = acc
    # Weights of one row tile are read once; several row tiles share them.
    KEEP: tl.constexpr = "evict_first" if ONE_ROW_TILE else ""
    if E4M3 != "":
        UNITS: tl.constexpr = BLOCK_K // 2
        unit = tl.arange(0, UNITS)
        if TMA:
            for first in range(share * K_SHARE, share * K_SHARE + K_SHARE, BLOCK_K):
                x_low = x_source.load([first_row, first])
                x_high = x_source.load([first_row, first + HALF_GROUP])
                gate = weight_source.load([first_column, first // 2]).T
                acc = _accumulate_halves(x_low, x_high, gate, acc, E4M3, SWAP)
                if ACTIVATION == "silu_mul":
                    up = weight_source.load([N + first_column, first // 2]).T
                    acc_up = _accumulate_halves(x_low, x_high, up, acc_up, E4M3, SWAP)
        else:
            x_rows = x_source + m[:, None] * stride_x + share * K_SHARE + low_inputs(unit)[None, :]
            weight_rows = weight_source + n.to(tl.int64) * stride_weight + share * (K_SHARE // 2)
            gate_rows = weight_rows[None, :] + unit[:, None]
            for first in range(0, K_SHARE // 2, UNITS):
                x_low = tl.load(x_rows + 2 * first, mask=x_here, other=0.0)
                x_high = tl.load(x_rows + 2 * first + HALF_GROUP, mask=x_here, other=0.0)
                gate = tl.load(gate_rows + first, eviction_policy=KEEP)
                acc = _accumulate_halves(x_low, x_high, gate, acc, E4M3, SWAP)
                if ACTIVATION == "silu_mul":
                    up = tl.load(gate_rows + first + N * stride_weight, eviction_policy=KEEP)
                    acc_up = _accumulate_halves(x_low, x_high, up, acc_up, E4M3, SWAP)
    elif TMA:
        for first in range(share * K_SHARE, share * K_SHARE + K_SHARE, BLOCK_K):
            x = x_source.load([first_row, first])
            acc = _accumulate(x, weight_source.load([first_column, first]).T, acc, SWAP)
            if ACTIVATION == "silu_mul":
                acc_up = _accumulate(x, weight_source.load([N + first_column, first]).T, acc_up, SWAP)
    else:
        k = tl.arange(0, BLOCK_K)
        x_rows = x_source + m[:, None] * stride_x + share * K_SHARE + k[None, :]
        weight_rows = weight_source + n.to(tl.int64) * stride_weight + share * K_SHARE
        gate_rows = weight_rows[None, :] + k[:, None]
        for first in range(0, K_SHARE, BLOCK_K):
            x = tl.load(x_rows + first, mask=x_here, other=0.0)
            gate = tl.load(gate_rows + first, eviction_policy=KEEP)
            acc = _accumulate(x, gate, acc, SWAP)
            if ACTIVATION == "silu_mul":
                up = tl.load(gate_rows + first + N * stride_weight, eviction_policy=KEEP)
                acc_up = _accumulate(x, up, acc_up, SWAP)
    if SWAP:
        acc = tl.trans(acc)
        acc_up = tl.trans(acc_up)
    if SCALED:
        acc *= tl.load(scale_ptr + n)[None, :]
        if ACTIVATION == "silu_mul":
            acc_up *= tl.load(scale_ptr + N + n)[None, :]
    if ROW_SCALED:
        row_scale = tl.load(row_scale_ptr + m, mask=m < rows, other=0.0)[:, None]
        acc *= row_scale
        acc_up *= row_scale
    if RANK > 0:
        wait_for_previous(PDL)
    if SQUARES > 0:
        tile = tl.arange(0, triton.next_power_of_2(SQUARES))[None, :]
        squares = tl.load(squares_ptr + m[:, None] * SQUARES + tile, mask=x_here & (tile < SQUARES), other=0.0)
        scale = tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
        acc *= scale
        acc_up *= scale
    if RANK > 0:  # noqa: SIM102 (a constant first: Triton drops the branch)
        if share == 0:
            acc = add_expansion(
                acc,
                hidden_ptr,
                b_ptr,
                tiles_ptr,
                num_tiles,
                rows,
                unit,
                stride_slot,
                first_row,
                first_column,
                RANK,
                WIDTH,
                SHARES,
                SECOND,
                THIRD,
                PADDED,
                BLOCK_M,
                BLOCK_N,
            )
    if PARTIAL:
        out = out_ptr + (share * rows + m[:, None]).to(tl.int64) * N + n[None, :]
        tl.store(out, acc, mask=x_here)
    else:
        kind = out_ptr.dtype.element_ty
        if BIAS:
            acc += tl.load(bias_ptr + n).to(tl.float32)[None, :]
            if ACTIVATION == "silu_mul":
                acc_up += tl.load(bias_ptr + N + n).to(tl.float32)[None, :]
        if ACTIVATION == "silu_mul":
            gated = acc.to(kind).to(tl.float32)
            acc = (gated * tl.sigmoid(gated)).to(kind).to(tl.float32) * acc_up.to(kind).to(tl.float32)
        if ACTIVATION == "quick_gelu":
            acc *= tl.sigmoid(1.702 * acc)
        place = m[:, None] * N + n[None, :]
        if ADD:
            # Rounded like the linear layer's output, then like the sum.
            acc = acc.to(kind).to(tl.float32)
            acc += tl.load(residual_ptr + place, mask=x_here, other=0.0).to(tl.float32)
            acc = acc.to(kind).to(tl.float32)
            tl.store(squares_ptr + m * (N // BLOCK_N) + column_tile, tl.sum(acc * acc, 1), mask=m < rows)
            norm = tl.load(norm_ptr + n).to(tl.float32)[None, :]
            tl.store(scaled_ptr + place, (acc * norm).to(kind), mask=x_here)
        tl.store(out_ptr + place, acc.to(kind), mask=x_here)


@triton.jit
def _accumulate(x, weight, acc, SWAP: tl.constexpr):
    if SWAP:
        acc = tl.dot(tl.trans(weight), tl.trans(x), acc=acc)
    else:
        acc = tl.dot(x, weight, acc=acc)
    return acc


@triton.jit
def _accumulate_halves(x_low, x_high, units, acc, E4M3: tl.constexpr, SWAP: tl.constexpr):
    low, high = narrow_halves(units, x_low.dtype, E4M3)
    acc = _accumulate(x_low, low, acc, SWAP)
    return _accumulate(x_high, high, acc, SWAP)


def tiled_gemm(
    x: Normed,
    weight: Weight,
    bias: Tensor | None = None,
    tile: Tile | None = None,
    epilogue: Epilogue = "",
    *,
    eight_bit: bool = False,
    lora: GemmLora | None = None,
) -> Tensor:
    """models.layers.gemm.gemm; tile: by default that of few rows. Rounded once but for "silu_mul", as its reference.

    eight_bit: x is quantised to e4m3 row by row, as the weight is already. lora: adapters that `takes_lora`.
    """
    columns = weight.shape[0] // (2 if epilogue == "silu_mul" else 1)
    operand, shape, kind = operand_of(x, eight_bit=eight_bit)
    out = torch.empty((operand.rows.shape[0], columns), device=operand.rows.device, dtype=kind)
    added = None if lora is None else expansion(x, lora)
    _launch(operand, weight, out, columns, tile, bias=bias, epilogue=epilogue, added=added)
    return out.view(*shape[:-1], columns)


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


def split_gemm_add_norm(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    split: int | None = None,
    tile: Tile | None = None,
    eight_bit: bool = False,
    lora: GemmLora | None = None,
) -> tuple[Tensor, Tensor]:
    """models.layers.gemm.gemm_add_norm by split-K: the norm's kernel adds the `split` partial sums."""
    operand, _, _ = operand_of(x, eight_bit=eight_bit)
    width = weight.shape[0]
    split = split or default_split(width, weight.shape[1])
    partial = torch.empty((split, operand.rows.shape[0], width), device=x.device, dtype=torch.float32)
    added = None if lora is None else expansion(x, lora)
    _launch(operand, weight, partial, width, tile, split=split, added=added)
    normed, total = sum_add_rms_norm(partial, bias, residual, norm_weight, eps)
    return normed.view(residual.shape), total.view(residual.shape)


def gemm_add_deferred_norm(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    tile: Tile | None = None,
    *,
    eight_bit: bool = False,
    lora: GemmLora | None = None,
) -> tuple[DeferredNorm, Tensor]:
    """models.layers.gemm.gemm_add_norm in one kernel, with the norm's scale left to the GEMMs that read it."""
    operand, _, kind = operand_of(x, eight_bit=eight_bit)
    rows, width = operand.rows.shape[0], weight.shape[0]
    tile = tile or streaming_tile(rows)
    total, scaled = (torch.empty((rows, width), device=x.device, dtype=kind) for _ in range(2))
    squares = torch.empty((rows, width // tile.columns), device=x.device, dtype=torch.float32)
    add = AddNorm(residual.reshape(-1, width).contiguous(), norm_weight, scaled, squares)
    added = None if lora is None else expansion(x, lora)
    _launch(operand, weight, total, width, tile, bias=bias, add=add, added=added)
    return DeferredNorm(scaled.view(residual.shape), squares, eps), total.view(residual.shape)


def _launch(
    operand: Operand,
    weight: Weight,
    out: Tensor,
    columns: int,
    tile: Tile | None,
    *,
    split: int = 1,
    bias: Tensor | None = None,
    epilogue: Epilogue = "",
    add: AddNorm | None = None,
    added: Expansion | None = None,
) -> None:
    x, row_scale, before = operand
    values, scale, form = parts(weight)
    if row_scale is not None:
        assert isinstance(weight, E4M3Weight)
        values, form = weight.values, ""
    rows, inputs = x.shape
    if rows == 0:
        return
    tile = tile or streaming_tile(rows, gated=epilogue == "silu_mul")
    if columns % tile.columns or inputs % (split * tile.depth):
        raise ValueError(f"linear: {columns} columns of {inputs} inputs are not whole tiles of {tile}, split {split}")
    row_tiles = triton.cdiv(rows, tile.rows)
    sources: tuple[Any, Any] = (x, values)
    if (form and tile.depth % GROUP) or (form and tile.tma and tile.depth != GROUP):
        raise ValueError(f"linear: {tile} does not take {GROUP} inputs of a weight in e4m3 at a time")
    if tile.tma:
        depth = tile.depth // 2 if form else tile.depth
        blocks = ([tile.rows, depth], [tile.columns, depth])
        sources = tuple(TensorDescriptor.from_tensor(*pair) for pair in zip(sources, blocks, strict=True))
    squares = before.squares if before is not None else add.squares if add is not None else None
    launch(
        _linear_kernel,
        (columns // tile.columns * row_tiles, split),
        *sources,
        scale if scale is not None else out,
        row_scale if row_scale is not None else out,
        bias if bias is not None else x,
        add.residual if add is not None else x,
        add.norm_weight if add is not None else x,
        squares if squares is not None else x,
        out,
        add.scaled if add is not None else out,
        added.hidden if added is not None else out,
        added.lora.pair.b if added is not None else out,
        added.lora.rows.tiles if added is not None else out,
        rows,
        x.stride(0),
        values.stride(0),
        before.eps if before is not None else 0.0,
        added.lora.rows.tiles.shape[0] if added is not None else 0,
        added.unit if added is not None else 1,
        added.lora.pair.b.stride(0) if added is not None else 0,
        N=columns,
        K=inputs,
        K_SHARE=inputs // split,
        ONE_ROW_TILE=row_tiles == 1,
        SQUARES=before.squares.shape[1] if before is not None else 0,
        PARTIAL=out.dtype == torch.float32,
        ACTIVATION=epilogue,
        E4M3=form,
        SCALED=scale is not None,
        ROW_SCALED=row_scale is not None,
        BIAS=bias is not None,
        ADD=add is not None,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        SWAP=tile.swap,
        TMA=tile.tma,
        **(added.constants if added is not None else _WITHOUT_LORA),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
