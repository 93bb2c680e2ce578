"""Between the projections of latent attention and its decode. Reference: models.layers.mla.rotate_and_cache_latent."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.launch import launch, release_next, wait_for_previous


@triton.jit
def _latent_kernel(
    q_ptr,
    kv_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    query_ptr,
    cache_ptr,
    slots_ptr,
    eps,
    stride_q,
    stride_kv,
    stride_cache,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    wide = d < HALF
    r = tl.arange(0, BLOCK_R)
    ranked = r < RANK
    weight = tl.load(norm_ptr + r, mask=ranked, other=0.0)
    release_next(PDL)
    wait_for_previous(PDL)
    kind = query_ptr.dtype.element_ty
    cos = tl.load(cos_ptr + row * HALF + d, mask=wide, other=0.0)
    sin = tl.load(sin_ptr + row * HALF + d, mask=wide, other=0.0)
    head = tl.arange(0, BLOCK_H)[:, None]
    here = (head < HEADS) & wide[None, :]
    q = q_ptr + row * stride_q + head * (NOPE + 2 * HALF) + NOPE + d[None, :]
    first = tl.load(q, mask=here, other=0.0).to(tl.float32)
    second = tl.load(q + HALF, mask=here, other=0.0).to(tl.float32)
    query = query_ptr + (row * HEADS + head) * (RANK + 2 * HALF) + RANK + d[None, :]
    tl.store(query, (first * cos[None, :] - second * sin[None, :]).to(kind), mask=here)
    tl.store(query + HALF, (second * cos[None, :] + first * sin[None, :]).to(kind), mask=here)
    kv = kv_ptr + row * stride_kv
    cache = cache_ptr + tl.load(slots_ptr + row) * stride_cache
    latent = tl.load(kv + r, mask=ranked, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
    tl.store(cache + r, (latent * rstd).to(kind) * weight, mask=ranked)
    k_first = tl.load(kv + RANK + d, mask=wide, other=0.0).to(tl.float32)
    k_second = tl.load(kv + RANK + HALF + d, mask=wide, other=0.0).to(tl.float32)
    tl.store(cache + RANK + d, (k_first * cos - k_second * sin).to(kind), mask=wide)
    tl.store(cache + RANK + HALF + d, (k_second * cos + k_first * sin).to(kind), mask=wide)


def rotate_and_cache_latent(
    q: Tensor,
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    rotary: tuple[Tensor, Tensor],
    query: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """q [n, heads, nope + rope], kv [n, rank + rope], query [n, heads, rank + rope] contiguous, cache [rows, 1, rank +
    rope]; rotary float32 [n, rope / 2]."""
    rows, heads, width = q.shape
    cos, sin = rotary
    half, rank = cos.shape[1], norm_weight.shape[0]
    if q.stride(2) != 1 or q.stride(1) != width or kv.stride(1) != 1 or not query.is_contiguous():
        raise ValueError("latent attention: heads of q must lie together, rows of kv and the query be contiguous")
    if rows == 0:
        return
    launch(
        _latent_kernel,
        (rows,),
        q,
        kv,
        norm_weight,
        cos,
        sin,
        query,
        cache,
        slot_mapping,
        eps,
        q.stride(0),
        kv.stride(0),
        cache.stride(0),
        HEADS=heads,
        NOPE=width - 2 * half,
        RANK=rank,
        HALF=half,
        BLOCK_H=triton.next_power_of_2(heads),
        BLOCK_R=triton.next_power_of_2(rank),
        BLOCK_D=triton.next_power_of_2(half),
        num_warps=4,
    )
