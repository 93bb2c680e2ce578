"""Causal attention of prefill chunks over a paged cache; reference: models.layers.attention.attend_prefill_pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.gpu import current_gpu
from models.layers.kernels.launch import dot_precision, launch, split_width

_LOG2_E = 1.4426950408889634
_FEW_SEQUENCES, _MANY_SEQUENCES = 32, 256
"""Ends that are read at a time."""


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
    table,
    first,
    length,
    limits,
    stride_k,
    stride_v,
    scale_log2,
    D: tl.constexpr,
    DV: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    V1: tl.constexpr,
    V2: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block of keys: online softmax in base 2. MASKED: rows may see a part of it only, or it ends the sequence."""
    keys = first + tl.arange(0, BLOCK_N)
    # Without MASKED every key is present, and the compiler drops the comparison.
    present = (keys < length) if MASKED else (keys >= 0)
    pages = tl.load(table + keys // PAGE, mask=present, other=0)
    slots = (pages.to(tl.int64) * PAGE + keys % PAGE)[:, None]
    columns = tl.arange(0, D1)[None, :]
    k_rows = k_base + slots * stride_k
    k1 = tl.load(k_rows + columns, mask=present[:, None] & (columns < D), other=0.0)
    scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
    if D2 > 0:
        rest = D1 + tl.arange(0, D2)[None, :]
        k2 = tl.load(k_rows + rest, mask=present[:, None] & (rest < D), other=0.0)
        scores = tl.dot(q2, tl.trans(k2), acc=scores, input_precision=PRECISION)
    if MASKED:
        scores = tl.where(keys[None, :] < limits[:, None], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
    # A row that sees no key yet keeps -inf, and inf - inf is NaN.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    weights = tl.exp2(scores * scale_log2 - base[:, None])
    decay = tl.exp2(peak - base)
    total = total * decay + tl.sum(weights, 1)
    weights = weights.to(k1.dtype)
    v_rows = v_base + slots * stride_v
    if VALUES_IN_KEYS:
        v1 = k1
    else:
        v_columns = tl.arange(0, V1)[None, :]
        v1 = tl.load(v_rows + v_columns, mask=present[:, None] & (v_columns < DV), other=0.0)
    acc1 = tl.dot(weights, v1, acc=acc1 * decay[:, None], input_precision=PRECISION)
    if V2 > 0:
        v_rest = V1 + tl.arange(0, V2)[None, :]
        v2 = tl.load(v_rows + v_rest, mask=present[:, None] & (v_rest < DV), other=0.0)
        acc2 = tl.dot(weights, v2, acc=acc2 * decay[:, None], input_precision=PRECISION)
    return acc1, acc2, new_peak, total


@triton.jit(do_not_specialize=["num_rows", "num_sequences", "stride_table"])
def _paged_prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    cu_q_ptr,
    lengths_ptr,
    num_rows,
    num_sequences,
    scale_log2,
    stride_q,
    stride_k,
    stride_v,
    stride_table,
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
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: BLOCK_Q queries of one chunk, with all GROUP query heads of one key head: row r of its BLOCK_M is
    head r % GROUP of query r // GROUP, so that short chunks fill the tile.

    Chunk i owns the tiles from cu_q[i] // BLOCK_Q + i on, which are always enough for its queries, so that the grid
    follows from num_rows and num_sequences alone. The rows behind the last chunk count as one more, written as zero.
    """
    # Key heads first: the tiles without rows come last and leave no gaps among those with work.
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    started = 0
    for base in range(0, num_sequences + 1, BLOCK_S):
        index = base + tl.arange(0, BLOCK_S)
        begin = tl.load(cu_q_ptr + index, mask=index <= num_sequences, other=0)
        started += tl.sum(((begin // BLOCK_Q + index <= tile) & (index <= num_sequences)).to(tl.int32))
    sequence = started - 1
    q_begin = tl.load(cu_q_ptr + sequence)
    inside = sequence < num_sequences
    q_end = tl.load(cu_q_ptr + sequence + 1, mask=inside, other=0)
    q_end = tl.where(inside, q_end, num_rows)
    first_query = (tile - q_begin // BLOCK_Q - sequence) * BLOCK_Q
    length_q = q_end - q_begin
    if first_query >= length_q:
        return
    row = tl.arange(0, BLOCK_M)
    queries = first_query + row // GROUP
    heads = kv_head * GROUP + row % GROUP
    kept = (row < BLOCK_Q * GROUP) & (queries < length_q)
    packed = (q_begin + queries).to(tl.int64)
    acc1 = tl.zeros((BLOCK_M, V1), tl.float32)
    # The unused second accumulator of head dims without a rest costs nothing: it is never read.
    acc2 = tl.zeros((BLOCK_M, V2 if V2 > 0 else 16), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if inside:
        length = tl.load(lengths_ptr + sequence)
        q_rows = q_ptr + (packed * stride_q + heads * Q_HEAD)[:, None]
        columns = tl.arange(0, D1)[None, :]
        q1 = tl.load(q_rows + columns, mask=kept[:, None] & (columns < D), other=0.0)
        q2 = q1
        if D2 > 0:
            rest = D1 + tl.arange(0, D2)[None, :]
            q2 = tl.load(q_rows + rest, mask=kept[:, None] & (rest < D), other=0.0)
        k_base, v_base = k_ptr + kv_head * K_HEAD, v_ptr + kv_head * V_HEAD
        table = table_ptr + sequence.to(tl.int64) * stride_table
        cached = length - length_q
        limits = tl.minimum(cached + queries + 1, length)
        # Blocks that the tile's first query sees whole, and then those that some query sees.
        full = tl.minimum(cached + first_query + 1, length) // BLOCK_N * BLOCK_N
        stop = tl.minimum(cached + first_query + BLOCK_Q, length)
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        for first in range(0, full, BLOCK_N):
            acc1, acc2, peak, total = _attend_block(
                acc1, acc2, peak, total, q1, q2, k_base, v_base, table, first, length, limits, stride_k, stride_v,
                scale_log2, D, DV, D1, D2, V1, V2, PAGE, BLOCK_N, False, VALUES_IN_KEYS, PRECISION,
            )  # fmt: skip
        for first in range(full, stop, BLOCK_N):
            acc1, acc2, peak, total = _attend_block(
                acc1, acc2, peak, total, q1, q2, k_base, v_base, table, first, length, limits, stride_k, stride_v,
                scale_log2, D, DV, D1, D2, V1, V2, PAGE, BLOCK_N, True, VALUES_IN_KEYS, PRECISION,
            )  # fmt: skip
    norm = (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    out_rows = out_ptr + ((packed * HEADS + heads) * DV)[:, None]
    v_columns = tl.arange(0, V1)[None, :]
    tl.store(out_rows + v_columns, (acc1 * norm).to(out_ptr.dtype.element_ty), mask=kept[:, None] & (v_columns < DV))
    if V2 > 0:
        v_rest = V1 + tl.arange(0, V2)[None, :]
        tl.store(out_rows + v_rest, (acc2 * norm).to(out_ptr.dtype.element_ty), mask=kept[:, None] & (v_rest < DV))


def attend_prefill_pages(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    page_size: int,
    scale: float,
    *,
    tile: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """models.layers.attention.attend_prefill_pages for any head dims. v_cache may be the first columns of k_cache
    (MLA).

    tile: rows (queries times heads of a group), keys, warps and pipeline stages of one program.
    """
    num_rows, heads, width = q.shape
    kv_heads, value_width = k_cache.shape[1], v_cache.shape[-1]
    if any(x.stride(-1) != 1 for x in (q, k_cache, v_cache, block_tables)):
        raise ValueError("paged prefill attention: q, caches and block_tables must be contiguous in the last dim")
    group = heads // kv_heads
    block_m, block_n, num_warps, num_stages = tile or _tile(width, q.dtype)
    block_m = max(block_m, triton.next_power_of_2(group))
    block_q = block_m // group
    (d1, d2), (v1, v2) = split_width(width), split_width(value_width)
    values_in_keys = (
        v_cache.data_ptr() == k_cache.data_ptr() and v_cache.stride() == k_cache.stride() and value_width == v1 == d1
    )
    out = torch.empty((num_rows, heads, value_width), device=q.device, dtype=q.dtype)
    sequences = seq_lens.shape[0]
    if num_rows == 0:
        return out
    launch(
        _paged_prefill_kernel,
        (kv_heads, num_rows // block_q + sequences + 1),
        q,
        k_cache,
        v_cache,
        out,
        block_tables,
        cu_seqlens_q,
        seq_lens,
        num_rows,
        sequences,
        scale * _LOG2_E,
        q.stride(0),
        k_cache.stride(0),
        v_cache.stride(0),
        block_tables.stride(0),
        Q_HEAD=q.stride(1),
        K_HEAD=k_cache.stride(1),
        V_HEAD=v_cache.stride(1),
        HEADS=heads,
        GROUP=group,
        D=width,
        DV=value_width,
        D1=d1,
        D2=d2,
        V1=v1,
        V2=v2,
        PAGE=page_size,
        BLOCK_M=block_m,
        BLOCK_Q=block_q,
        BLOCK_N=block_n,
        BLOCK_S=_FEW_SEQUENCES if sequences < _FEW_SEQUENCES else _MANY_SEQUENCES,
        VALUES_IN_KEYS=values_in_keys,
        PRECISION=dot_precision(q),
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out


def _tile(width: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Rows, keys, warps, stages: the largest that neither spills nor outgrows a block's shared memory by much."""
    if width > 256:
        if dtype == torch.float32:
            return 16, 16, 8, 1
        # Accumulators as wide as latents need tensor cores that read both operands from shared memory.
        return (32, 16, 8, 1) if current_gpu().copies_one_stage_fewer else (64, 32, 8, 2)
    if dtype == torch.float32:
        return 32, 32, 8, 1
    return 64, 64, 4, 3 if width <= 96 else 2
