"""Attention: packed variable-length, paged decode and paged prefill. Each has a reference in plain PyTorch, a kernel
for GPUs and a faster form for CPUs; tests compare both with the reference.

Tensors are packed: [rows, heads, head_dim]. In grouped-query attention, query head h reads key head h // (Hq // Hkv).
Softmax and accumulation are in float32. Every row of the output is written: rows outside all segments are zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.layers.host_attention import (
    paged_decode_attention_host,
    paged_prefill_attention_host,
    varlen_attention_host,
)
from models.layers.kv_cache import PagedBatch
from models.layers.norms import QKNorm
from models.layers.op import op
from models.layers.precision import upcast
from models.layers.rotary import rotate_and_cache

_REFERENCE_BLOCK = 1024


@op(cuda="models.layers.kernels.varlen:varlen_attention", cpu=varlen_attention_host)
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool = False,
    longest: int | None = None,
) -> Tensor:
    """Attention inside each segment of packed rows: dense, under a segment mask, in blocks of queries; reads no tensor
    on the host.

    q [nq, Hq, D], k [nk, Hkv, D], v [nk, Hkv, Dv]; cu_seqlens int32 [segments + 1], non-decreasing; empty segments
    and a repeated tail are allowed. causal aligns the last query with the last key (bottom right). Returns [nq, Hq,
    Dv].

    longest: upper bound on the longest segment of queries. If it fits into one tile of the kernel, as windows do, the
    kernel needs fewer programs, which need not search for their segments.
    """
    nq, heads, _ = q.shape
    segment_k, index_k, _ = row_segments(cu_seqlens_k, k.shape[0])
    segment_q, index_q, inside_q = row_segments(cu_seqlens_q, nq)
    length_q, length_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    last = length_k.shape[0] - 1
    offset = (length_k - length_q)[segment_q.clamp(max=last)]
    keys = upcast(_repeat_heads(k, heads)).transpose(0, 1)
    values = upcast(_repeat_heads(v, heads)).transpose(0, 1)
    # Values outside every segment may be NaN; their weight is 0, but 0 * NaN is NaN.
    values = torch.where((segment_k <= last)[None, :, None], values, 0.0)
    blocks = []
    for start in range(0, nq, _REFERENCE_BLOCK):
        rows = slice(start, min(start + _REFERENCE_BLOCK, nq))
        allowed = (segment_q[rows, None] == segment_k[None, :]) & inside_q[rows, None]
        if causal:
            allowed &= index_k[None, :] <= (index_q + offset)[rows, None]
        scores = torch.einsum("qhd,hkd->hqk", upcast(q[rows]), keys) * q.shape[-1] ** -0.5
        scores = torch.where(allowed, scores, -torch.inf)
        weights = torch.softmax(scores, dim=-1)
        weights = torch.where(allowed, weights, 0.0)
        blocks.append(torch.einsum("hqk,hkd->qhd", weights, values).to(q.dtype))
    return torch.cat(blocks) if blocks else q.new_zeros((0, heads, v.shape[-1]))


def row_segments(cu_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """For every packed row: number of its segment, index inside the segment, and whether it is in a segment at all."""
    index = torch.arange(rows, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    segment = torch.searchsorted(cu_seqlens[1:].contiguous(), index, right=True)
    inside = index < cu_seqlens[-1]
    return segment, index - cu_seqlens[segment.clamp(max=cu_seqlens.shape[0] - 1)], inside


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


@op(cuda="models.layers.kernels.paged_decode:paged_decode_attention", cpu=paged_decode_attention_host)
def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    page_size: int,
    scale: float | None = None,
) -> Tensor:
    """One query per sequence over its pages: dense attention over everything in the tables; reads no tensor on the
    host.

    q [rows, Hq, D], caches [KV slots, Hkv, D or Dv], block_tables int32 [rows, max_pages], seq_lens int32 [rows];
    rows of length 0 give zeros. scale: 1 / sqrt(D) by default. Returns [rows, Hq, Dv].
    """
    rows, heads, _ = q.shape
    positions = torch.arange(block_tables.shape[1] * page_size, device=q.device)
    slot_mapping = block_tables.long()[:, positions // page_size] * page_size + positions % page_size
    allowed = positions[None, :] < seq_lens[:, None]
    keys = upcast(k_cache[slot_mapping])
    values = torch.where(allowed[..., None, None], upcast(v_cache[slot_mapping]), 0.0)
    group = heads // keys.shape[2]
    grouped = upcast(q).view(rows, keys.shape[2], group, -1)
    scores = torch.einsum("bhgd,bkhd->bhgk", grouped, keys) * (scale or q.shape[-1] ** -0.5)
    scores = torch.where(allowed[:, None, None, :], scores, -torch.inf)
    weights = torch.where(allowed[:, None, None, :], torch.softmax(scores, dim=-1), 0.0)
    return torch.einsum("bhgk,bkhd->bhgd", weights, values).reshape(rows, heads, -1).to(q.dtype)


@op(cuda="models.layers.kernels.paged_prefill:paged_prefill_attention", cpu=paged_prefill_attention_host)
def paged_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    page_size: int,
    scale: float | None = None,
) -> Tensor:
    """Causal attention of packed chunks of sequences over their pages, which hold the chunks' own keys already: dense
    attention of all rows over each table in turn; reads no tensor on the host.

    q [n, Hq, D]: chunk i is rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] (int32 [sequences + 1], a repeated tail is
    allowed) and ends at key seq_lens[i] - 1 of its sequence (int32 [sequences]). Caches [KV slots, Hkv, D or Dv],
    block_tables int32 [sequences, max_pages]. Cached context is not a size of a captured graph. scale: 1 / sqrt(D) by
    default. Returns [n, Hq, Dv]; rows behind the last chunk, and of sequences of length 0, are zero.
    """
    chunk, index, inside = row_segments(cu_seqlens_q, q.shape[0])
    sequences = block_tables.shape[0]
    cached = (seq_lens - cu_seqlens_q.diff())[chunk.clamp(max=sequences - 1)]
    positions = torch.arange(block_tables.shape[1] * page_size, device=q.device)
    causal = positions[None, :] <= (cached + index)[:, None]
    queries, scale = upcast(q), scale or q.shape[-1] ** -0.5
    out = q.new_zeros((q.shape[0], q.shape[1], v_cache.shape[-1]))
    for sequence in range(sequences):
        rows = block_tables[sequence].long()[positions // page_size] * page_size + positions % page_size
        held = positions < seq_lens[sequence]
        mine = inside & (chunk == sequence)
        keys = upcast(_repeat_heads(k_cache[rows], q.shape[1]))
        values = torch.where(held[:, None, None], upcast(_repeat_heads(v_cache[rows], q.shape[1])), 0.0)
        allowed = mine[:, None] & causal & held
        scores = torch.where(allowed, torch.einsum("qhd,khd->hqk", queries, keys) * scale, -torch.inf)
        weights = torch.where(allowed, torch.softmax(scores, dim=-1), 0.0)
        attended = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
        out = torch.where(mine[:, None, None], attended, out)
    return out


@op(cuda="models.layers.kernels.rotary:rotary_paged_decode_attention")
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
    """rotate_and_cache for one new token of each sequence, then paged_decode_attention.

    q [rows, Hq, D], k and v [rows, Hkv, D]; rotary: cos and sin float32 [rows, R/2], R <= D, None for no
    rotation. slot_mapping int64 [rows] is the KV slot of position seq_lens - 1; for rows of length 0 it is a scratch
    slot, which need not be written. Returns [rows, Hq, D].
    """
    q, _ = rotate_and_cache(q, k, v, rotary, k_cache, v_cache, slot_mapping, qk_norm)
    return paged_decode_attention(q, k_cache, v_cache, block_tables, seq_lens, page_size)


def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: int,
    batch: PagedBatch,
    rotary: tuple[Tensor, Tensor] | None = None,
    qk_norm: QKNorm | None = None,
) -> Tensor:
    """Causal attention of one layer over the cache: norms and rotates q and k, stores k and v, and attends.

    q [n, Hq, D], k and v [n, Hkv, D], packed as `batch` describes. rotary: cos and sin float32 [n, R/2], R <= D; None
    if there is no rotation or it has been done already. qk_norm: before the rotation.
    """
    k_cache, v_cache, slots = batch.caches[layer]["k"], batch.caches[layer]["v"], batch.slot_mapping
    if batch.block_tables is not None:
        assert batch.seq_lens is not None
        pages = batch.block_tables, batch.seq_lens, batch.page_size
        return rotary_paged_decode_attention(q, k, v, rotary, k_cache, v_cache, slots, *pages, qk_norm)
    assert batch.cu_seqlens_q is not None
    q, k = rotate_and_cache(q, k, v, rotary, k_cache, v_cache, slots, qk_norm)
    if batch.prefill_tables is not None:
        assert batch.prefill_lens is not None
        tables, lengths = batch.prefill_tables, batch.prefill_lens
        return paged_prefill_attention(q, k_cache, v_cache, tables, batch.cu_seqlens_q, lengths, batch.page_size)
    assert batch.cu_seqlens_k is not None
    if batch.context_slots is not None:
        k, v = (cache.index_select(0, batch.context_slots) for cache in (k_cache, v_cache))
    return varlen_attention(q, k, v, batch.cu_seqlens_q, batch.cu_seqlens_k, causal=True)
