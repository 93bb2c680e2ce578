"""GEMVs, on plain arithmetic units: bound by reading the weight once, with what stands before and after inside.

Reference: models.layers.gemm.gemv.

A vector may take its weight from a stack by an index that is read on the device (the experts of a mixture).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.e4m3 import INPUTS, first_inputs, in_order, parts, wide_part, zero_of
from models.layers.kernels.gemm_configs import e4m3_blocks, measured_blocks
from models.layers.kernels.gemm_types import Blocks, Shape
from models.layers.kernels.launch import launch, release_next, wait_for_previous
from models.layers.kernels.norms import weighted
from models.layers.quantized import GROUP, QuantizedWeight, Weight, kernels_take


class _Given(NamedTuple):
    """x inside a kernel: pointers to its row and to the norm's weight, and the norm's factor."""

    row: Any
    norm: Any
    rstd: Any


class _Codes(NamedTuple):
    """Codes of a program's outputs: pointers to their units, to scales and zeros; the places of the outputs' first
    groups; and how far behind those of gate the units of up are."""

    rows: Any
    scale: Any
    zeros: Any
    factors: Any
    to_up: Any


@triton.jit
def _gemv_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    zeros_ptr,
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
    FORM: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_N outputs of one vector. SILU_MUL: the weight holds the rows of gate, then those of up. FORM:
    how it is widened where it is held as codes; BLOCK_K counts units of PARTS codes then, of which 4 bits have 8.
    SCALE_GROUP: inputs that share a scale, 0: the scale is applied to the sum."""
    vector = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    UNITS: tl.constexpr = K // PARTS
    GROUPS: tl.constexpr = 1 if SCALE_GROUP == 0 else K // SCALE_GROUP
    weight_rows = weight_ptr + n.to(tl.int64) * stride_weight
    factors = n.to(tl.int64) * GROUPS
    if INDEXED:
        release_next(PDL)
        wait_for_previous(PDL)
        expert = tl.load(index_ptr + vector)
        weight_rows += expert * stride_expert
        factors += expert * ((2 * N if SILU_MUL else N) * GROUPS)
    if SCALE_GROUP > 0 and PARTS < 8:
        RUN: tl.constexpr = INPUTS // PARTS
        chunk = tl.arange(0, BLOCK_K // RUN)[None, :, None]
        rows = weight_rows[:, None, None] + chunk * RUN + tl.arange(0, RUN)[None, None, :]
        here = chunk < K // INPUTS
    else:
        rows = weight_rows[:, None] + k[None, :]
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
    given = _Given(x_row, norm_ptr, rstd)
    acc = tl.zeros(first.shape, tl.float32)
    acc_up = tl.zeros(first.shape, tl.float32)
    if PARTS == 8:
        codes = _Codes(rows, scale_ptr, zeros_ptr, factors[:, None], N * stride_weight)
        acc, acc_up = _sums_of_u4(
            given, codes, first, first_up, N * GROUPS, K, SCALE_GROUP, FORM, ZEROS, NORM, SILU_MUL, BLOCK_N, BLOCK_K
        )
    elif SCALE_GROUP > 0:
        codes = _Codes(rows, scale_ptr, zeros_ptr, factors[:, None, None], N * stride_weight)
        acc, acc_up = _sums_of_codes(
            given, codes, first, first_up, acc, acc_up,
            N * GROUPS, K, SCALE_GROUP, PARTS, FORM, ZEROS, NORM, SILU_MUL, BLOCK_K,
        )  # fmt: skip
        acc = tl.sum(acc, 2)
        acc_up = tl.sum(acc_up, 2)
    else:
        for block in tl.static_range(0, (UNITS + BLOCK_K - 1) // BLOCK_K):
            unit = block * BLOCK_K + k
            if FORM == "":
                # Before the weights: behind them, all of a long row would be in registers at once.
                x = _inputs(given, unit, K, NORM)
            if block == 0:
                weight = first
                weight_up = first_up
            else:
                weight = tl.load(rows + block * BLOCK_K, mask=unit[None, :] < UNITS, other=0)
                weight_up = weight
                if SILU_MUL:
                    weight_up = tl.load(rows + block * BLOCK_K + N * stride_weight, mask=unit[None, :] < UNITS, other=0)
            if FORM == "":
                acc += weight.to(tl.float32) * x.to(tl.float32)[None, :]
                if SILU_MUL:
                    acc_up += weight_up.to(tl.float32) * x.to(tl.float32)[None, :]
            else:
                # In the weight's own shape: x lies in the same registers, without a way through shared memory that
                # weights of the next block would wait for.
                first_input = first_inputs(unit, PARTS)[None, :] + tl.zeros((BLOCK_N, 1), tl.int32)
                for part in tl.static_range(PARTS):
                    column = first_input + part * (INPUTS // PARTS)
                    x = _inputs(given, column, K, NORM).to(tl.float32)
                    acc += wide_part(weight, 0.0, part, FORM) * x
                    if SILU_MUL:
                        acc_up += wide_part(weight_up, 0.0, part, FORM) * x
    kind = out_ptr.dtype.element_ty
    total = tl.sum(acc, 1)
    total_up = tl.sum(acc_up, 1)
    if FORM != "" and SCALE_GROUP == 0:
        total *= tl.load(scale_ptr + factors)
        if SILU_MUL:
            total_up *= tl.load(scale_ptr + factors + N)
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
def _sums_of_codes(
    given,
    codes,
    weight,
    weight_up,
    acc,
    acc_up,
    UP_GROUPS: tl.constexpr,
    K: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    FORM: tl.constexpr,
    ZEROS: tl.constexpr,
    NORM: tl.constexpr,
    SILU_MUL: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """acc and acc_up [outputs, chunks of INPUTS, units of a chunk] after all inputs. weight: the
    first units, of their shape as codes.rows is; codes.factors [outputs, 1, 1]."""
    RUN: tl.constexpr = INPUTS // PARTS
    CHUNKS: tl.constexpr = BLOCK_K // RUN
    # Every part in the weight's own shape: x lies in the same registers.
    lane = tl.arange(0, RUN)[None, None, :] + tl.zeros(codes.factors.shape, tl.int32)
    for block in range(0, K // INPUTS, CHUNKS):
        chunk = block + tl.arange(0, CHUNKS)[None, :, None]
        here = chunk < K // INPUTS
        following = tl.load(codes.rows + (block + CHUNKS) * RUN, mask=chunk + CHUNKS < K // INPUTS, other=0)
        following_up = following
        if SILU_MUL:
            following_up = tl.load(
                codes.rows + (block + CHUNKS) * RUN + codes.to_up, mask=chunk + CHUNKS < K // INPUTS, other=0
            )
        product = tl.zeros_like(acc)
        product_up = product
        zero = zero_of(None, FORM)
        zero_up = zero
        for part in tl.static_range(PARTS):
            group = codes.factors + (chunk * INPUTS + part * RUN) // SCALE_GROUP
            if ZEROS and part * RUN % SCALE_GROUP == 0:
                zero = zero_of(tl.load(codes.zeros + group, mask=here, other=0), FORM)
                if SILU_MUL:
                    zero_up = zero_of(tl.load(codes.zeros + UP_GROUPS + group, mask=here, other=0), FORM)
            x = _inputs(given, chunk * INPUTS + part * RUN + lane, K, NORM).to(tl.float32)
            product += wide_part(weight, zero, part, FORM) * x
            if SILU_MUL:
                product_up += wide_part(weight_up, zero_up, part, FORM) * x
            if part == PARTS - 1 or (part + 1) * RUN % SCALE_GROUP == 0:
                acc += product * tl.load(codes.scale + group, mask=here, other=0.0).to(tl.float32)
                product = tl.zeros_like(acc)
                if SILU_MUL:
                    scale = tl.load(codes.scale + UP_GROUPS + group, mask=here, other=0.0)
                    acc_up += product_up * scale.to(tl.float32)
                    product_up = product
        weight = following
        weight_up = following_up
    return acc, acc_up


# One instruction, where the compiler makes two of an `and` and an `or` with constants.
_BESIDE_U4 = tl.constexpr(
    tuple(
        f"{{ .reg .b32 magic; mov.b32 magic, {magic:#x}; lop3.b32 $0, $1, {mask:#x}, magic, 0xea; }}"
        for mask, magic in ((0x00078000, 0x43800000), (0x00780000, 0x41800000))
    )
)


@triton.jit
def _sums_of_u4(
    given,
    codes,
    units,
    units_up,
    UP_GROUPS: tl.constexpr,
    K: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    FORM: tl.constexpr,
    ZEROS: tl.constexpr,
    NORM: tl.constexpr,
    SILU_MUL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """_sums_of_codes of 4 bits, with acc and acc_up [outputs, fours of units]. A unit of int32 is two of int16.

    The kernel is bound by instructions, so no code is shifted, and no zero subtracted, alone. A code under the exponent
    of a float is 256 + code in even parts and 16 + code in odd ones, two of them after one shift. The sum over a group,
    less 256 + zero or 16 + zero times the sum of x, is the product. A thread holds the same four units of every output,
    so that x is converted once."""
    FOURS: tl.constexpr = BLOCK_K // 4
    RUN: tl.constexpr = INPUTS // 4
    kind: tl.constexpr = given.row.dtype.element_ty
    x_pairs, norm_pairs = given.row.to(tl.pointer_type(tl.int32)), given.norm.to(tl.pointer_type(tl.int32))
    unit_of = tl.arange(0, BLOCK_K)
    four_of = tl.arange(0, FOURS)
    acc = tl.zeros((BLOCK_N, FOURS), tl.float32)
    acc_up = acc
    for block in range(0, K // 8, BLOCK_K):
        ahead = (block + BLOCK_K + unit_of < K // 8)[None, :]
        following = tl.load(codes.rows + block + BLOCK_K, mask=ahead, other=0)
        following_up = following
        if SILU_MUL:
            following_up = tl.load(codes.rows + block + BLOCK_K + codes.to_up, mask=ahead, other=0)
        pair = (block + unit_of) // (INPUTS // 8) * (INPUTS // 2) + (block + unit_of) % (INPUTS // 8)
        four = (block + 4 * four_of) // (INPUTS // 8) * INPUTS
        here = (four < K)[None, :]
        product = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        product_up = product
        even = tl.zeros((BLOCK_K,), tl.float32)
        odd = even
        for part in tl.static_range(4):
            pairs = tl.load(x_pairs + pair + part * (RUN // 2), mask=pair < K // 2, other=0)
            if NORM and given.norm.dtype.element_ty == kind:
                norms = tl.load(norm_pairs + pair + part * (RUN // 2), mask=pair < K // 2, other=0)
            for half in tl.static_range(2):
                x = _of_pair(pairs, half, kind)
                if NORM:
                    if given.norm.dtype.element_ty == kind:
                        norm = _of_pair(norms, half, kind).to(kind)
                    else:
                        norm = tl.load(given.norm + 2 * pair + part * RUN + half, mask=pair < K // 2, other=0.0)
                    x = weighted(x, given.rstd, norm, kind).to(tl.float32)
                if part % 2 == 0:
                    even += x
                else:
                    odd += x
                product += _beside_u4(units, part, half, FORM) * x[None, :]
                if SILU_MUL:
                    product_up += _beside_u4(units_up, part, half, FORM) * x[None, :]
            if part == 3 or (part + 1) * RUN % SCALE_GROUP == 0:
                group = codes.factors + (four + part * RUN)[None, :] // SCALE_GROUP
                scale = tl.load(codes.scale + group, mask=here, other=0.0).to(tl.float32)
                base = (256.0 * even + 16.0 * odd)[None, :]
                total = (even + odd)[None, :] + tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
                if ZEROS:
                    total = _of_fours(total, FOURS)
                    zero = zero_of(tl.load(codes.zeros + group, mask=here, other=0), FORM)
                    acc += (_of_fours(product - base, FOURS) - zero * total) * scale
                else:
                    base += 8.0 * total
                    acc += _of_fours(product - base, FOURS) * scale
                if SILU_MUL:
                    scale = tl.load(codes.scale + UP_GROUPS + group, mask=here, other=0.0).to(tl.float32)
                    if ZEROS:
                        zero = zero_of(tl.load(codes.zeros + UP_GROUPS + group, mask=here, other=0), FORM)
                        acc_up += (_of_fours(product_up - base, FOURS) - zero * total) * scale
                    else:
                        acc_up += _of_fours(product_up - base, FOURS) * scale
                product = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
                product_up = product
                even = tl.zeros((BLOCK_K,), tl.float32)
                odd = even
        units = following
        units_up = following_up
    return acc, acc_up


@triton.jit
def _beside_u4(units, PART: tl.constexpr, HALF: tl.constexpr, FORM: tl.constexpr):
    """int32 units -> 256 (even parts) or 16 (odd ones) plus the code of this part of their low or high half."""
    SHIFT: tl.constexpr = 15 - 16 * HALF - 4 * (PART - PART % 2)
    moved = units << SHIFT if SHIFT > 0 else units >> -SHIFT
    if FORM == "u4_portable":
        bits = moved & 0x00078000 | 0x43800000 if PART % 2 == 0 else moved & 0x00780000 | 0x41800000
    else:
        bits = tl.inline_asm_elementwise(_BESIDE_U4[PART % 2], "=r,r", [moved], tl.int32, is_pure=True, pack=1)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _of_pair(pairs, HALF: tl.constexpr, kind: tl.constexpr):
    """The low or the high one of two values of 16 bits in an int32, as float32."""
    if kind == tl.bfloat16:
        bits = pairs << 16 if HALF == 0 else pairs & -65536
        value = bits.to(tl.float32, bitcast=True)
    else:
        value = (pairs >> 16 * HALF).to(tl.int16).to(kind, bitcast=True).to(tl.float32)
    return value


@triton.jit
def _of_fours(values, FOURS: tl.constexpr):
    """[n, 4 * FOURS] -> sums [n, FOURS]."""
    return tl.sum(tl.reshape(values, (values.shape[0], FOURS, 4)), 2)


@triton.jit
def _inputs(given, column, K: tl.constexpr, NORM: tl.constexpr):
    """x at `column`, normed."""
    x = tl.load(given.row + column, mask=column < K, other=0.0)
    if NORM:
        x = weighted(x.to(tl.float32), given.rstd, tl.load(given.norm + column, mask=column < K, other=0.0), x.dtype)
    return x


_CODES = Blocks(4, 256)
"""Of codes with scales of groups: a load of 16 bytes for each thread; more would spill registers."""


def _u4_blocks(inputs: int) -> Blocks:
    """A load of 16 bytes for each output and thread, of whole rows where 4 warps are enough for that."""
    depth = min(512, max(128, triton.next_power_of_2(inputs // 8)))
    return Blocks(8, depth, depth // 128)


def _blocks(inputs: int, *, silu_mul: bool, of_experts: bool) -> Blocks:
    """8 KiB of weights at a time."""
    block_k = 1024 if inputs % 1024 == 0 or inputs > 2048 else 512
    return Blocks(4096 // block_k // (2 if silu_mul else 1), block_k, 2 if silu_mul and of_experts else 4)


def is_vector(x: Tensor) -> bool:
    return x.numel() == x.shape[-1]


def vector_gemm(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    silu_mul: bool = False,
) -> Tensor:
    """gemv of the one vector in x [..., K] -> [..., N]."""
    flat = residual.reshape(1, -1) if residual is not None else None
    out = gemv(x.reshape(1, -1), weight, bias, norm=norm, residual=flat, silu_mul=silu_mul)
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
    read = parts(weight)
    values, scale = read.values, read.scale
    if isinstance(weight, QuantizedWeight) and weight.order is not None:
        x = in_order(x, weight)
        norm = None if norm is None else (norm[0].index_select(0, weight.order), norm[1])
    inputs = weight.shape[-1]
    outputs = weight.shape[-2] // (2 if silu_mul else 1)
    vectors = x.shape[0] if index is None else index.shape[0]
    out = torch.empty((vectors, outputs), device=x.device, dtype=out_dtype or x.dtype)
    if blocks is None and isinstance(weight, QuantizedWeight) and read.group >= GROUP:
        codes = weight.scheme.codes
        blocks = measured_blocks(Shape("silu_mul" if silu_mul else "plain", inputs, outputs, codes=codes))
    if read.form in ("u4", "u4_portable"):
        # Two units of 16 bits at once.
        read, values = read._replace(parts=8), values.view(torch.int32)
        blocks = blocks or _u4_blocks(inputs)
    if blocks is None and read.group:
        blocks = _CODES
    if blocks is None and scale is not None:
        blocks = e4m3_blocks(inputs, outputs, gated=silu_mul)
    blocks = blocks or _blocks(inputs, silu_mul=silu_mul, of_experts=index is not None)
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
        read.zeros if read.zeros is not None else x,
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
        **read.constants,
        BIAS=bias is not None,
        ADD=residual is not None,
        BLOCK_N=block_n,
        BLOCK_K=blocks.depth,
        PADDED=triton.next_power_of_2(inputs),
        num_warps=blocks.warps,
    )
    return out
