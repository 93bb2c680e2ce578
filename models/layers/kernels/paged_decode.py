"""Paged decode attention, split along the keys, with norm, rotation and the cache's new row inside where there are any.

References: `paged_decode_attention.reference` and `rotary_paged_decode_attention.reference` of models.layers.attention.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.gpu import current_gpu
from models.layers.kernels.heads import LOG2_E, head_sizes, values_in_keys
from models.layers.kernels.launch import launch, release_next, row_strides, wait_for_previous
from models.layers.kernels.norms import weighted
from models.layers.norms import QKNorm

_MAX_SPLITS = 64
_BLOCK_N = 32
"""Keys that a program reads at a time."""
_HEAVIEST = 112 << 10
"""Bytes of shared memory for blocks of the widest heads in float32."""
_SPLITS_TOGETHER = 16
"""Splits that are combined at a time: sequences are mostly short, and their splits few."""


class CurrentKV(NamedTuple):
    """What is not in the cache yet: k and v [rows, Hkv, D] of each row's last position, cosines and sines float32
    [rows, R / 2], R <= D, that turn it and the queries (None: as they are), its KV slots, int64 [rows], and the QK norm
    before the rotation."""

    k: Tensor
    v: Tensor
    rotary: tuple[Tensor, Tensor] | None
    slot_mapping: Tensor
    qk_norm: QKNorm | None = None


@triton.jit
def _angles(cos_row, sin_row, columns, here, D: tl.constexpr, R: tl.constexpr):
    """Cosines, and sines with the sign that a column's partner takes, of the shape of `here`. Columns from R on do not
    turn."""
    first = columns < R // 2
    angle = tl.broadcast_to(tl.where(first, columns, columns - R // 2), here.shape)
    if R < D:
        here = here & (columns < R)
    cos = tl.load(cos_row + angle, mask=here, other=0.0 if R == D else 1.0)
    sin = tl.load(sin_row + angle, mask=here, other=0.0)
    return cos, tl.where(first, -sin, sin)


@triton.jit
def _reciprocal_rms(heads, columns, here1, rest, here2, eps, D: tl.constexpr, D2: tl.constexpr, NORM: tl.constexpr):
    """Of whole heads, which lie in one or two ranges of columns: float32, a column. 1 without NORM."""
    reciprocal = 1.0
    if NORM:
        x = tl.load(heads + tl.broadcast_to(columns, here1.shape), mask=here1, other=0.0).to(tl.float32)
        squares = tl.sum(x * x, 1)
        if D2 > 0:
            x = tl.load(heads + tl.broadcast_to(rest, here2.shape), mask=here2, other=0.0).to(tl.float32)
            squares += tl.sum(x * x, 1)
        reciprocal = tl.rsqrt(squares / D + eps)[:, None]
    return reciprocal


@triton.jit
def _normed(heads, columns, here, rstd, weight_ptr, NORM: tl.constexpr):
    x = tl.load(heads + columns, mask=here, other=0.0)
    if NORM:
        x = weighted(x.to(tl.float32), rstd, tl.load(weight_ptr + columns, mask=here, other=0.0), x.dtype)
    return x


@triton.jit
def _rotated(heads, columns, here, cos, sin, rstd, weight_ptr, D: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr):
    """These columns of heads, normed and half-split rotated: the partner of one of the first R values is R / 2 columns
    away."""
    columns = tl.broadcast_to(columns, here.shape)
    x = _normed(heads, columns, here, rstd, weight_ptr, NORM)
    if R > 0:
        partners = tl.where(columns < R // 2, columns + R // 2, columns - R // 2)
        if R < D:
            partners = tl.where(columns < R, partners, columns)
        partner = _normed(heads, partners, here, rstd, weight_ptr, NORM)
        x = (x.to(tl.float32) * cos + partner.to(tl.float32) * sin).to(x.dtype)
    return x


@triton.jit
def _split_length(length, splits, BLOCK_N: tl.constexpr, LEAST: tl.constexpr):
    """Keys of one split: the sequence in equal shares of whole blocks, LEAST at the least."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, BLOCK_N), splits), LEAST) * BLOCK_N


