"""The kernel of the tiled GEMMs (models.layers.kernels.tiled_gemm)."""

from __future__ import annotations

import triton
import triton.language as tl

from models.layers.kernels.e4m3 import HALF_GROUP, accumulate, first_inputs, narrow_halves, sums_of_codes
from models.layers.kernels.gemm_lora import Lora, adapters_met, expand, shrink
from models.layers.kernels.launch import release_next, wait_for_previous

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
        acc, acc_up = sums_of_codes(
            x_source + m[:, None] * stride_x,
            x_here,
            weight_source,
            scale_ptr,
            zeros_ptr,
            n.to(tl.int64),
            stride_weight,
            share * K_SHARE,
            tl.minimum(share * K_SHARE + K_SHARE, K),
            N,
            K,
            SCALE_GROUP,
            PARTS,
            FORM,
            ZEROS,
            ACTIVATION == "silu_mul",
            SWAP,
            AHEAD,
            KEEP,
        )
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
