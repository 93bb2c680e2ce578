"""Causal attention of prefill chunks over a paged cache, split along the keys where chunks are short.

Reference: models.layers.attention.paged_prefill_attention.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.gpu import current_gpu
from models.layers.kernels.heads import LOG2_E, head_sizes, values_in_keys
from models.layers.kernels.launch import launch, row_strides
from models.layers.kernels.varlen import bounds_of, segment_of_tile

_FEW_SEQUENCES, _MANY_SEQUENCES = 32, 256
"""Ends that are read at a time."""
_MAX_SPLITS = 16
LEAST_KEYS = 1024
"""No share of a split is shorter: up to here a tile's keys are read by one program."""
_MOST_PARTIALS = 32 << 20
"""Bytes of all partials."""


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


@triton.jit
def _store_rows(
    ptr, places, values1, values2, stored, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr
):  # fmt: skip
    """Rows of DV values at these places, converted to what ptr points to."""
    kind = ptr.dtype.element_ty
    rows = ptr + (places * DV)[:, None]
    columns = tl.arange(0, V1)[None, :]
    tl.store(rows + columns, values1.to(kind), mask=stored[:, None] & (columns < DV))
    if V2 > 0:
        rest = V1 + tl.arange(0, V2)[None, :]
        tl.store(rows + rest, values2.to(kind), mask=stored[:, None] & (rest < DV))