@triton.jit(do_not_specialize=["stride_table", "splits"])
def _decode_kernel(
    q_ptr,
    new_k_ptr,
    new_v_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lengths_ptr,
    out_ptr,
    partial_ptr,
    log_sum_ptr,
    scale_log2,
    stride_q,
    stride_new_k,
    stride_new_v,
    stride_k,
    stride_v,
    stride_table,
    splits,
    # Before the others, ptxas (of Triton 3.6) made other code of the loop: 6 % of a step of 128 rows on an H200.
    q_norm_ptr,
    k_norm_ptr,
    eps,
    Q_HEAD: tl.constexpr,
    NEW_K_HEAD: tl.constexpr,
    NEW_V_HEAD: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_HEAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    V1: tl.constexpr,
    V2: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    LEAST: tl.constexpr,
    NEWEST: tl.constexpr,
    R: tl.constexpr,
    NORM: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: the query heads of one key head, one row, one of `splits` shares of its keys, of LEAST blocks at the
    least. A share of all keys becomes the output, another a normalised partial and the base-2 logarithm of its softmax
    sum. Without SPLIT there is one share.

    NEWEST: key and value of the last position are not in the cache. The program whose share ends there stores them and
    begins its softmax with them. NORM: queries and that key have to be normed; R: how many of their values rotate.
    """
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait_for_previous(PDL)
    release_next(PDL)
    length = tl.load(lengths_ptr + row)
    share = _split_length(length, splits, BLOCK_N, LEAST)
    begin = split * share
    end = tl.minimum(begin + share, length)
    if SPLIT:  # noqa: SIM102 (a constant first: Triton drops the branch)
        if begin >= end:
            return
    group = tl.arange(0, BLOCK_G)
    heads = kv_head * GROUP + group
    real = group[:, None] < GROUP
    columns = tl.arange(0, D1)[None, :]
    rest = D1 + tl.arange(0, D2 if D2 > 0 else 16)[None, :]
    here1 = real & (columns < D)
    here2 = real & (rest < D)
    cos1, sin1, cos2, sin2 = 1.0, 0.0, 1.0, 0.0
    if R > 0:
        cos_row = cos_ptr + row.to(tl.int64) * (R // 2)
        sin_row = sin_ptr + row.to(tl.int64) * (R // 2)
        cos1, sin1 = _angles(cos_row, sin_row, columns, here1, D, R)
        if D2 > 0:
            cos2, sin2 = _angles(cos_row, sin_row, rest, here2, D, R)
    q_rows = q_ptr + row.to(tl.int64) * stride_q + heads[:, None] * Q_HEAD
    rstd = _reciprocal_rms(q_rows, columns, here1, rest, here2, eps, D, D2, NORM)
    q1 = _rotated(q_rows, columns, here1, cos1, sin1, rstd, q_norm_ptr, D, R, NORM)
    q2 = q1
    if D2 > 0:
        q2 = _rotated(q_rows, rest, here2, cos2, sin2, rstd, q_norm_ptr, D, R, NORM)
    v_columns = tl.arange(0, V1)[None, :]
    v_rest = V1 + tl.arange(0, V2 if V2 > 0 else 16)[None, :]
    acc1 = tl.zeros((BLOCK_G, V1), tl.float32)
    acc2 = tl.zeros((BLOCK_G, V2 if V2 > 0 else 16), tl.float32)
    peak = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    cached = end
    if NEWEST:
        # Without branches: all loads are in flight together, and the accumulators keep the layout of the product.
        current_kv = (begin < end) & (end == length)
        cached = tl.minimum(end, length - 1)
        new_k = new_k_ptr + row.to(tl.int64) * stride_new_k + kv_head * NEW_K_HEAD
        new_v = new_v_ptr + row.to(tl.int64) * stride_new_v + kv_head * NEW_V_HEAD
        slot = tl.load(slots_ptr + row).to(tl.int64)
        k_slot = k_ptr + slot * stride_k + kv_head * K_HEAD + 0 * group[:, None]
        v_slot = v_ptr + slot * stride_v + kv_head * V_HEAD
        stored = current_kv & (group[:, None] == 0)
        k_rstd = _reciprocal_rms(new_k, columns, here1, rest, here2, eps, D, D2, NORM)
        key1 = _rotated(new_k, columns, here1, cos1, sin1, k_rstd, k_norm_ptr, D, R, NORM)
        value1 = tl.load(new_v + v_columns, mask=current_kv & (v_columns < DV), other=0.0)
        score = tl.sum(q1.to(tl.float32) * key1.to(tl.float32), 1)
        acc1 += value1.to(tl.float32)
        tl.store(k_slot + columns, key1, mask=stored & here1)
        tl.store(v_slot + v_columns, value1, mask=current_kv & (v_columns < DV))
        if D2 > 0:
            key2 = _rotated(new_k, rest, here2, cos2, sin2, k_rstd, k_norm_ptr, D, R, NORM)
            score += tl.sum(q2.to(tl.float32) * key2.to(tl.float32), 1)
            tl.store(k_slot + rest, key2, mask=stored & here2)
        if V2 > 0:
            value2 = tl.load(new_v + v_rest, mask=current_kv & (v_rest < DV), other=0.0)
            acc2 += value2.to(tl.float32)
            tl.store(v_slot + v_rest, value2, mask=current_kv & (v_rest < DV))
        peak = tl.where(current_kv, score * scale_log2, float("-inf"))
        total += tl.where(current_kv, 1.0, 0.0)
    table = table_ptr + row.to(tl.int64) * stride_table
    for first in range(begin, cached, BLOCK_N):
        positions = first + tl.arange(0, BLOCK_N)
        present = positions < cached
        pages = tl.load(table + positions // PAGE, mask=present, other=0)
        slot_mapping = (pages.to(tl.int64) * PAGE + positions % PAGE)[:, None]
        k_rows = k_ptr + slot_mapping * stride_k + kv_head * K_HEAD
        k1 = tl.load(k_rows + columns, mask=present[:, None] & (columns < D), other=0.0)
        scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        if D2 > 0:
            k2 = tl.load(k_rows + rest, mask=present[:, None] & (rest < D), other=0.0)
            scores = tl.dot(q2, tl.trans(k2), acc=scores, input_precision=PRECISION)
        scores = tl.where(present[None, :], scores * scale_log2, float("-inf"))
        # Every block holds at least one key, so the peak is finite.
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 1)
        peak = new_peak
        weights = weights.to(k1.dtype)
        if VALUES_IN_KEYS:
            v1 = k1
        else:
            v_rows = v_ptr + slot_mapping * stride_v + kv_head * V_HEAD
            v1 = tl.load(v_rows + v_columns, mask=present[:, None] & (v_columns < DV), other=0.0)
        acc1 = tl.dot(weights, v1, acc=acc1 * decay[:, None], input_precision=PRECISION)
        if V2 > 0:
            v2 = tl.load(v_rows + v_rest, mask=present[:, None] & (v_rest < DV), other=0.0)
            acc2 = tl.dot(weights, v2, acc=acc2 * decay[:, None], input_precision=PRECISION)
    norm = (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    alone = share >= length
    out_rows = out_ptr + (row.to(tl.int64) * (KV_HEADS * GROUP) + heads[:, None]) * DV
    kind = out_ptr.dtype.element_ty
    tl.store(out_rows + v_columns, (acc1 * norm).to(kind), mask=alone & real & (v_columns < DV))
    if V2 > 0:
        tl.store(out_rows + v_rest, (acc2 * norm).to(kind), mask=alone & real & (v_rest < DV))
    if SPLIT:
        place = (row.to(tl.int64) * (KV_HEADS * GROUP) + heads) * splits + split
        parts = partial_ptr + place[:, None] * DV
        shared = real & (alone == 0)
        tl.store(parts + v_columns, acc1 * norm, mask=shared & (v_columns < DV))
        if V2 > 0:
            tl.store(parts + v_rest, acc2 * norm, mask=shared & (v_rest < DV))
        tl.store(log_sum_ptr + place, peak + tl.log2(total), mask=(group < GROUP) & (alone == 0))


@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(
    partial_ptr,
    log_sum_ptr,
    lengths_ptr,
    out_ptr,
    splits,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr,
    TOGETHER: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: the splits of one row and head, TOGETHER at a time; a row of length 0 becomes zero. What is not
    split is there already."""
    row, head = tl.program_id(0), tl.program_id(1)
    wait_for_previous(PDL)
    release_next(PDL)
    length = tl.load(lengths_ptr + row)
    used = tl.cdiv(length, _split_length(length, splits, BLOCK_N, LEAST))
    if used == 1:
        return
    slot = (row.to(tl.int64) * HEADS + head) * splits
    columns = tl.arange(0, BLOCK_V)
    peak = float("-inf")
    total = 0.0
    out = tl.zeros((BLOCK_V,), tl.float32)
    for first in range(0, used, TOGETHER):
        split = first + tl.arange(0, TOGETHER)
        log_sums = tl.load(log_sum_ptr + slot + split, mask=split < used, other=float("-inf"))
        here = (split[:, None] < used) & (columns[None, :] < DV)
        values = tl.load(partial_ptr + (slot + split)[:, None] * DV + columns[None, :], mask=here, other=0.0)
        new_peak = tl.maximum(peak, tl.max(log_sums, 0))
        weights = tl.exp2(log_sums - new_peak)
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 0)
        out = out * decay + tl.sum(values * weights[:, None], 0)
        peak = new_peak
    out /= tl.where(total == 0.0, 1.0, total)
    out_row = out_ptr + (row.to(tl.int64) * HEADS + head) * DV
    tl.store(out_row + columns, out.to(out_ptr.dtype.element_ty), mask=columns < DV)


