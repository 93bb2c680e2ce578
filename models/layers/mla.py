"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) over a paged cache of latents.

The cache holds one row of rank + rope_dim values per token and layer. Decode rows use the absorbed form: the key
projection is applied to the query and the value projection to the result of the softmax, which leaves one key head,
whose first `rank` columns are also the values. Prefills project the latents to keys and values of every head. That
takes memory in proportion to the number of keys, so prefills whose cached context has no bound, as in a captured graph,
are absorbed, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.attention import paged_decode_attention, paged_prefill_attention, varlen_attention
from models.layers.gemm import gemm
from models.layers.kv_cache import CacheSpec, PagedBatch
from models.layers.norms import RMSNorm, rms_norm
from models.layers.op import op
from models.layers.quantized import QuantizedWeight, Weight
from models.layers.rotary import rotate_half_split

_LATENT_NORM_EPS = 1e-6
"""The published code leaves the epsilon of the latent norm at its class default, whatever rms_norm_eps says."""


@dataclass(frozen=True)
class LatentAttentionConfig:
    """rank: values of a latent. nope_dim and rope_dim: values of a query or key head without and with rotation.
    value_dim: values of a value head."""

    hidden_size: int
    num_heads: int
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def scale(self) -> float:
        return (self.nope_dim + self.rope_dim) ** -0.5

    @property
    def cache_spec(self) -> CacheSpec:
        return CacheSpec({"latent": (1, self.rank + self.rope_dim)})


class LatentAttention(nn.Module):
    """q [heads * (nope + rope), hidden_size]; kv_down [rank + rope, hidden_size]; kv_up [heads * (nope + value), rank]:
    the rows of a head are contiguous, nope before rope and keys before values. Rotary rows are in half-split order."""

    sixteen_bit_layers = frozenset({"kv_up"})
    """The absorbed form multiplies by its transpose, head by head, which the kernels for e4m3 do not do."""

    def __init__(self, config: LatentAttentionConfig) -> None:
        super().__init__()
        self.config = config
        self.q = nn.Linear(config.hidden_size, config.num_heads * (config.nope_dim + config.rope_dim), bias=False)
        self.kv_down = nn.Linear(config.hidden_size, config.rank + config.rope_dim, bias=False)
        self.latent_norm = RMSNorm(config.rank, _LATENT_NORM_EPS)
        self.kv_up = nn.Linear(config.rank, config.num_heads * (config.nope_dim + config.value_dim), bias=False)
        self.out = nn.Linear(config.num_heads * config.value_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], layer: int, batch: PagedBatch) -> Tensor:
        """x [n, hidden_size] packed as `batch` says -> [n, hidden_size]; stores the new latents."""
        config = self.config
        q = gemm(x, self.q.weight).unflatten(-1, (config.num_heads, -1))
        kv = gemm(x, self.kv_down.weight)
        if batch.block_tables is not None or batch.prefill_tables is not None:
            return gemm(self._absorbed(q, kv, rotary, layer, batch).flatten(-2), self.out.weight)
        cache = batch.caches[layer]["latent"]
        norm = self.latent_norm
        # In place: the queries and latents of prefills are read as they are stored.
        rotate_and_cache_latent(q, kv, norm.weight, norm.eps, rotary, q, cache, batch.slot_mapping, keep=True)
        rows = kv if batch.context_slots is None else cache[batch.context_slots].squeeze(1)
        return gemm(self._prefill(q, rows, batch).flatten(-2), self.out.weight)

    def _absorbed(self, q: Tensor, kv: Tensor, rotary: tuple[Tensor, Tensor], layer: int, batch: PagedBatch) -> Tensor:
        """q [n, heads, nope + rope] and kv [n, rank + rope], of decode rows or of chunks over pages -> [n, heads,
        value_dim]."""
        config, cache = self.config, batch.caches[layer]["latent"]
        norm = self.latent_norm
        query = q.new_empty((q.shape[0], config.num_heads, config.rank + config.rope_dim))
        rotate_and_cache_latent(q, kv, norm.weight, norm.eps, rotary, query, cache, batch.slot_mapping)
        key_up, value_up = self._up_projections()
        torch.bmm(q[..., : config.nope_dim].transpose(0, 1), key_up, out=query[..., : config.rank].transpose(0, 1))
        attended = self._attend_latents(query, cache, batch)
        values = q.new_empty((q.shape[0], config.num_heads, config.value_dim))
        torch.bmm(attended.transpose(0, 1), value_up.transpose(1, 2), out=values.transpose(0, 1))
        return values

    def _attend_latents(self, query: Tensor, cache: Tensor, batch: PagedBatch) -> Tensor:
        """query [n, heads, rank + rope] -> [n, heads, rank]."""
        scale, page_size = self.config.scale, batch.page_size
        values = cache[..., : self.config.rank]
        if batch.prefill_tables is None:
            assert batch.block_tables is not None and batch.seq_lens is not None
            tables, lengths = batch.block_tables, batch.seq_lens
            return paged_decode_attention(query, cache, values, tables, lengths, page_size, scale=scale)
        assert batch.cu_seqlens_q is not None and batch.prefill_lens is not None
        tables, lengths = batch.prefill_tables, batch.prefill_lens
        return paged_prefill_attention(
            query, cache, values, tables, batch.cu_seqlens_q, lengths, page_size, scale=scale
        )

    def _prefill(self, q: Tensor, rows: Tensor, batch: PagedBatch) -> Tensor:
        """q [n, heads, nope + rope], rotated, and rows [keys, rank + rope] as they are cached -> [n, heads,
        value_dim]."""
        assert batch.cu_seqlens_q is not None and batch.cu_seqlens_k is not None
        config = self.config
        latent, k_rope = rows.split((config.rank, config.rope_dim), -1)
        up = F.linear(latent, self.kv_up.weight).unflatten(-1, (config.num_heads, -1))
        keys, values = head_keys(up, k_rope, config.nope_dim), up[..., config.nope_dim :]
        cu_q, cu_k = batch.cu_seqlens_q, batch.cu_seqlens_k
        return varlen_attention(q, keys, values, cu_q, cu_k, causal=True)

    def _up_projections(self) -> tuple[Tensor, Tensor]:
        """Views of kv_up: keys [heads, nope_dim, rank] and values [heads, value_dim, rank]."""
        up = self.kv_up.weight.unflatten(0, (self.config.num_heads, -1))
        return up[:, : self.config.nope_dim], up[:, self.config.nope_dim :]


