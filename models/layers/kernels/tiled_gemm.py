"""The tiled GEMM with what stands around it: a norm's scale before, a gate, a GELU, or a residual and a norm behind.

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

from models.layers.deferred_norm import DeferredNorm, Normed
from models.layers.gemm import Epilogue
from models.layers.kernels.gemm_configs import default_split, streaming_tile
from models.layers.kernels.gemm_types import Tile
from models.layers.kernels.launch import launch, release_next, wait_for_previous
from models.layers.kernels.norms import sum_add_rms_norm

_ROW_TILES_TOGETHER = tl.constexpr(8)
"""Row tiles whose programs run side by side over all columns, so that both operands come from L2."""


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_source,
    weight_source,
    bias_ptr,
    residual_ptr,
    norm_ptr,
    squares_ptr,
    out_ptr,
    scaled_ptr,
    rows,
    stride_x,
    stride_weight,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    K_SHARE: tl.constexpr,
    ONE_ROW_TILE: tl.constexpr,
    SQUARES: tl.constexpr,
    PARTIAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_M rows of BLOCK_N columns over a share of K_SHARE inputs. The sources are pointers, with TMA
    descriptors.

    SQUARES > 0: rows are scaled by the squares of their K inputs, [rows, SQUARES]. ACTIVATION "silu_mul": weight holds
    the rows of gate, then those of up, 2 * N in all. PARTIAL: out is float32 [shares, rows, N]. ADD: out is the sum
    with the residual, scaled is the sum times the norm's weight, and squares [rows, N // BLOCK_N] is written.
    """
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
    wait_for_previous(PDL)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    acc_up = acc
    if TMA:
        for first in range(share * K_SHARE, share * K_SHARE + K_SHARE, BLOCK_K):
            x = x_source.load([first_row, first])
            acc = _accumulate(x, weight_source.load([first_column, first]).T, acc, SWAP)
            if ACTIVATION == "silu_mul":
                acc_up = _accumulate(x, weight_source.load([N + first_column, first]).T, acc_up, SWAP)
    else:
        # Weights of one row tile are read once; several row tiles share them.
        KEEP: tl.constexpr = "evict_first" if ONE_ROW_TILE else ""
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
    if PARTIAL:
        out = out_ptr + (share * rows + m[:, None]).to(tl.int64) * N + n[None, :]
        tl.store(out, acc, mask=x_here)
    else:
        kind = out_ptr.dtype.element_ty
        if SQUARES > 0:
            tile = tl.arange(0, triton.next_power_of_2(SQUARES))[None, :]
            squares = tl.load(squares_ptr + m[:, None] * SQUARES + tile, mask=x_here & (tile < SQUARES), other=0.0)
            scale = tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
            acc *= scale
            acc_up *= scale
        if BIAS:
            acc += tl.load(bias_ptr + n).to(tl.float32)[None, :]
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


def tiled_gemm(
    x: Normed, weight: Tensor, bias: Tensor | None = None, tile: Tile | None = None, epilogue: Epilogue = ""
) -> Tensor:
    """models.layers.gemm.gemm; tile: by default that of few rows. Rounded once but for "silu_mul", as its reference."""
    before, x = (x, x.rows) if isinstance(x, DeferredNorm) else (None, x)
    rows = _rows(x)
    columns = weight.shape[0] // (2 if epilogue == "silu_mul" else 1)
    out = torch.empty((rows.shape[0], columns), device=rows.device, dtype=rows.dtype)
    _launch(rows, weight, out, columns, tile, bias=bias, epilogue=epilogue, before=before)
    return out.view(*x.shape[:-1], columns)


def split_gemm_add_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    split: int | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """models.layers.gemm.gemm_add_norm by split-K: the norm's kernel adds the `split` partial sums."""
    rows = _rows(x)
    width = weight.shape[0]
    split = split or default_split(width, weight.shape[1])
    partial = torch.empty((split, rows.shape[0], width), device=x.device, dtype=torch.float32)
    _launch(rows, weight, partial, width, tile, split=split)
    normed, total = sum_add_rms_norm(partial, bias, residual, norm_weight, eps)
    return normed.view(residual.shape), total.view(residual.shape)


def gemm_add_deferred_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    tile: Tile | None = None,
) -> tuple[DeferredNorm, Tensor]:
    """models.layers.gemm.gemm_add_norm in one kernel, with the norm's scale left to the GEMMs that read it."""
    rows = _rows(x)
    width = weight.shape[0]
    tile = tile or streaming_tile(rows.shape[0])
    total, scaled = (torch.empty((rows.shape[0], width), device=x.device, dtype=x.dtype) for _ in range(2))
    squares = torch.empty((rows.shape[0], width // tile.columns), device=x.device, dtype=torch.float32)
    add = AddNorm(residual.reshape(-1, width).contiguous(), norm_weight, scaled, squares)
    _launch(rows, weight, total, width, tile, bias=bias, add=add)
    return DeferredNorm(scaled.view(residual.shape), squares, eps), total.view(residual.shape)


class AddNorm(NamedTuple):
    """The epilogue of a GEMM whose norm is deferred: residual and the norm's weight go in, the rest comes out."""

    residual: Tensor
    norm_weight: Tensor
    scaled: Tensor
    squares: Tensor


def _rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    columns: int,
    tile: Tile | None,
    *,
    split: int = 1,
    bias: Tensor | None = None,
    epilogue: Epilogue = "",
    before: DeferredNorm | None = None,
    add: AddNorm | None = None,
) -> None:
    rows, inputs = x.shape
    if rows == 0:
        return
    tile = tile or streaming_tile(rows, gated=epilogue == "silu_mul")
    if columns % tile.columns or inputs % (split * tile.depth):
        raise ValueError(f"linear: {columns} columns of {inputs} inputs are not whole tiles of {tile}, split {split}")
    row_tiles = triton.cdiv(rows, tile.rows)
    sources: tuple[Any, Any] = (x, weight)
    if tile.tma:
        blocks = ([tile.rows, tile.depth], [tile.columns, tile.depth])
        sources = tuple(TensorDescriptor.from_tensor(*pair) for pair in zip(sources, blocks, strict=True))
    squares = before.squares if before is not None else add.squares if add is not None else None
    launch(
        _linear_kernel,
        (columns // tile.columns * row_tiles, split),
        *sources,
        bias if bias is not None else x,
        add.residual if add is not None else x,
        add.norm_weight if add is not None else x,
        squares if squares is not None else x,
        out,
        add.scaled if add is not None else out,
        rows,
        x.stride(0),
        weight.stride(0),
        before.eps if before is not None else 0.0,
        N=columns,
        K=inputs,
        K_SHARE=inputs // split,
        ONE_ROW_TILE=row_tiles == 1,
        SQUARES=before.squares.shape[1] if before is not None else 0,
        PARTIAL=out.dtype == torch.float32,
        ACTIVATION=epilogue,
        BIAS=bias is not None,
        ADD=add is not None,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        SWAP=tile.swap,
        TMA=tile.tma,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
