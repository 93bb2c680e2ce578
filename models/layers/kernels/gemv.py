"""GEMVs, on plain arithmetic units: bound by reading the weight once, with what stands before and after inside.

Reference: models.layers.gemm.gemv.

A vector may take its weight from a stack by an index that is read on the device (the experts of a mixture).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.e4m3 import Weight, kernels_take
from models.layers.kernels.e4m3 import HALF_GROUP, low_inputs, parts, wide_halves
from models.layers.kernels.gemm_configs import e4m3_blocks
from models.layers.kernels.gemm_types import Blocks
from models.layers.kernels.launch import launch, release_next, wait_for_previous
from models.layers.kernels.norms import weighted


@triton.jit
def _gemv_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    index_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    eps,
    stride_x,
    stride_weight,
    stride_expert,
    N: tl.constexpr,
    K: tl.constexpr,
    X_DIV: tl.constexpr,
    INDEXED: tl.constexpr,
    NORM: tl.constexpr,
    SILU_MUL: tl.constexpr,
    E4M3: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_N outputs of one vector. SILU_MUL: the weight holds the rows of gate, then those of up. E4M3:
    how it is widened where it is in e4m3; K and BLOCK_K count units of two then, and factors of its rows follow."""
    vector = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    UNITS: tl.constexpr = K if E4M3 == "" else K // 2
    rows = weight_ptr + n.to(tl.int64)[:, None] * stride_weight + k[None, :]
    factors = scale_ptr + n
    if INDEXED:
        release_next(PDL)
        wait_for_previous(PDL)
        expert = tl.load(index_ptr + vector)
        rows += expert * stride_expert
        if E4M3 != "":
            factors += expert * (2 * N if SILU_MUL else N)
    here = k[None, :] < UNITS
    # Weights of the first block are on their way before the kernel before has ended.
    first = tl.load(rows, mask=here, other=0)
    first_up = first
    if SILU_MUL:
        first_up = tl.load(rows + N * stride_weight, mask=here, other=0)
    if not INDEXED:
        release_next(PDL)
        wait_for_previous(PDL)
    x_row = x_ptr + vector // X_DIV * stride_x
    rstd = 1.0
    if NORM:
        everywhere = tl.arange(0, PADDED)
        wide = tl.load(x_row + everywhere, mask=everywhere < K, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(wide * wide, 0) / K + eps)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for block in tl.static_range(0, (UNITS + BLOCK_K - 1) // BLOCK_K):
        unit = block * BLOCK_K + k
        if E4M3 == "":
            # Before the weights: behind them, all of a long row would be in registers at once.
            x = _inputs(x_row, norm_ptr, unit, rstd, K, NORM)
        if block == 0:
            weight = first
            weight_up = first_up
        else:
            weight = tl.load(rows + block * BLOCK_K, mask=unit[None, :] < UNITS, other=0)
            weight_up = weight
            if SILU_MUL:
                weight_up = tl.load(rows + block * BLOCK_K + N * stride_weight, mask=unit[None, :] < UNITS, other=0)
        if E4M3 == "":
            acc += weight.to(tl.float32) * x.to(tl.float32)[None, :]
            if SILU_MUL:
                acc_up += weight_up.to(tl.float32) * x.to(tl.float32)[None, :]
        else:
            # In the weight's own shape: x lies in the same registers, without a way through shared memory that
            # weights of the next block would wait for.
            low_input = low_inputs(unit)[None, :] + tl.zeros((BLOCK_N, 1), tl.int32)
            x_low = _inputs(x_row, norm_ptr, low_input, rstd, K, NORM).to(tl.float32)
            x_high = _inputs(x_row, norm_ptr, low_input + HALF_GROUP, rstd, K, NORM).to(tl.float32)
            low, high = wide_halves(weight, E4M3)
            acc += low * x_low
            acc += high * x_high
            if SILU_MUL:
                low, high = wide_halves(weight_up, E4M3)
                acc_up += low * x_low
                acc_up += high * x_high
    kind = out_ptr.dtype.element_ty
    total = tl.sum(acc, 1)
    total_up = tl.sum(acc_up, 1)
    if E4M3 != "":
        total *= tl.load(factors)
        if SILU_MUL:
            total_up *= tl.load(factors + N)
    if BIAS:
        total += tl.load(bias_ptr + n).to(tl.float32)
        if SILU_MUL:
            total_up += tl.load(bias_ptr + N + n).to(tl.float32)
    if SILU_MUL:
        gate = total.to(kind).to(tl.float32)
        up = total_up.to(kind).to(tl.float32)
        total = (gate * tl.sigmoid(gate)).to(kind).to(tl.float32) * up
    if ADD:
        total = total.to(kind).to(tl.float32) + tl.load(residual_ptr + vector * N + n).to(tl.float32)
    tl.store(out_ptr + vector * N + n, total.to(kind))


@triton.jit
def _inputs(x_row, norm_ptr, column, rstd, K: tl.constexpr, NORM: tl.constexpr):
    """x at `column`, normed."""
    x = tl.load(x_row + column, mask=column < K, other=0.0)
    if NORM:
        x = weighted(x.to(tl.float32), rstd, tl.load(norm_ptr + column, mask=column < K, other=0.0), x.dtype)
    return x


def _blocks(inputs: int, *, silu_mul: bool) -> Blocks:
    """8 KiB of weights at a time."""
    block_k = 1024 if inputs % 1024 == 0 or inputs > 2048 else 512
    return Blocks(4096 // block_k // (2 if silu_mul else 1), block_k)


def is_vector(x: Tensor) -> bool:
    return x.numel() == x.shape[-1]


def vector_gemm(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    silu_mul: bool = False,
) -> Tensor:
    """gemv of the one vector in x [..., K] -> [..., N]."""
    flat = residual.reshape(1, -1) if residual is not None else None
    out = gemv(x.reshape(1, -1), weight, bias, residual=flat, silu_mul=silu_mul)
    return out.view(*x.shape[:-1], -1)


def gemv(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    index: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    silu_mul: bool = False,
    fan_out: int = 1,
    out_dtype: torch.dtype | None = None,
    blocks: Blocks | None = None,
) -> Tensor:
    """residual + linear(rms_norm(x)) of each row, or silu(gate) * up of it: x [v, K], weight [N or 2 N, K] -> [v, N].

    index int64 [v * fan_out]: weight is [experts, N or 2 N, K], and row i // fan_out of x meets weight index[i]. norm:
    its weight [K] and eps. residual [v, N], contiguous. Nothing in the stream may write the weight shortly before.
    """
    if not kernels_take(weight):
        raise ValueError(f"gemv: no kernel reads a weight in e4m3 of {weight.shape[-1]} inputs")
    values, scale, form = parts(weight)
    inputs = weight.shape[-1]
    outputs = weight.shape[-2] // (2 if silu_mul else 1)
    vectors = x.shape[0] if index is None else index.shape[0]
    out = torch.empty((vectors, outputs), device=x.device, dtype=out_dtype or x.dtype)
    if vectors == 0:
        return out
    if blocks is None and scale is not None:
        blocks = e4m3_blocks(inputs, outputs, gated=silu_mul)
    blocks = blocks or _blocks(inputs, silu_mul=silu_mul)
    block_n = blocks.outputs
    while outputs % block_n:
        block_n //= 2
    if x.stride(1) != 1 or values.stride(-1) != 1:
        raise ValueError(f"gemv: rows must be contiguous, strides {x.stride()} and {values.stride()}")
    launch(
        _gemv_kernel,
        (outputs // block_n, vectors),
        x,
        values,
        scale if scale is not None else x,
        index if index is not None else x,
        bias if bias is not None else x,
        norm[0] if norm is not None else x,
        residual if residual is not None else x,
        out,
        norm[1] if norm is not None else 0.0,
        x.stride(0),
        values.stride(-2),
        values.stride(0) if index is not None else 0,
        N=outputs,
        K=inputs,
        X_DIV=fan_out,
        INDEXED=index is not None,
        NORM=norm is not None,
        SILU_MUL=silu_mul,
        E4M3=form,
        BIAS=bias is not None,
        ADD=residual is not None,
        BLOCK_N=block_n,
        BLOCK_K=blocks.depth,
        PADDED=triton.next_power_of_2(inputs),
        num_warps=blocks.warps,
    )
    return out
