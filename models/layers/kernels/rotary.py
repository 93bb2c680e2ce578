"""Rotary embedding fused with what follows it. References: models.layers.rotary.rotate_and_cache,
models.layers.attention.rotary_paged_decode_attention, models.layers.fused.rotary_dense_attention."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.gpu import current_gpu
from models.layers.kernels.heads import LOG2_E
from models.layers.kernels.launch import dot_precision, launch, release_next, row_strides, wait_for_previous
from models.layers.kernels.norms import weighted
from models.layers.kernels.paged_decode import CurrentKV, paged_decode_attention
from models.layers.norms import QKNorm


@triton.jit
def _normed_halves(first, second, weight_ptr, near, far, wide, eps, HALF: tl.constexpr, kind: tl.constexpr):
    """RMSNorm of heads, float32 [heads, HALF] twice, rounded like its reference, in float32 again."""
    rstd = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
    first_weight = tl.load(weight_ptr + near, mask=wide, other=0.0)[None, :]
    second_weight = tl.load(weight_ptr + far, mask=wide, other=0.0)[None, :]
    first, second = weighted(first, rstd, first_weight, kind), weighted(second, rstd, second_weight, kind)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _rotate_and_cache_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    k_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    stride_q,
    stride_k,
    stride_v,
    stride_k_cache,
    stride_v_cache,
    eps,
    Q_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    R: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row; norms and rotates q into out, k into k_out and the cache, and stores v. R: values of a head
    that rotate. Heads are read as two halves, so that a value and its partner have the same place in both."""
    release_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    wide = d < HALF
    kind = k_cache_ptr.dtype.element_ty
    slot = tl.load(slots_ptr + row).to(tl.int64)
    near, far, gap = d, d + HALF, HALF
    if (R > 0) & (R < 2 * HALF):
        # The values that do not rotate are partners with angle 0.
        near, far = tl.where(d < R // 2, d, d + R // 2), tl.where(d < R // 2, d + R // 2, d + HALF)
        gap = (far - near)[None, :]
    head = tl.arange(0, BLOCK_H)[:, None]
    offsets = head * (2 * HALF) + near[None, :]
    here = (head < HEADS) & wide[None, :]
    q_first = q_ptr + row * stride_q + (head * Q_HEAD + near[None, :])
    first = tl.load(q_first, mask=here, other=0.0).to(tl.float32)
    second = tl.load(q_first + gap, mask=here, other=0.0).to(tl.float32)
    kv_head = tl.arange(0, BLOCK_KV)[:, None]
    kv_offsets = kv_head * (2 * HALF) + near[None, :]
    kv_here = (kv_head < KV_HEADS) & wide[None, :]
    k_first = tl.load(k_ptr + row * stride_k + kv_offsets, mask=kv_here, other=0.0).to(tl.float32)
    k_second = tl.load(k_ptr + row * stride_k + kv_offsets + gap, mask=kv_here, other=0.0).to(tl.float32)
    v_first = tl.load(v_ptr + row * stride_v + kv_offsets, mask=kv_here, other=0.0)
    v_second = tl.load(v_ptr + row * stride_v + kv_offsets + gap, mask=kv_here, other=0.0)
    if NORM:
        first, second = _normed_halves(first, second, q_norm_ptr, near, far, wide, eps, HALF, kind)
        k_first, k_second = _normed_halves(k_first, k_second, k_norm_ptr, near, far, wide, eps, HALF, kind)
    if R > 0:
        turns = d < R // 2
        cos = tl.load(cos_ptr + row * (R // 2) + d, mask=turns, other=0.0 if R == 2 * HALF else 1.0)[None, :]
        sin = tl.load(sin_ptr + row * (R // 2) + d, mask=turns, other=0.0)[None, :]
        first, second = first * cos - second * sin, second * cos + first * sin
        k_first, k_second = k_first * cos - k_second * sin, k_second * cos + k_first * sin
    if (R > 0) or NORM:
        k_out = k_out_ptr + row * (KV_HEADS * 2 * HALF) + kv_offsets
        tl.store(k_out, k_first.to(kind), mask=kv_here)
        tl.store(k_out + gap, k_second.to(kind), mask=kv_here)
    out = out_ptr + row * (HEADS * 2 * HALF) + offsets
    tl.store(out, first.to(kind), mask=here)
    tl.store(out + gap, second.to(kind), mask=here)
    k_kept = k_cache_ptr + slot * stride_k_cache + kv_offsets
    tl.store(k_kept, k_first.to(kind), mask=kv_here)
    tl.store(k_kept + gap, k_second.to(kind), mask=kv_here)
    v_out = v_cache_ptr + slot * stride_v_cache + kv_offsets
    tl.store(v_out, v_first, mask=kv_here)
    tl.store(v_out + gap, v_second, mask=kv_here)


def rotate_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    qk_norm: QKNorm | None = None,
) -> tuple[Tensor, Tensor]:
    """q [n, Hq, D], any stride between heads, k and v [n, Hkv, D], heads contiguous in their rows; writes the caches;
    returns q and k normed and rotated."""
    rows, heads, width = q.shape
    kv_heads = k.shape[1]
    for name, tensor in (("q", q), ("k", k), ("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.stride(2) != 1 or (tensor is not q and tensor.stride(1) != width):
            raise ValueError(f"rotate_and_cache: heads of {name} must lie together, strides {tensor.stride()}")
    out = torch.empty((rows, heads, width), device=q.device, dtype=q.dtype)
    changed = rotary is not None or qk_norm is not None
    k_out = torch.empty((rows, kv_heads, width), device=k.device, dtype=k.dtype) if changed else k
    cos, sin = rotary if rotary is not None else (q, q)
    q_norm, k_norm, eps = qk_norm if qk_norm is not None else (q, q, 0.0)
    block_h, block_d = triton.next_power_of_2(heads), triton.next_power_of_2(width // 2)
    launch(
        _rotate_and_cache_kernel,
        (rows,),
        q,
        k,
        v,
        cos,
        sin,
        out,
        k_out,
        k_cache,
        v_cache,
        slot_mapping,
        q_norm,
        k_norm,
        *row_strides(q, k, v, k_cache, v_cache),
        eps,
        Q_HEAD=q.stride(1),
        HEADS=heads,
        KV_HEADS=kv_heads,
        BLOCK_H=block_h,
        BLOCK_KV=triton.next_power_of_2(kv_heads),
        HALF=width // 2,
        BLOCK_D=block_d,
        R=2 * cos.shape[1] if rotary is not None else 0,
        NORM=qk_norm is not None,
        num_warps=8 if block_h * block_d >= 4096 else 4,
    )
    return out, k_out


def rotary_paged_decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    page_size: int,
    qk_norm: QKNorm | None = None,
) -> Tensor:
    """paged_decode_attention, which norms, rotates and stores the current step's k and v itself."""
    current_kv = CurrentKV(k, v, rotary, slot_mapping, qk_norm)
    return paged_decode_attention(q, k_cache, v_cache, block_tables, seq_lens, page_size, current_kv=current_kv)


@triton.jit
def _rotated_halves(pointers, here, cos, sin, HALF: tl.constexpr, kind: tl.constexpr):
    first = tl.load(pointers, mask=here, other=0.0).to(tl.float32)
    second = tl.load(pointers + HALF, mask=here, other=0.0).to(tl.float32)
    return (first * cos - second * sin).to(kind), (second * cos + first * sin).to(kind)


@triton.jit
def _local_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    scale_log2,
    q_sequence,
    q_row,
    k_sequence,
    k_row,
    v_sequence,
    v_row,
    Q_HEAD: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS_HERE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    FIRST: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: HEADS_HERE query heads of one key head and one sequence; its rows are head by head."""
    sequence = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * HEADS_HERE
    kv_head = first_head // (HEADS // KV_HEADS)
    r = tl.arange(0, BLOCK_R)
    head, query = first_head + r // QUERIES, r % QUERIES
    d = tl.arange(0, BLOCK_D)[None, :]
    key = tl.arange(0, BLOCK_L)
    real = (r[:, None] < HEADS_HERE * QUERIES) & (d < HALF)
    keys_here = (key[:, None] < KEYS) & (d < HALF)
    table = (FIRST + query)[:, None] * HALF + d
    q_cos = tl.load(cos_ptr + table, mask=real, other=0.0)
    q_sin = tl.load(sin_ptr + table, mask=real, other=0.0)
    k_cos = tl.load(cos_ptr + key[:, None] * HALF + d, mask=keys_here, other=0.0)
    k_sin = tl.load(sin_ptr + key[:, None] * HALF + d, mask=keys_here, other=0.0)
    release_next(PDL)
    wait_for_previous(PDL)
    kind = q_ptr.dtype.element_ty
    q_rows = q_ptr + sequence * q_sequence + (query * q_row)[:, None] + (head * Q_HEAD)[:, None] + d
    q1, q2 = _rotated_halves(q_rows, real, q_cos, q_sin, HALF, kind)
    k_rows = k_ptr + sequence * k_sequence + (key * k_row)[:, None] + kv_head * K_HEAD + d
    k1, k2 = _rotated_halves(k_rows, keys_here, k_cos, k_sin, HALF, kind)
    v_rows = v_ptr + sequence * v_sequence + (key * v_row)[:, None] + kv_head * V_HEAD + d
    v1 = tl.load(v_rows, mask=keys_here, other=0.0)
    v2 = tl.load(v_rows + HALF, mask=keys_here, other=0.0)
    scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
    scores = tl.dot(q2, tl.trans(k2), acc=scores, input_precision=PRECISION)
    scores = tl.where(key[None, :] < KEYS, scores * scale_log2, float("-inf"))
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    norm = (1.0 / tl.sum(weights, 1))[:, None]
    weights = weights.to(kind)
    out_rows = out_ptr + ((sequence * QUERIES + query[:, None]) * HEADS + head[:, None]) * (2 * HALF) + d
    tl.store(out_rows, (tl.dot(weights, v1, input_precision=PRECISION) * norm).to(kind), mask=real)
    tl.store(out_rows + HALF, (tl.dot(weights, v2, input_precision=PRECISION) * norm).to(kind), mask=real)


def _heads_of_a_program(queries: int, group: int) -> int:
    """A whole group, or the largest part of it whose rows fit a tile of 64: the fastest at 2 to 128 sequences of 11 and
    of 5 (benchmarks/results/kernels/attention_local.json)."""
    here = group
    while here % 2 == 0 and here * queries > 64:
        here //= 2
    return here


def rotary_dense_attention(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, first_query: int = 0) -> Tensor:
    """q [N, Lq, Hq, D], k and v [N, L, Hkv, D], cos and sin float32 [L, D / 2] -> [N, Lq, Hq, D]."""
    sequences, queries, heads, width = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    group = heads // kv_heads
    heads_here = _heads_of_a_program(queries, group)
    out = torch.empty((sequences, queries, heads, width), device=q.device, dtype=q.dtype)
    if out.numel() == 0:
        return out
    block_r = max(16, triton.next_power_of_2(heads_here * queries))
    programs = sequences * heads // heads_here
    # With the 168 registers a thread that a tile of 64 takes, three thread blocks share an SM; here a fourth has work.
    limit = {"maxnreg": 128} if block_r == 64 and programs > 3 * current_gpu().num_sms else {}
    launch(
        _local_attention_kernel,
        (sequences, heads // heads_here),
        q,
        k,
        v,
        cos,
        sin,
        out,
        width**-0.5 * LOG2_E,
        *(stride for x in (q, k, v) for stride in x.stride()[:2]),
        Q_HEAD=q.stride(2),
        K_HEAD=k.stride(2),
        V_HEAD=v.stride(2),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEADS_HERE=heads_here,
        QUERIES=queries,
        KEYS=keys,
        FIRST=first_query,
        HALF=width // 2,
        BLOCK_R=block_r,
        BLOCK_L=max(16, triton.next_power_of_2(keys)),
        BLOCK_D=max(16, triton.next_power_of_2(width // 2)),
        PRECISION=dot_precision(q),
        num_warps=8 if block_r >= 128 else 4,
        **limit,
    )
    return out
