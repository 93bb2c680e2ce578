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
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from models.layers.deferred_norm import DeferredNorm, TileRows
from models.layers.gemm import Epilogue
from models.layers.kernels.e4m3 import Parts, parts, quantise_rows, takes_ahead
from models.layers.kernels.elementwise import sum_parts
from models.layers.kernels.gemm_configs import default_split, streaming_tile
from models.layers.kernels.gemm_lora import WITHOUT_LORA, adapters, beside_shrink
from models.layers.kernels.gemm_types import Tile
from models.layers.kernels.launch import launch
from models.layers.kernels.norms import sum_add_rms_norm
from models.layers.kernels.tiled_gemm_kernel import linear_kernel
from models.layers.lora import GemmLora
from models.layers.quantized import GROUP, QuantizedWeight, Weight


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