@op(cuda="models.layers.kernels.latent:rotate_and_cache_latent")
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
    """Writes the rotated part of the queries and the new KV slots.

    q [n, heads, nope + rope] -> the last rope columns of query [n, heads, at least rope], which may be q; kv [n, rank +
    rope], its latent normed and its key rotated -> rows slot_mapping int64 [n] of cache [KV slots, 1, rank + rope], and
    of kv itself if `keep`.
    """
    rank, rope = norm_weight.shape[0], 2 * rotary[0].shape[1]
    query[..., -rope:] = rotate_half_split(q[..., -rope:], *rotary)
    latent, k_rope = kv.split((rank, rope), -1)
    k_rope = rotate_half_split(k_rope[:, None], *rotary)
    rows = torch.cat((rms_norm(latent, norm_weight, eps)[:, None], k_rope), dim=-1)
    cache.index_copy_(0, slot_mapping, rows)
    if keep:
        kv.copy_(rows[:, 0])


@op(cuda="models.layers.kernels.latent:head_keys")
def head_keys(up: Tensor, k_rope: Tensor, nope_dim: int) -> Tensor:
    """Keys of every head: the first nope_dim columns of up [n, heads, nope + value], then k_rope [n, rope], which all
    heads share -> [n, heads, nope + rope]."""
    shared = k_rope[:, None].expand(-1, up.shape[1], -1)
    return torch.cat((up[..., :nope_dim], shared), dim=-1)


def half_split_rows(weight: Weight, head_rows: int, rope_rows: int) -> None:
    """Reorder in place the last `rope_rows` of every `head_rows` rows from interleaved pairs to half-split order."""
    if isinstance(weight, QuantizedWeight):
        for part in (weight.values.view(torch.uint8), weight.scale, *(() if weight.zeros is None else (weight.zeros,))):
            half_split_rows(part, head_rows, rope_rows)
        return
    heads = weight.view(-1, head_rows, *weight.shape[1:])
    rope = heads[:, head_rows - rope_rows :]
    rope.copy_(torch.cat((rope[:, 0::2], rope[:, 1::2]), dim=1))
