"""The GEMM over channels of the AudioVAE's decoder: 1x1 convolutions with bias and residual, and transposed ones."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.launch import launch, release_next, wait_for_previous
from models.layers.precision import Precision
from models.voxcpm2.kernels.snake import dot


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    x_ptr,
    out_ptr,
    rows,
    LENGTH: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TWO_TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [rows * LENGTH, OUTPUTS] = hidden @ weight^T + bias, weight [OUTPUTS, INPUTS], plus x like out.

    TWO_TAPS: a transposed convolution. hidden has one sample more in front of each row, weight [2, OUTPUTS, INPUTS] a
    part for this sample and one for the sample before; outputs are (phase, channel), which is time's order; no x."""
    TILES_N: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    # Tiles of the same samples lie together: the hidden values they share stay in L2.
    output = program % TILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
    sample = (program // TILES_N * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    here = (sample < rows * LENGTH)[:, None]
    real = ((OUTPUTS % BLOCK_N == 0) | (output < OUTPUTS))[None, :]
    k = tl.arange(0, BLOCK_K)
    weights = weight_ptr + output.to(tl.int64)[None, :] * INPUTS + k[:, None]
    bias = tl.load(bias_ptr + output % CHANNELS)[None, :]
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    release_next(PDL)
    wait_for_previous(PDL)
    if TWO_TAPS:
        source = hidden_ptr + (sample + sample // LENGTH)[:, None] * INPUTS + k[None, :]
        for first in range(0, 2 * INPUTS, BLOCK_K):
            # The sample before comes first in hidden and second in the weight.
            back = tl.where(first < INPUTS, OUTPUTS * INPUTS, -INPUTS)
            weight = tl.load(weights + (back + first), mask=real, other=0.0)
            acc = dot(tl.load(source + first, mask=here, other=0.0), weight, acc, PRECISION)
    else:
        source = hidden_ptr + sample[:, None] * INPUTS + k[None, :]
        for first in range(0, INPUTS, BLOCK_K):
            weight = tl.load(weights + first, mask=real, other=0.0)
            acc = dot(tl.load(source + first, mask=here, other=0.0), weight, acc, PRECISION)
    acc += bias
    place = sample[:, None] * OUTPUTS + output[None, :]
    if not TWO_TAPS:
        acc += tl.load(x_ptr + place, mask=here & real, other=0.0)
    tl.store(out_ptr + place, acc, mask=here & real)


@dataclass(frozen=True)
class GemmTile:
    """Samples and outputs of a thread block, inputs of a step."""

    samples: int
    outputs: int
    inputs: int
    num_warps: int = 4
    num_stages: int = 3


def channel_gemm(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    x: Tensor | None,
    out: Tensor,
    outputs: int,
    precision: Precision,
    tile: GemmTile | None = None,
) -> None:
    """hidden [rows, T, inputs], or with T + 1 samples if there is no x, into out of rows * T * outputs values."""
    if weight.dtype != hidden.dtype:
        raise TypeError(f"weight is {weight.dtype}, expected {hidden.dtype} for a GEMM in {precision}")
    rows, inputs = hidden.shape[0], hidden.shape[-1]
    length = hidden.shape[1] - (x is None)
    tile = tile or gemm_tile_for(rows * length, outputs, precision)
    launch(
        _product_kernel,
        (ceil(outputs / tile.outputs) * ceil(rows * length / tile.samples),),
        hidden,
        weight,
        bias,
        hidden if x is None else x,
        out,
        rows,
        LENGTH=length,
        INPUTS=inputs,
        OUTPUTS=outputs,
        CHANNELS=bias.shape[0],
        TWO_TAPS=x is None,
        BLOCK_T=tile.samples,
        BLOCK_N=tile.outputs,
        BLOCK_K=min(tile.inputs, inputs & -inputs),
        PRECISION=precision,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def gemm_tile_for(samples: int, outputs: int, precision: Precision) -> GemmTile:
    """Large where that keeps most SMs busy. Smaller ones than 64 are slower even where they do."""
    inputs = 64 if precision == "float16" else 32
    if outputs >= 128 and ceil(samples / 128) * ceil(outputs / 128) >= 96:
        return GemmTile(128, 128, inputs, num_warps=8)
    return GemmTile(64, 64, inputs, num_stages=4)
