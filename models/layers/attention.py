"""Attention: packed variable-length, paged decode and dense, each one function for the GPU's kernel and for the CPU.

References are what both are tested against.

Shapes are packed: [rows, heads, head_dim]. Grouped-query heads: query head h reads key head h // (Hq // Hkv). Softmax
and accumulation in float32. Every output row is written: rows of no segment are zero.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.host_attention import paged_decode_attention_host, varlen_attention_host
from models.layers.kv_cache import PagedBatch
from models.layers.precision import wide
from models.layers.rotary import rotate_and_cache, rotate_and_cache_reference

_REFERENCE_BLOCK = 1024


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Attention inside each segment of packed rows.

    q [nq, Hq, D], k [nk, Hkv, D], v [nk, Hkv, Dv]; cu_seqlens int32 [segments + 1], non-decreasing; empty segments
    and a repeated tail are allowed. max_seqlen bounds the longest segment (baked into a recording). causal aligns
    the last query with the last key (bottom right). Returns [nq, Hq, Dv].
    """
    scale = scale if scale is not None else 1.0 / math.sqrt(q.shape[-1])
    if q.is_cuda:
        from models.layers.kernels.varlen import varlen_attention_cuda

        return varlen_attention_cuda(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, causal)
    return varlen_attention_host(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, causal)


def varlen_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, scale: float, causal: bool
) -> Tensor:
    """Dense attention under a segment mask, in blocks of queries; reads no tensor on the host."""
    nq, heads, _ = q.shape
    segment_k, index_k, _ = _segments(cu_seqlens_k, k.shape[0])
    segment_q, index_q, inside_q = _segments(cu_seqlens_q, nq)
    length_q, length_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    last = length_k.shape[0] - 1
    offset = (length_k - length_q)[segment_q.clamp(max=last)]
    keys = wide(_repeat_heads(k, heads)).transpose(0, 1)
    values = wide(_repeat_heads(v, heads)).transpose(0, 1)
    # A key outside every segment may hold anything; its weight is 0 and 0 * NaN is NaN.
    values = torch.where((segment_k <= last)[None, :, None], values, 0.0)
    blocks = []
    for start in range(0, nq, _REFERENCE_BLOCK):
        rows = slice(start, min(start + _REFERENCE_BLOCK, nq))
        allowed = (segment_q[rows, None] == segment_k[None, :]) & inside_q[rows, None]
        if causal:
            allowed &= index_k[None, :] <= (index_q + offset)[rows, None]
        scores = torch.einsum("qhd,hkd->hqk", wide(q[rows]), keys) * scale
        scores = torch.where(allowed, scores, -torch.inf)
        weights = torch.softmax(scores, dim=-1)
        weights = torch.where(allowed, weights, 0.0)
        blocks.append(torch.einsum("hqk,hkd->qhd", weights, values).to(q.dtype))
    return torch.cat(blocks) if blocks else q.new_zeros((0, heads, v.shape[-1]))


