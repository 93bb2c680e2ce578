"""Attention with an output gate (Qwen3-Next, Qwen3.5): each head's output times the sigmoid of its gate."""

from __future__ import annotations

from torch import Tensor, nn

from models.layers.attention import cached_attention
from models.layers.fused import sigmoid_mul
from models.layers.gemm import gemm
from models.layers.kv_cache import PagedBatch
from models.layers.norms import Normed, QKNorm, RMSNorm
from models.layers.rotary import rotate_and_cache


class GatedAttention(nn.Module):
    """The projections of a gated attention. The caller applies `out` and adds its result to x.

    qkv holds the rows of q, each head's query before its gate, then those of k and v.
    """

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, norm_eps: float) -> None:
        super().__init__()
        self.heads = (2 * num_heads, num_kv_heads, num_kv_heads)
        self.head_dim = head_dim
        self.qkv = nn.Linear(hidden_size, sum(self.heads) * head_dim, bias=False)
        self.out = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.q_norm = RMSNorm(head_dim, norm_eps, float32=True)
        self.k_norm = RMSNorm(head_dim, norm_eps, float32=True)

    def forward(self, normed: Normed, rotary: tuple[Tensor, Tensor], layer: int, batch: PagedBatch) -> Tensor:
        """[n, hidden_size] packed as `batch` says -> gated outputs of the heads [n, num_heads * head_dim].

        rotary: cos and sin float32 [n, R/2], R <= head_dim. layer: index into batch.caches.
        """
        q, gate, k, v = self._heads(normed)
        return sigmoid_mul(cached_attention(q, k, v, layer, batch, rotary, self._qk_norm()), gate).flatten(-2)

    def cache_keys(self, normed: Normed, rotary: tuple[Tensor, Tensor], layer: int, batch: PagedBatch) -> None:
        """What forward writes to the cache, without its outputs."""
        q, _, k, v = self._heads(normed)
        cache = batch.caches[layer]
        rotate_and_cache(q, k, v, rotary, cache["k"], cache["v"], batch.slot_mapping, self._qk_norm())

    def _heads(self, normed: Normed) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, their gates, keys and values [n, heads of each, head_dim]."""
        heads = gemm(normed, self.qkv.weight).unflatten(-1, (-1, self.head_dim))
        q_and_gate, k, v = heads.split(self.heads, dim=-2)
        q, gate = q_and_gate.unflatten(-2, (-1, 2)).unbind(-2)
        return q, gate, k, v

    def _qk_norm(self) -> QKNorm:
        return QKNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
