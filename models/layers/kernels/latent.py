"""Between the projections of latent attention and its attention. References: rotate_and_cache_latent and head_keys of
models.layers.mla."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.launch import launch, release_next, row_strides, wait_for_previous


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
    stride_query,
    QUERY: tl.constexpr,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row. QUERY: columns of a head of the query before those that are rotated."""
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
    query = query_ptr + row * stride_query + head * (QUERY + 2 * HALF) + QUERY + d[None, :]
    tl.store(query, (first * cos[None, :] - second * sin[None, :]).to(kind), mask=here)
    tl.store(query + HALF, (second * cos[None, :] + first * sin[None, :]).to(kind), mask=here)
    kv = kv_ptr + row * stride_kv
    cache = cache_ptr + tl.load(slots_ptr + row) * stride_cache
    latent = tl.load(kv + r, mask=ranked, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
    normed = (latent * rstd).to(kind) * weight
    k_first = tl.load(kv + RANK + d, mask=wide, other=0.0).to(tl.float32)
    k_second = tl.load(kv + RANK + HALF + d, mask=wide, other=0.0).to(tl.float32)
    k_low, k_high = (k_first * cos - k_second * sin).to(kind), (k_second * cos + k_first * sin).to(kind)
    tl.store(cache + r, normed, mask=ranked)
    tl.store(cache + RANK + d, k_low, mask=wide)
    tl.store(cache + RANK + HALF + d, k_high, mask=wide)
    if KEEP:
        tl.store(kv + r, normed, mask=ranked)
        tl.store(kv + RANK + d, k_low, mask=wide)
        tl.store(kv + RANK + HALF + d, k_high, mask=wide)


def rotate_and_cache_latent(
    q: Tensor,
    kv: Tensor,
    norm_weight: Tensor,
    eps: float,
    rotary: tuple[Tensor, Tensor],
    query: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    keep: bool = False,
) -> None:
    """q [n, heads, nope + rope], kv [n, rank + rope], query [n, heads, at least rope], rows of all contiguous; cache
    [rows, 1, rank + rope]; rotary float32 [n, rope / 2]."""
    rows, heads, width = q.shape
    cos, sin = rotary
    half, rank = cos.shape[1], norm_weight.shape[0]
    packed = all(part.stride(2) == 1 and part.stride(1) == part.shape[2] for part in (q, query))
    if not packed or kv.stride(1) != 1:
        raise ValueError("latent attention: heads of q and of the query must lie together, rows of kv be contiguous")
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
        *row_strides(q, kv, cache, query),
        QUERY=query.shape[2] - 2 * half,
        HEADS=heads,
        NOPE=width - 2 * half,
        RANK=rank,
        HALF=half,
        BLOCK_H=triton.next_power_of_2(heads),
        BLOCK_R=triton.next_power_of_2(rank),
        BLOCK_D=triton.next_power_of_2(half),
        KEEP=keep,
        num_warps=4,
    )


@triton.jit
def _head_keys_kernel(
    up_ptr,
    rope_ptr,
    out_ptr,
    stride_up,
    stride_rope,
    UP: tl.constexpr,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row. UP: columns of a head of up."""
    release_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None]
    n, r = tl.arange(0, BLOCK_N)[None, :], tl.arange(0, BLOCK_R)[None, :]
    out = out_ptr + (row * HEADS + head) * (NOPE + ROPE)
    here = (head < HEADS) & (n < NOPE)
    tl.store(out + n, tl.load(up_ptr + row * stride_up + head * UP + n, mask=here), mask=here)
    shared = tl.load(rope_ptr + row * stride_rope + r, mask=r < ROPE)
    tl.store(out + NOPE + r, shared.broadcast_to(BLOCK_H, BLOCK_R), mask=(head < HEADS) & (r < ROPE))


def head_keys(up: Tensor, k_rope: Tensor, nope_dim: int) -> Tensor:
    """up [n, heads, nope + value] with heads that lie together, k_rope [n, rope] -> [n, heads, nope + rope]."""
    rows, heads, width = up.shape
    rope = k_rope.shape[1]
    if up.stride(2) != 1 or up.stride(1) != width or k_rope.stride(1) != 1:
        raise ValueError("latent attention: heads of the keys must lie together, rows of rotated keys be contiguous")
    out = torch.empty((rows, heads, nope_dim + rope), device=up.device, dtype=up.dtype)
    launch(
        _head_keys_kernel,
        (rows,),
        up,
        k_rope,
        out,
        *row_strides(up, k_rope),
        UP=width,
        HEADS=heads,
        NOPE=nope_dim,
        ROPE=rope,
        BLOCK_H=triton.next_power_of_2(heads),
        BLOCK_N=triton.next_power_of_2(nope_dim),
        BLOCK_R=triton.next_power_of_2(rope),
        num_warps=4,
    )
    return out