def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    page_size: int,
    scale: float | None = None,
    *,
    current_kv: CurrentKV | None = None,
    splits: int | None = None,
) -> Tensor:
    """models.layers.attention.paged_decode_attention, of the keys in the cache and, with `current_kv`, of the current
    step's. v_cache may be the first columns of k_cache (MLA)."""
    rows, heads, width = q.shape
    kv_heads, value_width = k_cache.shape[1], v_cache.shape[-1]
    new = current_kv or CurrentKV(q, q, None, seq_lens)
    cos, sin = new.rotary or (q, q)
    q_norm, k_norm, eps = new.qk_norm or (q, q, 0.0)
    if any(x.stride(-1) != 1 for x in (q, k_cache, v_cache, block_tables, new.k, new.v)):
        raise ValueError("paged decode attention: q, k, v, caches and block_tables must be contiguous in the last dim")
    if new.rotary and not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError("paged decode attention: cosines and sines must be contiguous")
    out = torch.empty((rows, heads, value_width), device=q.device, dtype=q.dtype)
    if rows == 0:
        return out
    wide_heads, full_precision = width > 256, q.dtype == torch.float32
    if splits is None:
        splits = number_of_splits(rows * kv_heads, block_tables.shape[1] * page_size)
    # Wide heads and float32 fill registers and shared memory sooner; a block of a wide head takes as long as two.
    heavy = wide_heads + full_precision
    num_warps, num_stages = (8, 3 - heavy) if heavy else (4, 5 if width <= 128 else 3)
    least = 1 if wide_heads else 2
    # A block of wide float32 keys and the queries take 108 KiB: half of it fits GPUs of 99.
    block_n = _BLOCK_N // 2 if heavy == 2 and current_gpu().shared_memory < _HEAVIEST else _BLOCK_N
    partial = torch.empty((rows, heads, splits, value_width) if splits > 1 else (0,), device=q.device)
    log_sum = torch.empty((rows, heads, splits) if splits > 1 else (0,), device=q.device)
    launch(
        _decode_kernel,
        (rows, kv_heads, splits),
        q,
        new.k,
        new.v,
        cos,
        sin,
        new.slot_mapping,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        out,
        partial,
        log_sum,
        (scale or width**-0.5) * LOG2_E,
        *row_strides(q, new.k, new.v, k_cache, v_cache, block_tables),
        splits,
        q_norm,
        k_norm,
        eps,
        **head_sizes(q, k_cache, v_cache),
        NEW_K_HEAD=new.k.stride(1),
        NEW_V_HEAD=new.v.stride(1),
        KV_HEADS=kv_heads,
        BLOCK_G=max(16, triton.next_power_of_2(heads // kv_heads)),
        PAGE=page_size,
        BLOCK_N=block_n,
        SPLIT=splits > 1,
        LEAST=least,
        NEWEST=current_kv is not None,
        R=2 * cos.shape[1] if new.rotary else 0,
        NORM=new.qk_norm is not None,
        VALUES_IN_KEYS=values_in_keys(k_cache, v_cache),
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if splits > 1:
        launch(
            _combine_kernel,
            (rows, heads),
            partial,
            log_sum,
            seq_lens,
            out,
            splits,
            HEADS=heads,
            DV=value_width,
            BLOCK_V=triton.next_power_of_2(value_width),
            BLOCK_N=block_n,
            LEAST=least,
            TOGETHER=_SPLITS_TOGETHER,
            num_warps=max(1, triton.next_power_of_2(value_width) // 128),
        )
    return out


def number_of_splits(sequences: int, longest: int) -> int:
    """Splits of every sequence's keys, `sequences` counting each key head.

    Two thread blocks for each SM, so that loads of one hide behind arithmetic of the other, and no split of less than
    two blocks of the longest sequence that the table has room for. How long the sequences are is not known when a step
    is captured: splits beyond a sequence's last block end at once.
    """
    return max(1, min(_MAX_SPLITS, 2 * current_gpu().num_sms // sequences, longest // (2 * _BLOCK_N)))