@triton.jit(do_not_specialize=["num_rows", "num_sequences", "stride_table", "splits"])
def _paged_prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_ptr,
    log_sum_ptr,
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
    splits,
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
    SPLIT: tl.constexpr,
    LEAST: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: BLOCK_Q queries of one chunk, with all GROUP query heads of one key head, and with SPLIT one of
    `splits` shares of the keys that they see. Row r of its BLOCK_M is head r % GROUP of query r // GROUP, so that short
    chunks fill the tile.

    Chunks own tiles as segment_of_tile says. The rows behind the last chunk are written as zero.

    A share is of whole blocks, LEAST at the least. One of all keys becomes the output, and its log sum is +inf; another
    becomes a normalised partial and the base-2 logarithm of its softmax sum, -inf where it holds no key of the row.
    """
    # Key heads and shares first: the tiles without rows come last and leave no gaps among those with work.
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    split = 0
    if SPLIT:
        split = kv_head // (HEADS // GROUP)
        kv_head %= HEADS // GROUP
    sequence = segment_of_tile(tile, cu_q_ptr, num_sequences, BLOCK_Q, BLOCK_S)
    q_begin, q_end = bounds_of(sequence, cu_q_ptr, num_rows, num_sequences)
    inside = sequence < num_sequences
    first_query = (tile - q_begin // BLOCK_Q - sequence) * BLOCK_Q
    length_q = q_end - q_begin
    if first_query >= length_q:
        return
    row = tl.arange(0, BLOCK_M)
    queries = first_query + row // GROUP
    heads = kv_head * GROUP + row % GROUP
    kept = (row < BLOCK_Q * GROUP) & (queries < length_q)
    packed = (q_begin + queries).to(tl.int64)
    places = packed * HEADS + heads
    length = tl.load(lengths_ptr + sequence, mask=inside, other=0)
    cached = length - length_q
    # Keys that some query of the tile sees; none behind the last chunk.
    stop = tl.minimum(cached + first_query + BLOCK_Q, length)
    begin, end, alone = 0, stop, True
    if SPLIT:
        share = tl.maximum(tl.cdiv(tl.cdiv(stop, BLOCK_N), splits), LEAST) * BLOCK_N
        begin = split * share
        end = tl.minimum(begin + share, stop)
        alone = share >= stop
        if (split > 0) & (begin >= stop):
            none = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            tl.store(log_sum_ptr + places * splits + split, none, mask=kept & (alone == 0))
            return
    acc1 = tl.zeros((BLOCK_M, V1), tl.float32)
    # The unused second accumulator of head dims without a rest costs nothing: it is never read.
    acc2 = tl.zeros((BLOCK_M, V2 if V2 > 0 else 16), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if inside:
        q_rows = q_ptr + (packed * stride_q + heads * Q_HEAD)[:, None]
        columns = tl.arange(0, D1)[None, :]
        q1 = tl.load(q_rows + columns, mask=kept[:, None] & (columns < D), other=0.0)
        q2 = q1
        if D2 > 0:
            rest = D1 + tl.arange(0, D2)[None, :]
            q2 = tl.load(q_rows + rest, mask=kept[:, None] & (rest < D), other=0.0)
        k_base, v_base = k_ptr + kv_head * K_HEAD, v_ptr + kv_head * V_HEAD
        table = table_ptr + sequence.to(tl.int64) * stride_table
        limits = tl.minimum(cached + queries + 1, length)
        # Blocks that the tile's first query sees whole, and then those that some query sees.
        full = tl.minimum(cached + first_query + 1, length) // BLOCK_N * BLOCK_N
        if SPLIT:
            full = tl.minimum(tl.maximum(full, begin), end)
        for first in range(begin, full, BLOCK_N):
            acc1, acc2, peak, total = _attend_block(
                acc1, acc2, peak, total, q1, q2, k_base, v_base, table, first, length, limits, stride_k, stride_v,
                scale_log2, D, DV, D1, D2, V1, V2, PAGE, BLOCK_N, False, VALUES_IN_KEYS, PRECISION,
            )  # fmt: skip
        for first in range(full, end, BLOCK_N):
            acc1, acc2, peak, total = _attend_block(
                acc1, acc2, peak, total, q1, q2, k_base, v_base, table, first, length, limits, stride_k, stride_v,
                scale_log2, D, DV, D1, D2, V1, V2, PAGE, BLOCK_N, True, VALUES_IN_KEYS, PRECISION,
            )  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)
    norm = (1.0 / total)[:, None]
    values1, values2 = acc1 * norm, acc2 * norm
    if SPLIT:
        parts = places * splits + split
        _store_rows(partial_ptr, parts, values1, values2, kept & (alone == 0), DV, V1, V2)
        log_sums = tl.where(alone, float("inf"), peak + tl.log2(total))
        tl.store(log_sum_ptr + parts, log_sums, mask=kept)
        kept = kept & alone
    _store_rows(out_ptr, places, values1, values2, kept, DV, V1, V2)


@triton.jit(do_not_specialize=["splits"])
def _prefill_combine_kernel(
    partial_ptr,
    log_sum_ptr,
    out_ptr,
    splits,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MOST: tl.constexpr,
):
    """One program: the splits of one row and head, MOST at the most. What is not split is there already."""
    place = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    # Alone: a tile that was not split leaves the log sums of the others as they are.
    if tl.load(log_sum_ptr + place * splits) == float("inf"):
        return
    parts = place * splits + tl.arange(0, MOST)
    log_sums = tl.load(log_sum_ptr + parts, mask=tl.arange(0, MOST) < splits, other=float("-inf"))
    peak = tl.max(log_sums, 0)
    # A row that sees no key: inf - inf is NaN.
    weights = tl.exp2(log_sums - tl.where(peak == float("-inf"), 0.0, peak))
    columns = tl.arange(0, BLOCK_V)
    here = (log_sums > float("-inf"))[:, None] & (columns < DV)[None, :]
    values = tl.load(partial_ptr + parts[:, None] * DV + columns[None, :], mask=here, other=0.0)
    total = tl.sum(weights, 0)
    out = tl.sum(values * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + place * DV + columns, out.to(out_ptr.dtype.element_ty), mask=columns < DV)


def paged_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    page_size: int,
    scale: float | None = None,
    *,
    tile: tuple[int, int, int, int] | None = None,
    splits: int | None = None,
    least_keys: int = LEAST_KEYS,
) -> Tensor:
    """models.layers.attention.paged_prefill_attention for any head dims. v_cache may be the first columns of k_cache
    (MLA).

    tile: rows (queries times heads of a group), keys, warps and pipeline stages of one program. splits: of the keys
    that a tile sees, in shares of at least `least_keys`; None: chosen.
    """
    num_rows, heads, width = q.shape
    kv_heads, value_width = k_cache.shape[1], v_cache.shape[-1]
    if any(x.stride(-1) != 1 for x in (q, k_cache, v_cache, block_tables)):
        raise ValueError("paged prefill attention: q, caches and block_tables must be contiguous in the last dim")
    group = heads // kv_heads
    block_m, block_n, num_warps, num_stages = tile or _tile(width, q.dtype)
    block_m = max(block_m, triton.next_power_of_2(group))
    block_q = block_m // group
    least = max(1, least_keys // block_n)
    if splits is None:
        programs, longest = kv_heads * triton.cdiv(max(1, num_rows), block_q), block_tables.shape[1] * page_size
        splits = number_of_splits(programs, longest, least * block_n, 4 * num_rows * heads * value_width)
    if not 1 <= splits <= _MAX_SPLITS:
        raise ValueError(f"paged prefill attention: {splits} splits, but 1 to {_MAX_SPLITS} are possible")
    out = torch.empty((num_rows, heads, value_width), device=q.device, dtype=q.dtype)
    sequences = seq_lens.shape[0]
    if num_rows == 0:
        return out
    partial = torch.empty((num_rows, heads, splits, value_width) if splits > 1 else (0,), device=q.device)
    log_sum = torch.empty((num_rows, heads, splits) if splits > 1 else (0,), device=q.device)
    launch(
        _paged_prefill_kernel,
        (kv_heads * splits, num_rows // block_q + sequences + 1),
        q,
        k_cache,
        v_cache,
        out,
        partial,
        log_sum,
        block_tables,
        cu_seqlens_q,
        seq_lens,
        num_rows,
        sequences,
        (scale or width**-0.5) * LOG2_E,
        *row_strides(q, k_cache, v_cache, block_tables),
        splits,
        **head_sizes(q, k_cache, v_cache),
        HEADS=heads,
        PAGE=page_size,
        BLOCK_M=block_m,
        BLOCK_Q=block_q,
        BLOCK_N=block_n,
        BLOCK_S=_FEW_SEQUENCES if sequences < _FEW_SEQUENCES else _MANY_SEQUENCES,
        SPLIT=splits > 1,
        LEAST=least,
        VALUES_IN_KEYS=values_in_keys(k_cache, v_cache),
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if splits > 1:
        block_v = triton.next_power_of_2(value_width)
        launch(
            _prefill_combine_kernel,
            (num_rows, heads),
            partial,
            log_sum,
            out,
            splits,
            HEADS=heads,
            DV=value_width,
            BLOCK_V=block_v,
            MOST=_MAX_SPLITS,
            num_warps=max(1, block_v // 128),
        )
    return out


def number_of_splits(programs: int, longest: int, least: int, bytes_of_one: int) -> int:
    """Splits of every tile's keys, chosen from what is known when a graph is captured.

    Two thread blocks for each SM. programs: of all tiles, without splits; longest: keys that the block table has room
    for; least: keys of a share; bytes_of_one: of the partials of one split.
    """
    if longest <= max(least, LEAST_KEYS):
        return 1
    most = min(_MAX_SPLITS, triton.cdiv(longest, least), _MOST_PARTIALS // max(1, bytes_of_one))
    return max(1, min(most, 2 * current_gpu().num_sms // programs))


def _tile(width: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Rows, keys, warps, stages: the largest that neither spills nor outgrows a block's shared memory by much."""
    if width > 256:
        if dtype == torch.float32:
            return 16, 16, 8, 1
        # Accumulators as wide as latents need tensor cores that read both operands from shared memory.
        return (32, 16, 8, 1) if current_gpu().copies_one_stage_fewer else (64, 32, 8, 2)
    if dtype == torch.float32:
        return 32, 32, 8, 1
    if width > 192:
        return 64, 32, 8, 2
    return 64, 64, 4, 3 if width <= 96 else 2
