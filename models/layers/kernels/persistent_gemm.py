"""The gated GEMM of many rows, SiLU of one half of the product times the other, by persistent programs: one for each
multiprocessor, which takes one tile after the other.

cuBLAS multiplies faster, but what follows it reads and writes the product once more. Which of the two is faster changes
with how many multiprocessors the last tiles leave idle, so only what was measured is made here. References:
models.layers.gemm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from models.layers.kernels.gemm_configs import in_sixteen_bits
from models.layers.kernels.gemm_tables import SM_90_PERSISTENT
from models.layers.kernels.gemm_types import Tile
from models.layers.kernels.gpu import current_gpu
from models.layers.kernels.launch import launch, release_next, wait_for_previous

_ROW_TILES_TOGETHER = tl.constexpr(8)
"""Row tiles that run side by side over all columns, so that both operands come from L2."""
TILE = Tile(128, 128, 64, warps=8, stages=4, tma=True)


@triton.jit(do_not_specialize=["rows"])
def _persistent_gemm_kernel(
    x_source,
    weight_source,
    bias_ptr,
    out_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The sources are TMA descriptors; weight and bias hold gate, then up, 2 * N in all."""
    COLUMN_TILES: tl.constexpr = N // BLOCK_N
    row_tiles = tl.cdiv(rows, BLOCK_M)
    together = _ROW_TILES_TOGETHER * COLUMN_TILES
    release_next(PDL)
    wait_for_previous(PDL)
    for tile in range(tl.program_id(0), row_tiles * COLUMN_TILES, PROGRAMS):
        first_tile = tile // together * _ROW_TILES_TOGETHER
        tiles_here = tl.minimum(row_tiles - first_tile, _ROW_TILES_TOGETHER)
        first_row = (first_tile + tile % together % tiles_here) * BLOCK_M
        first_column = tile % together // tiles_here * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        acc_up = acc
        for first in range(0, K, BLOCK_K):
            x = x_source.load([first_row, first])
            acc = tl.dot(x, weight_source.load([first_column, first]).T, acc=acc)
            acc_up = tl.dot(x, weight_source.load([N + first_column, first]).T, acc=acc_up)
        kind = out_ptr.dtype.element_ty
        n = first_column + tl.arange(0, BLOCK_N)
        if BIAS:
            acc += tl.load(bias_ptr + n).to(tl.float32)[None, :]
            acc_up += tl.load(bias_ptr + N + n).to(tl.float32)[None, :]
        gate = acc.to(kind).to(tl.float32)
        acc = (gate * tl.sigmoid(gate)).to(kind).to(tl.float32) * acc_up.to(kind).to(tl.float32)
        m = first_row + tl.arange(0, BLOCK_M)
        tl.store(out_ptr + m[:, None].to(tl.int64) * N + n[None, :], acc.to(kind), mask=m[:, None] < rows)


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether x [..., K] times a weight of 16 bits was measured to be faster here on this kind of GPU."""
    rows, inputs, columns = x.numel() // x.shape[-1], weight.shape[1], weight.shape[0] // 2
    return (
        current_gpu().capability == (9, 0)
        and any(least <= rows <= most for least, most in SM_90_PERSISTENT.get((inputs, columns), ()))
        and in_sixteen_bits(x, weight)
    )


def persistent_gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """models.layers.gemm.gemm with "silu_mul", of whole tiles of inputs and outputs."""
    inputs, columns = weight.shape[1], weight.shape[0] // 2
    rows = x.reshape(-1, inputs).contiguous()
    out = torch.empty((rows.shape[0], columns), device=x.device, dtype=x.dtype)
    programs = current_gpu().num_sms
    launch(
        _persistent_gemm_kernel,
        (min(programs, triton.cdiv(rows.shape[0], TILE.rows) * (columns // TILE.columns)),),
        TensorDescriptor.from_tensor(rows, [TILE.rows, TILE.depth]),
        TensorDescriptor.from_tensor(weight, [TILE.columns, TILE.depth]),
        bias if bias is not None else rows,
        out,
        rows.shape[0],
        N=columns,
        K=inputs,
        BIAS=bias is not None,
        BLOCK_M=TILE.rows,
        BLOCK_N=TILE.columns,
        BLOCK_K=TILE.depth,
        PROGRAMS=programs,
        num_warps=TILE.warps,
        num_stages=TILE.stages,
    )
    return out.view(*x.shape[:-1], columns)
