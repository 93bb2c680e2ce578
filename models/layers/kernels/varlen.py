"""Packed variable-length attention; reference: `models.layers.attention.varlen_attention.reference`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.heads import LOG2_E, head_sizes
from models.layers.kernels.launch import launch, row_strides

_FEW_SEGMENTS, _MANY_SEGMENTS = 32, 256
"""Ends that are read at a time: those of a prefill in one warp, those of a video's frames in two turns."""
_PADDING_TILES = 4
"""Programs that write zeros behind the last of many short segments."""


@triton.jit
def segment_of_tile(tile, cu_ptr, num_segments, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr):
    """Segment i owns the tiles from cu[i] // BLOCK_M + i on, which are always enough for its rows, so that a grid
    follows from the numbers of rows and segments alone. The rows behind the last segment count as one more. BLOCK_S:
    ends that are read at a time."""
    started = 0
    for base in range(0, num_segments + 1, BLOCK_S):
        index = base + tl.arange(0, BLOCK_S)
        begin = tl.load(cu_ptr + index, mask=index <= num_segments, other=0)
        started += tl.sum(((begin // BLOCK_M + index <= tile) & (index <= num_segments)).to(tl.int32))
    return started - 1


@triton.jit
def bounds_of(segment, cu_ptr, num_rows, num_segments):
    """A segment's first row and its end."""
    begin = tl.load(cu_ptr + segment)
    inside = segment < num_segments
    end = tl.load(cu_ptr + segment + 1, mask=inside, other=0)
    return begin, tl.where(inside, end, num_rows)


@triton.jit
def _attend_block(
    acc1,
    acc2,
    peak,
    total,
    q1,
    q2,
    k_base,
    v_base,
    first,
    stop_key,
    row_limit,
    stride_k,
    stride_v,
    scale_log2,
    D: tl.constexpr,
    DV: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    V1: tl.constexpr,
    V2: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block of keys: online softmax in base 2."""
    keys = first + tl.arange(0, BLOCK_N)
    present = keys[:, None] < stop_key
    columns = tl.arange(0, D1)[None, :]
    k_rows = k_base + keys[:, None].to(tl.int64) * stride_k
    v_rows = v_base + keys[:, None].to(tl.int64) * stride_v
    if MASKED:
        k1 = tl.load(k_rows + columns, mask=present & (columns < D), other=0.0)
    elif D1 > D:
        k1 = tl.load(k_rows + columns, mask=columns < D, other=0.0)
    else:
        k1 = tl.load(k_rows + columns)
    scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
    if D2 > 0:
        rest = D1 + tl.arange(0, D2)[None, :]
        if MASKED:
            k2 = tl.load(k_rows + rest, mask=present & (rest < D), other=0.0)
        else:
            k2 = tl.load(k_rows + rest, mask=rest < D, other=0.0)
        scores = tl.dot(q2, tl.trans(k2), acc=scores, input_precision=PRECISION)
    if MASKED:
        scores = tl.where(keys[None, :] < row_limit[:, None], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
    if MASKED:
        # A row that sees no key yet keeps -inf, and inf - inf is NaN.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    else:
        base = new_peak
    weights = tl.exp2(scores * scale_log2 - base[:, None])
    decay = tl.exp2(peak - base)
    total = total * decay + tl.sum(weights, 1)
    v_columns = tl.arange(0, V1)[None, :]
    if MASKED:
        v1 = tl.load(v_rows + v_columns, mask=present & (v_columns < DV), other=0.0)
    elif V1 > DV:
        v1 = tl.load(v_rows + v_columns, mask=v_columns < DV, other=0.0)
    else:
        v1 = tl.load(v_rows + v_columns)
    weights = weights.to(v1.dtype)
    acc1 = tl.dot(weights, v1, acc=acc1 * decay[:, None], input_precision=PRECISION)
    if V2 > 0:
        v_rest = V1 + tl.arange(0, V2)[None, :]
        if MASKED:
            v2 = tl.load(v_rows + v_rest, mask=present & (v_rest < DV), other=0.0)
        else:
            v2 = tl.load(v_rows + v_rest, mask=v_rest < DV, other=0.0)
        acc2 = tl.dot(weights, v2, acc=acc2 * decay[:, None], input_precision=PRECISION)
    return acc1, acc2, new_peak, total


@triton.jit(do_not_specialize=["num_rows", "num_segments"])
def _varlen_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    cu_q_ptr,
    cu_k_ptr,
    num_rows,
    num_segments,
    scale_log2,
    stride_q,
    stride_k,
    stride_v,
    Q_HEAD: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    V1: tl.constexpr,
    V2: tl.constexpr,
    CAUSAL: tl.constexpr,
    SHORT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: BLOCK_M queries of one segment (segment_of_tile) and head. Rows behind the last segment are written
    as zero.

    SHORT: no segment is longer than BLOCK_M, and owns tile i alone; the further tiles share the rows behind the last.
    """
    # Heads first: the tiles without rows come last and leave no gaps among those with work.
    head, tile = tl.program_id(0), tl.program_id(1)
    if SHORT:
        segment = tl.minimum(tile, num_segments)
    else:
        segment = segment_of_tile(tile, cu_q_ptr, num_segments, BLOCK_M, BLOCK_S)
    q_begin, q_end = bounds_of(segment, cu_q_ptr, num_rows, num_segments)
    inside = segment < num_segments
    first_row = (tile - segment) * BLOCK_M
    if not SHORT:
        first_row -= q_begin // BLOCK_M * BLOCK_M
    length_q = q_end - q_begin
    if first_row >= length_q:
        return
    rows = first_row + tl.arange(0, BLOCK_M)
    kept = rows[:, None] < length_q
    packed = (q_begin + rows)[:, None].to(tl.int64)
    v_columns = tl.arange(0, V1)[None, :]
    acc1 = tl.zeros((BLOCK_M, V1), tl.float32)
    # The unused second accumulator of head dims without a rest costs nothing: it is never read.
    acc2 = tl.zeros((BLOCK_M, V2 if V2 > 0 else 16), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if inside:
        k_begin = tl.load(cu_k_ptr + segment)
        length_k = tl.load(cu_k_ptr + segment + 1) - k_begin
        q_rows = q_ptr + packed * stride_q + head * Q_HEAD
        columns = tl.arange(0, D1)[None, :]
        q1 = tl.load(q_rows + columns, mask=kept & (columns < D), other=0.0)
        q2 = q1
        if D2 > 0:
            rest = D1 + tl.arange(0, D2)[None, :]
            q2 = tl.load(q_rows + rest, mask=kept & (rest < D), other=0.0)
        k_base = k_ptr + k_begin.to(tl.int64) * stride_k + (head // GROUP) * K_HEAD
        v_base = v_ptr + k_begin.to(tl.int64) * stride_v + (head // GROUP) * V_HEAD
        if CAUSAL:
            row_limit = tl.minimum(rows + 1 + length_k - length_q, length_k)
            full_stop = tl.minimum(tl.maximum(first_row + 1 + length_k - length_q, 0), length_k)
            stop = tl.minimum(tl.maximum(first_row + BLOCK_M + length_k - length_q, 0), length_k)
        else:
            row_limit = tl.zeros_like(rows) + length_k
            full_stop = length_k
            stop = length_k
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        full = full_stop // BLOCK_N * BLOCK_N
        for first in range(0, full, BLOCK_N):
            acc1, acc2, peak, total = _attend_block(
                acc1, acc2, peak, total, q1, q2, k_base, v_base, first, stop, row_limit, stride_k, stride_v, scale_log2,
                D, DV, D1, D2, V1, V2, BLOCK_N, False, PRECISION,
            )  # fmt: skip
        for first in range(full, stop, BLOCK_N):
            acc1, acc2, peak, total = _attend_block(
                acc1, acc2, peak, total, q1, q2, k_base, v_base, first, stop, row_limit, stride_k, stride_v, scale_log2,
                D, DV, D1, D2, V1, V2, BLOCK_N, True, PRECISION,
            )  # fmt: skip
    norm = 1.0 / tl.where(total == 0.0, 1.0, total)
    out_rows = out_ptr + (packed * HEADS + head) * DV
    tl.store(out_rows + v_columns, (acc1 * norm[:, None]).to(out_ptr.dtype.element_ty), mask=kept & (v_columns < DV))
    if V2 > 0:
        v_rest = V1 + tl.arange(0, V2)[None, :]
        tl.store(out_rows + v_rest, (acc2 * norm[:, None]).to(out_ptr.dtype.element_ty), mask=kept & (v_rest < DV))
    if SHORT:
        step = (tl.num_programs(1) - num_segments) * BLOCK_M
        for row in range(q_begin + first_row + step, tl.where(inside, 0, num_rows), step):
            further = (row + tl.arange(0, BLOCK_M))[:, None]
            zeros = out_ptr + (further.to(tl.int64) * HEADS + head) * DV
            zero = tl.zeros((BLOCK_M, V1), out_ptr.dtype.element_ty)
            tl.store(zeros + v_columns, zero, mask=(further < num_rows) & (v_columns < DV))
            if V2 > 0:
                rest_columns = V1 + tl.arange(0, V2)[None, :]
                zero = tl.zeros((BLOCK_M, V2), out_ptr.dtype.element_ty)
                tl.store(zeros + rest_columns, zero, mask=(further < num_rows) & (rest_columns < DV))


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool = False,
    longest: int | None = None,
) -> Tensor:
    """models.layers.attention.varlen_attention for any head dims; rows of a head must be contiguous."""
    num_rows, heads, width = q.shape
    value_width = v.shape[-1]
    if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError(
            f"varlen attention: heads must be contiguous, strides {q.stride()}, {k.stride()}, {v.stride()}"
        )
    block_m, block_n, num_warps, num_stages = _tile(width, q.dtype)
    out = torch.empty((num_rows, heads, value_width), device=q.device, dtype=q.dtype)
    segments = cu_seqlens_q.shape[0] - 1
    if num_rows == 0:
        return out
    short = longest is not None and longest <= block_m
    launch(
        _varlen_kernel,
        (heads, segments + (_PADDING_TILES if short else num_rows // block_m + 1)),
        q,
        k,
        v,
        out,
        cu_seqlens_q,
        cu_seqlens_k,
        num_rows,
        segments,
        width**-0.5 * LOG2_E,
        *row_strides(q, k, v),
        **head_sizes(q, k, v),
        HEADS=heads,
        CAUSAL=causal,
        SHORT=short,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_S=_FEW_SEGMENTS if short or segments < _FEW_SEGMENTS else _MANY_SEGMENTS,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out


def _tile(width: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Queries, keys, warps and pipeline stages of one program. They beat FlashAttention 2 inside PyTorch at every
    measured shape (benchmarks/results/kernels/attention.json)."""
    if dtype == torch.float32:
        return 32, 32, 4, 1
    if width > 192:
        return 64, 32, 8, 2
    return 64, 64, 4, 3 if width <= 96 else 2
