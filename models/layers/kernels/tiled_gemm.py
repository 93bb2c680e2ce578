"""The tiled GEMM with what stands around it: a norm's scale before; adapters, a gate, a GELU, or a residual and a norm
behind.

Few rows are bound by reading the weight once; six stages of weights are in flight in every thread block then.
Prefetching them into L2 while the kernel before still runs was slower: 1563 us without, 1731 us with for VoxCPM2's
language model at one row. References: models.layers.gemm.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from models.layers.gemm import Epilogue
from models.layers.kernels.e4m3 import (
    HALF_GROUP,
    Coded,
    Parts,
    accumulate,
    first_inputs,
    narrow_halves,
    parts,
    quantise_rows,
    sums_of_codes,
    takes_ahead,
)
from models.layers.kernels.elementwise import sum_parts
from models.layers.kernels.gemm_configs import default_split, streaming_tile
from models.layers.kernels.gemm_lora import WITHOUT_LORA, Lora, adapters, adapters_met, beside_shrink, expand, shrink
from models.layers.kernels.gemm_types import Tile
from models.layers.kernels.launch import launch, release_next, wait_for_previous
from models.layers.kernels.norms import sum_add_rms_norm
from models.layers.lora import GemmLora
from models.layers.norms import DeferredNorm, TileRows
from models.layers.quantized import GROUP, QuantizedWeight, Weight

_ROW_TILES_TOGETHER = tl.constexpr(8)
"""Row tiles whose programs run side by side over all columns, so that both operands come from L2."""


@triton.jit(do_not_specialize=["rows", "num_tiles", "unit", "programs"])
def linear_kernel(
    x_source,
    weight_source,
    scale_ptr,
    zeros_ptr,
    row_scale_ptr,
    bias_ptr,
    residual_ptr,
    norm_ptr,
    squares_ptr,
    out_ptr,
    scaled_ptr,
    x_ptr,
    a_ptr,
    b_ptr,
    tiles_ptr,
    hidden_ptr,
    arrivals_ptr,
    rows,
    stride_x,
    stride_weight,
    eps,
    num_tiles,
    unit,
    programs,
    stride_a,
    stride_b,
    N: tl.constexpr,
    K: tl.constexpr,
    K_SHARE: tl.constexpr,
    ONE_ROW_TILE: tl.constexpr,
    SQUARES: tl.constexpr,
    PARTIAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORM: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    ZEROS: tl.constexpr,
    AHEAD: tl.constexpr,
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
    A_SHARE: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    SHRINK_M: tl.constexpr,
    SHRINK_R: tl.constexpr,
    SHRINK_K: tl.constexpr,
    SHRINK_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_M rows of BLOCK_N columns over a share of K_SHARE inputs. The sources are pointers, with TMA
    descriptors.

    SQUARES > 0: rows are scaled by the squares of their K inputs, [rows, SQUARES]. ACTIVATION "silu_mul": weight and
    bias hold gate, then up, 2 * N in all. PARTIAL: out is float32 [shares, rows, N], of which the first has the bias.
    ADD: out is the sum with the residual, scaled is the sum times the norm's weight, and squares [rows, N // BLOCK_N]
    is written. FORM: how the weight is widened where it is held as codes, read in units of PARTS. SCALE_GROUP: inputs
    that share a scale; 0 with SCALED: the sums are scaled. AHEAD: as sums_of_codes has it.
    ROW_SCALED: x is in e4m3, too, times the factors of its rows. RANK > 0: with adapters, whose shrink is made by
    `programs` further programs before the others (models.layers.kernels.gemm_lora)."""
    release_next(PDL)
    program = tl.program_id(0)
    share = tl.program_id(1)
    if RANK > 0:
        # One axis, so that all programs of the shrink come first.
        gemm_tiles = N // BLOCK_N * tl.cdiv(rows, BLOCK_M)
        pointers = x_ptr, a_ptr, b_ptr, tiles_ptr, hidden_ptr, arrivals_ptr
        lora = Lora(*pointers, stride_a, stride_b, rows, unit, num_tiles, programs, gemm_tiles)
        if program < programs:
            shrink(
                lora, squares_ptr, stride_x, eps, N, K, A_SHARE, RANK, WIDTH, SQUARES, PADDED,
                SHRINK_M, SHRINK_R, SHRINK_K, SHRINK_STAGES, PDL,
            )  # fmt: skip
            return
        program -= programs
        share = program // gemm_tiles
        program %= gemm_tiles
    if ONE_ROW_TILE:
        first_row = 0
        column_tile = program
    else:
        row_tiles = tl.cdiv(rows, BLOCK_M)
        together = _ROW_TILES_TOGETHER * (N // BLOCK_N)
        first_tile = program // together * _ROW_TILES_TOGETHER
        tiles_here = tl.minimum(row_tiles - first_tile, _ROW_TILES_TOGETHER)
        first_row = (first_tile + program % together % tiles_here) * BLOCK_M
        column_tile = program % together // tiles_here
    first_column = column_tile * BLOCK_N
    n = first_column + tl.arange(0, BLOCK_N)
    m = first_row + tl.arange(0, BLOCK_M)
    x_here = m[:, None] < rows
    if RANK > 0:
        met = adapters_met(lora, first_row, PADDED, GROUP, BLOCK_M)
    wait_for_previous(PDL)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    acc_up = acc
    # Weights of one row tile are read once; several row tiles share them.
    KEEP: tl.constexpr = "evict_first" if ONE_ROW_TILE else ""
    if SCALE_GROUP > 0:
        weight = Coded(weight_source, scale_ptr, zeros_ptr, stride_weight)
        acc, acc_up = sums_of_codes(
            x_source + m[:, None] * stride_x, x_here, weight, n.to(tl.int64),
            share * K_SHARE, tl.minimum(share * K_SHARE + K_SHARE, K),
            N, K, SCALE_GROUP, PARTS, FORM, ZEROS, ACTIVATION == "silu_mul", SWAP, AHEAD, KEEP,
        )  # fmt: skip
    elif FORM != "":
        UNITS: tl.constexpr = BLOCK_K // 2
        of_two = tl.arange(0, UNITS)
        if TMA:
            for first in range(share * K_SHARE, share * K_SHARE + K_SHARE, BLOCK_K):
                x_low = x_source.load([first_row, first])
                x_high = x_source.load([first_row, first + HALF_GROUP])
                gate = weight_source.load([first_column, first // 2]).T
                acc = _accumulate_halves(x_low, x_high, gate, acc, FORM, SWAP)
                if ACTIVATION == "silu_mul":
                    up = weight_source.load([N + first_column, first // 2]).T
                    acc_up = _accumulate_halves(x_low, x_high, up, acc_up, FORM, SWAP)
        else:
            x_rows = x_source + m[:, None] * stride_x + share * K_SHARE + first_inputs(of_two, 2)[None, :]
            weight_rows = weight_source + n.to(tl.int64) * stride_weight + share * (K_SHARE // 2)
            gate_rows = weight_rows[None, :] + of_two[:, None]
            for first in range(0, K_SHARE // 2, UNITS):
                x_low = tl.load(x_rows + 2 * first, mask=x_here, other=0.0)
                x_high = tl.load(x_rows + 2 * first + HALF_GROUP, mask=x_here, other=0.0)
                gate = tl.load(gate_rows + first, eviction_policy=KEEP)
                acc = _accumulate_halves(x_low, x_high, gate, acc, FORM, SWAP)
                if ACTIVATION == "silu_mul":
                    up = tl.load(gate_rows + first + N * stride_weight, eviction_policy=KEEP)
                    acc_up = _accumulate_halves(x_low, x_high, up, acc_up, FORM, SWAP)
    elif TMA:
        for first in range(share * K_SHARE, share * K_SHARE + K_SHARE, BLOCK_K):
            x = x_source.load([first_row, first])
            acc = accumulate(x, weight_source.load([first_column, first]).T, acc, SWAP)
            if ACTIVATION == "silu_mul":
                acc_up = accumulate(x, weight_source.load([N + first_column, first]).T, acc_up, SWAP)
    else:
        k = tl.arange(0, BLOCK_K)
        x_rows = x_source + m[:, None] * stride_x + share * K_SHARE + k[None, :]
        weight_rows = weight_source + n.to(tl.int64) * stride_weight + share * K_SHARE
        gate_rows = weight_rows[None, :] + k[:, None]
        for first in range(0, K_SHARE, BLOCK_K):
            x = tl.load(x_rows + first, mask=x_here, other=0.0)
            gate = tl.load(gate_rows + first, eviction_policy=KEEP)
            acc = accumulate(x, gate, acc, SWAP)
            if ACTIVATION == "silu_mul":
                up = tl.load(gate_rows + first + N * stride_weight, eviction_policy=KEEP)
                acc_up = accumulate(x, up, acc_up, SWAP)
    if SWAP:
        acc = tl.trans(acc)
        acc_up = tl.trans(acc_up)
    if SCALED and SCALE_GROUP == 0:
        acc *= tl.load(scale_ptr + n)[None, :]
        if ACTIVATION == "silu_mul":
            acc_up *= tl.load(scale_ptr + N + n)[None, :]
    if ROW_SCALED:
        row_scale = tl.load(row_scale_ptr + m, mask=m < rows, other=0.0)[:, None]
        acc *= row_scale
        acc_up *= row_scale
    if SQUARES > 0:
        tile = tl.arange(0, triton.next_power_of_2(SQUARES))[None, :]
        squares = tl.load(squares_ptr + m[:, None] * SQUARES + tile, mask=x_here & (tile < SQUARES), other=0.0)
        scale = tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
        acc *= scale
        acc_up *= scale
    if RANK > 0:  # noqa: SIM102 (a constant first: Triton drops the branch)
        if share == 0:
            acc = expand(
                acc, lora, met, first_row, first_column, RANK, WIDTH, K // A_SHARE, SECOND, THIRD, PADDED, GROUP,
                BLOCK_M, BLOCK_N,
            )  # fmt: skip
    if PARTIAL:
        if BIAS:
            acc += tl.load(bias_ptr + n, mask=n >= share * N, other=0.0).to(tl.float32)[None, :]
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
def _accumulate_halves(x_low, x_high, units, acc, FORM: tl.constexpr, SWAP: tl.constexpr):
    low, high = narrow_halves(units, x_low.dtype, FORM)
    acc = accumulate(x_low, low, acc, SWAP)
    return accumulate(x_high, high, acc, SWAP)


class _AddNorm(NamedTuple):
    """The epilogue of a GEMM whose norm is deferred: residual and the norm's weight go in, the rest comes out."""

    residual: Tensor
    norm_weight: Tensor
    scaled: Tensor
    squares: Tensor


class _Operand(NamedTuple):
    """x as a launch reads it: rows [n, K], in e4m3 with their factors [n, 1], or with a norm before them."""

    rows: Tensor
    row_scale: Tensor | None = None
    before: DeferredNorm | None = None


def _operand_of(x: TileRows, *, eight_bit: bool) -> tuple[_Operand, torch.Size, torch.dtype]:
    """x's operand, shape and dtype."""
    plain = x.rows if isinstance(x, DeferredNorm) else x
    if eight_bit:
        return _Operand(*quantise_rows(x)), plain.shape, plain.dtype
    before = x if isinstance(x, DeferredNorm) else None
    return _Operand(_rows(plain), before=before), plain.shape, plain.dtype


def _rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def tiled_gemm(
    x: TileRows,
    weight: Weight,
    bias: Tensor | None = None,
    tile: Tile | None = None,
    epilogue: Epilogue = "",
    *,
    split: int = 1,
    eight_bit: bool = False,
    lora: GemmLora | None = None,
) -> Tensor:
    """models.layers.gemm.gemm; tile: by default that of few rows. Rounded once but for "silu_mul", as its reference.

    split: partitions of the inputs, which another kernel adds; not with "quick_gelu". eight_bit: x is quantised to e4m3
    row by row, as the weight is already. lora: adapters that `takes_lora`.
    """
    gated = epilogue == "silu_mul"
    columns = weight.shape[0] // (2 if gated and split == 1 else 1)
    operand, shape, kind = _operand_of(x, eight_bit=eight_bit)
    made = kind if split == 1 else torch.float32
    out = torch.empty((split, operand.rows.shape[0], columns), device=operand.rows.device, dtype=made)
    behind = epilogue if split == 1 else ""
    _launch(operand, weight, out, columns, tile, split=split, bias=bias, epilogue=behind, lora=lora)
    return (out if split == 1 else sum_parts(out, kind, gated=gated)).view(*shape[:-1], -1)


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
    operand, _, _ = _operand_of(x, eight_bit=eight_bit)
    width = weight.shape[0]
    tile = tile or streaming_tile(operand.rows.shape[0])
    by_group = isinstance(weight, QuantizedWeight) and not weight.per_output
    split = split or default_split(width, weight.shape[1], tile.columns, codes=by_group)
    partial = torch.empty((split, operand.rows.shape[0], width), device=x.device, dtype=torch.float32)
    _launch(operand, weight, partial, width, tile, split=split, lora=lora)
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
    operand, _, kind = _operand_of(x, eight_bit=eight_bit)
    rows, width = operand.rows.shape[0], weight.shape[0]
    tile = tile or streaming_tile(rows)
    total, scaled = (torch.empty((rows, width), device=x.device, dtype=kind) for _ in range(2))
    squares = torch.empty((rows, width // tile.columns), device=x.device, dtype=torch.float32)
    add = _AddNorm(residual.reshape(-1, width).contiguous(), norm_weight, scaled, squares)
    _launch(operand, weight, total, width, tile, bias=bias, add=add, lora=lora)
    return DeferredNorm(scaled.view(residual.shape), squares, eps), total.view(residual.shape)


def _launch(
    operand: _Operand,
    weight: Weight,
    out: Tensor,
    columns: int,
    tile: Tile | None,
    *,
    split: int = 1,
    bias: Tensor | None = None,
    epilogue: Epilogue = "",
    add: _AddNorm | None = None,
    lora: GemmLora | None = None,
) -> None:
    x, row_scale, before = operand
    read = parts(weight)
    values, scale, form = read.values, read.scale, read.form
    if row_scale is not None:
        assert isinstance(weight, QuantizedWeight)
        read = Parts(weight.values, scale)
        values, form = read.values, read.form
    rows, inputs = x.shape
    if rows == 0:
        return
    tile = tile or streaming_tile(rows, gated=epilogue == "silu_mul")
    share = triton.cdiv(inputs // tile.depth, split) * tile.depth
    if columns % tile.columns or inputs % tile.depth or (share * split != inputs and not read.group):
        raise ValueError(f"linear: {columns} columns of {inputs} inputs are not whole tiles of {tile}, split {split}")
    row_tiles = triton.cdiv(rows, tile.rows)
    tiles, programs = columns // tile.columns * row_tiles, 0
    if lora is not None:
        tile, programs = beside_shrink(tile, tiles * split)
    sources: tuple[Any, Any] = (x, values)
    if read.group and (tile.depth != GROUP or tile.tma):
        raise ValueError(f"linear: {tile} does not take codes with groups of {read.group} inputs")
    if (form and tile.depth % GROUP) or (form and tile.tma and tile.depth != GROUP):
        raise ValueError(f"linear: {tile} does not take {GROUP} inputs of a weight in e4m3 at a time")
    if tile.tma:
        depth = tile.depth // 2 if form else tile.depth
        blocks = ([tile.rows, depth], [tile.columns, depth])
        sources = tuple(TensorDescriptor.from_tensor(*pair) for pair in zip(sources, blocks, strict=True))
    added = None if lora is None else adapters(x, lora, tile, programs, tiles)
    squares = before.squares if before is not None else add.squares if add is not None else None
    launch(
        linear_kernel,
        (tiles, split) if lora is None else (programs + tiles * split,),
        *sources,
        scale if scale is not None else out,
        read.zeros if read.zeros is not None else out,
        row_scale if row_scale is not None else out,
        bias if bias is not None else x,
        add.residual if add is not None else x,
        add.norm_weight if add is not None else x,
        squares if squares is not None else x,
        out,
        add.scaled if add is not None else out,
        *(added.pointers if added is not None else (out,) * 6),
        rows,
        x.stride(0),
        values.stride(0),
        before.eps if before is not None else 0.0,
        *(added.sizes if added is not None else (0,) * 5),
        N=columns,
        K=inputs,
        K_SHARE=share,
        ONE_ROW_TILE=row_tiles == 1,
        SQUARES=before.squares.shape[1] if before is not None else 0,
        PARTIAL=out.dtype == torch.float32,
        ACTIVATION=epilogue,
        **read.constants,
        AHEAD=takes_ahead(read, tile.columns, tile.warps) and epilogue != "silu_mul",
        SCALED=scale is not None,
        ROW_SCALED=row_scale is not None,
        BIAS=bias is not None,
        ADD=add is not None,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        SWAP=tile.swap,
        TMA=tile.tma,
        **(added.constants if added is not None else WITHOUT_LORA),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