def _segments(cu_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Segment number, index inside it and whether there is one, of every packed row."""
    index = torch.arange(rows, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    segment = torch.searchsorted(cu_seqlens[1:].contiguous(), index, right=True)
    inside = index < cu_seqlens[-1]
    return segment, index - cu_seqlens[segment.clamp(max=cu_seqlens.shape[0] - 1)], inside


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    page_size: int,
    *,
    scale: float | None = None,
) -> Tensor:
    """One query per sequence over its pages.

    q [rows, Hq, D], caches [cache rows, Hkv, D or Dv], block_tables int32 [rows, max_pages], seq_lens int32 [rows];
    rows of length 0 give zeros. Lengths are read on the device. Returns [rows, Hq, Dv].
    """
    scale = scale if scale is not None else 1.0 / math.sqrt(q.shape[-1])
    if q.is_cuda:
        from models.layers.kernels.paged_decode import paged_decode_attention_cuda

        return paged_decode_attention_cuda(q, k_cache, v_cache, block_tables, seq_lens, page_size, scale)
    return paged_decode_attention_host(q, k_cache, v_cache, block_tables, seq_lens, page_size, scale)


def paged_decode_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    page_size: int,
    scale: float,
) -> Tensor:
    rows, heads, _ = q.shape
    positions = torch.arange(block_tables.shape[1] * page_size, device=q.device)
    cache_rows = block_tables.long()[:, positions // page_size] * page_size + positions % page_size
    allowed = positions[None, :] < seq_lens[:, None]
    keys = wide(k_cache[cache_rows])
    values = torch.where(allowed[..., None, None], wide(v_cache[cache_rows]), 0.0)
    group = heads // keys.shape[2]
    grouped = wide(q).view(rows, keys.shape[2], group, -1)
    scores = torch.einsum("bhgd,bkhd->bhgk", grouped, keys) * scale
    scores = torch.where(allowed[:, None, None, :], scores, -torch.inf)
    weights = torch.where(allowed[:, None, None, :], torch.softmax(scores, dim=-1), 0.0)
    return torch.einsum("bhgk,bkhd->bhgd", weights, values).reshape(rows, heads, -1).to(q.dtype)


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
) -> Tensor:
    """rotate_and_cache of one new token of each sequence, then paged_decode_attention of it.

    q [rows, Hq, D], k and v [rows, Hkv, D]; rotary: cos and sin float32 [rows, D/2], None for no rotation. slot_mapping
    int64 [rows] is the cache row of position seq_lens - 1, and of rows of length 0 a scratch row, which may stay as it
    is. Returns [rows, Hq, D].
    """
    if q.is_cuda:
        from models.layers.kernels.paged_decode import Newest, paged_decode_attention_cuda

        return paged_decode_attention_cuda(
            q,
            k_cache,
            v_cache,
            block_tables,
            seq_lens,
            page_size,
            1.0 / math.sqrt(q.shape[-1]),
            newest=Newest(k, v, rotary, slot_mapping),
        )
    q = rotate_and_cache_reference(q, k, v, rotary, k_cache, v_cache, slot_mapping)
    return paged_decode_attention(q, k_cache, v_cache, block_tables, seq_lens, page_size)


def rotary_paged_decode_attention_reference(
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
) -> Tensor:
    q = rotate_and_cache_reference(q, k, v, rotary, k_cache, v_cache, slot_mapping)
    scale = 1.0 / math.sqrt(q.shape[-1])
    return paged_decode_attention_reference(q, k_cache, v_cache, block_tables, seq_lens, page_size, scale)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """Bidirectional attention over equal, short sequences: q [N, L, Hq, D], k and v [N, L, Hkv, D] -> like q."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        scale=scale,
        enable_gqa=k.shape[2] != q.shape[2],
    )
    return out.transpose(1, 2)


def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: int,
    batch: PagedBatch,
    rotary: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Causal attention of one layer over the cache: rotates q and k, stores k and v, and attends.

    q [n, Hq, D], k and v [n, Hkv, D], packed as `batch` says: decode rows first, then prefill chunks. rotary: cos and
    sin float32 [n, D/2]; None where there is no rotation or it is done already.
    """
    decodes = batch.num_decode_rows
    if decodes == 0:
        return _prefill(q, k, v, rotary, batch.slot_mapping, layer, batch)
    if decodes == q.shape[0]:
        return _decode(q, k, v, rotary, batch.slot_mapping, layer, batch)
    (q, next_q), (k, next_k), (v, next_v), (slots, next_slots) = (
        (x[:decodes], x[decodes:]) for x in (q, k, v, batch.slot_mapping)
    )
    next_rotary = None
    if rotary is not None:
        cos, sin = rotary
        rotary, next_rotary = (cos[:decodes], sin[:decodes]), (cos[decodes:], sin[decodes:])
    attended = _decode(q, k, v, rotary, slots, layer, batch)
    return torch.cat((attended, _prefill(next_q, next_k, next_v, next_rotary, next_slots, layer, batch)))


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    slots: Tensor,
    layer: int,
    batch: PagedBatch,
) -> Tensor:
    assert batch.block_tables is not None and batch.seq_lens is not None
    cache = batch.caches[layer]
    return rotary_paged_decode_attention(
        q, k, v, rotary, cache["k"], cache["v"], slots, batch.block_tables, batch.seq_lens, batch.page_size
    )


def _prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    slots: Tensor,
    layer: int,
    batch: PagedBatch,
) -> Tensor:
    assert batch.cu_seqlens_q is not None and batch.cu_seqlens_k is not None
    k_cache, v_cache = batch.caches[layer]["k"], batch.caches[layer]["v"]
    q = rotate_and_cache(q, k, v, rotary, k_cache, v_cache, slots)
    keys = k_cache.index_select(0, slots if batch.key_rows is None else batch.key_rows)
    values = v if batch.key_rows is None else v_cache.index_select(0, batch.key_rows)
    cu_q, cu_k, most_q, most_k = batch.cu_seqlens_q, batch.cu_seqlens_k, batch.max_seqlen_q, batch.max_seqlen_k
    return varlen_attention(q, keys, values, cu_q, cu_k, most_q, most_k, causal=True)
