"""Attention on the CPU: one sequence after another through PyTorch's scaled_dot_product_attention, with the lengths
read on the host.

The references of models.layers.attention compute every pair of rows of a batch and read no length, as a captured graph
must; several pictures or a long cache make that slow. They are registered as operators, so that the audit of what can
be captured, which runs on tensors without data, does not look inside.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.precision import upcast

_OPERATORS = torch.library.Library("reprise", "DEF")


def _operator(implementation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Registers a CPU operator under the function's name. torch.library.custom_op is not used: its first call imports
    torch's compiler, which takes two seconds."""
    name = implementation.__name__
    _OPERATORS.define(name + torch.library.infer_schema(implementation, mutates_args=()))
    _OPERATORS.impl(name, implementation, "CPU")
    torch.library.register_fake(f"reprise::{name}", _shaped_like_output, lib=_OPERATORS)
    operator: Callable[..., Tensor] = getattr(torch.ops.reprise, name).default
    return operator


def _shaped_like_output(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


@_operator
def varlen_attention_host(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool = False,
    longest: int | None = None,
) -> Tensor:
    """models.layers.attention.varlen_attention on the CPU."""
    out = q.new_zeros((q.shape[0], q.shape[1], v.shape[-1]))
    group = q.shape[1] // k.shape[1]
    segments = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for (first, end), (first_key, end_key) in segments:
        keys = slice(first_key, end_key)
        # Queries before the first key have no key to attend to.
        queries = slice(max(first, end - (end_key - first_key)) if causal else first, end)
        if queries.start < end and first_key < end_key:
            seen_k, seen_v = (x[keys].repeat_interleave(group, dim=1) for x in (k, v))
            out[queries] = _attend(q[queries], seen_k, seen_v, None, causal)
    return out


@_operator
def paged_decode_attention_host(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    page_size: int,
    scale: float | None = None,
) -> Tensor:
    """models.layers.attention.paged_decode_attention on the CPU. Reads only the pages that hold a sequence."""
    out = q.new_zeros((q.shape[0], q.shape[1], v_cache.shape[-1]))
    key_heads = k_cache.shape[1]
    k_pages, v_pages = (cache.unflatten(0, (-1, page_size)) for cache in (k_cache, v_cache))
    for row, length in enumerate(seq_lens.tolist()):
        if length:
            pages = block_tables[row, : -(-length // page_size)]
            keys, values = (x.index_select(0, pages).flatten(0, 1)[:length] for x in (k_pages, v_pages))
            # One query each: those that share a key head are the queries of that head.
            queries = q[row].unflatten(0, (key_heads, -1)).transpose(0, 1)
            attended = _attend(queries, keys, values, scale, causal=False)
            out[row] = attended.transpose(0, 1).flatten(0, 1)
    return out


@_operator
def paged_prefill_attention_host(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    page_size: int,
    scale: float | None = None,
) -> Tensor:
    """models.layers.attention.paged_prefill_attention on the CPU. Reads only the pages that hold a sequence."""
    out = q.new_zeros((q.shape[0], q.shape[1], v_cache.shape[-1]))
    group = q.shape[1] // k_cache.shape[1]
    offsets = torch.arange(page_size)
    chunks = zip(pairwise(cu_seqlens_q.tolist()), seq_lens.tolist(), block_tables, strict=True)
    for (first, end), length, table in chunks:
        if first < end and length:
            pages = table[: -(-length // page_size)].long()
            rows = (pages[:, None] * page_size + offsets).flatten()[:length]
            keys, values = (x[rows].repeat_interleave(group, dim=1) for x in (k_cache, v_cache))
            out[first:end] = _attend(q[first:end], keys, values, scale, causal=True)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> Tensor:
    """q [n, H, D], k [m, H, D], v [m, H, Dv] -> [n, H, Dv]; causal: the last query sees the last key.
    scale: 1 / sqrt(D) by default."""
    queries, keys, values = (upcast(x.transpose(0, 1)[None]) for x in (q, k, v))
    n, m = q.shape[0], k.shape[0]
    mask = torch.ones(n, m, dtype=torch.bool).tril(m - n) if causal and 1 < n < m else None
    out = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=causal and n == m and n > 1, scale=scale
    )
    return out[0].transpose(0, 1).to(q.dtype)
