"""GEMMs of many rows that gain from their epilogue: SiLU of one half times the other, and quick GELU.

cuBLAS multiplies such operands faster, by up to a fifth where tiles do not fill the GPU, but what follows it reads and
writes the product once more (benchmarks/results/kernels/wide.json). Programs are persistent: one for each
multiprocessor, which takes one tile after the other. References: models.layers.gemm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from models.layers.kernels.gemm_configs import covers, fits
from models.layers.kernels.gemm_types import Kind, Tile
from models.layers.kernels.gpu import Capability, current_gpu
from models.layers.kernels.launch import launch, num_sms, release_next, wait_for_previous

_ROW_TILES_TOGETHER = tl.constexpr(8)
"""Row tiles that run side by side over all columns, so that both operands come from L2."""
_TILES = {
    "silu_mul": Tile(128, 128, 64, warps=8, stages=4, tma=True),
    "quick_gelu": Tile(128, 256, 64, warps=8, stages=4, tma=True),
}
_LEAST_ROWS = 256
_PASS = 350
"""A pass over the product takes as long as so many inputs of its GEMM."""
_LEAST_GAIN = 0.95
"""Predicted time of cuBLAS and the pass, as a multiple of the time here, from which measured shapes are faster here."""
_MEASURED: Capability = (9, 0)


@triton.jit(do_not_specialize=["rows"])
def _wide_kernel(
    x_source,
    weight_source,
    bias_ptr,
    out_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """The sources are TMA descriptors. ACTIVATION "silu_mul": weight and bias hold gate, then up, 2 * N in all.
    FLATTEN: operands of the next tile are loaded while the results of this one are stored; with two accumulators that
    is slower."""
    COLUMN_TILES: tl.constexpr = N // BLOCK_N
    row_tiles = tl.cdiv(rows, BLOCK_M)
    together = _ROW_TILES_TOGETHER * COLUMN_TILES
    release_next(PDL)
    wait_for_previous(PDL)
    for tile in tl.range(tl.program_id(0), row_tiles * COLUMN_TILES, PROGRAMS, flatten=FLATTEN):
        first_tile = tile // together * _ROW_TILES_TOGETHER
        tiles_here = tl.minimum(row_tiles - first_tile, _ROW_TILES_TOGETHER)
        first_row = (first_tile + tile % together % tiles_here) * BLOCK_M
        first_column = tile % together // tiles_here * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        acc_up = acc
        for first in range(0, K, BLOCK_K):
            x = x_source.load([first_row, first])
            acc = tl.dot(x, weight_source.load([first_column, first]).T, acc=acc)
            if ACTIVATION == "silu_mul":
                acc_up = tl.dot(x, weight_source.load([N + first_column, first]).T, acc=acc_up)
        kind = out_ptr.dtype.element_ty
        n = first_column + tl.arange(0, BLOCK_N)
        if BIAS:
            acc += tl.load(bias_ptr + n).to(tl.float32)[None, :]
            if ACTIVATION == "silu_mul":
                acc_up += tl.load(bias_ptr + N + n).to(tl.float32)[None, :]
        if ACTIVATION == "silu_mul":
            gate = acc.to(kind).to(tl.float32)
            acc = (gate * tl.sigmoid(gate)).to(kind).to(tl.float32) * acc_up.to(kind).to(tl.float32)
        if ACTIVATION == "quick_gelu":
            acc *= tl.sigmoid(1.702 * acc)
        m = first_row + tl.arange(0, BLOCK_M)
        tl.store(out_ptr + m[:, None].to(tl.int64) * N + n[None, :], acc.to(kind), mask=m[:, None] < rows)


def takes(kind: Kind, x: Tensor, weight: Tensor) -> bool:
    """Whether x [..., K] times a weight of 16 bits is faster here than by cuBLAS with a kernel behind it. Where no
    table was measured, the pass that is saved must be worth the multiprocessors that wait for the last tiles."""
    tile, gpu = _TILES.get(kind), current_gpu()
    if tile is None or gpu.capability != _MEASURED or not fits(tile, gpu, gated=kind == "silu_mul"):
        return False
    rows, inputs, columns = x.numel() // x.shape[-1], weight.shape[1], _columns(kind, weight)
    tiles = triton.cdiv(rows, tile.rows) * (columns // tile.columns)
    filled = tiles / (max(1, triton.cdiv(tiles, gpu.num_sms)) * gpu.num_sms)
    return (
        rows >= _LEAST_ROWS
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.dtype == x.dtype
        and weight.stride(1) == 1
        and columns % tile.columns == 0
        and inputs % tile.depth == 0
        and filled * (1 + _PASS / inputs) >= _LEAST_GAIN
        and not covers(kind, rows, inputs, columns)
    )


def wide_gemm(kind: Kind, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """models.layers.gemm.gemm of what `takes` says yes to. Rounded once but for "silu_mul", as its reference."""
    tile, columns = _TILES[kind], _columns(kind, weight)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty((rows.shape[0], columns), device=x.device, dtype=x.dtype)
    programs = num_sms()
    launch(
        _wide_kernel,
        (min(programs, triton.cdiv(rows.shape[0], tile.rows) * (columns // tile.columns)),),
        TensorDescriptor.from_tensor(rows, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]),
        bias if bias is not None else rows,
        out,
        rows.shape[0],
        N=columns,
        K=weight.shape[1],
        ACTIVATION=kind,
        BIAS=bias is not None,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        PROGRAMS=programs,
        FLATTEN=kind != "silu_mul",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out.view(*x.shape[:-1], columns)


def _columns(kind: Kind, weight: Tensor) -> int:
    return weight.shape[0] // (2 if kind == "silu_mul" else 1)
