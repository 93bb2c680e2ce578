"""The pre-norm block of newer vision towers: RMSNorm, attention inside packed segments, SwiGLU, every linear with a
bias."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from torch import Tensor, nn

from models.layers.attention import varlen_attention
from models.layers.block import add_and_norm
from models.layers.gemm import gemm
from models.layers.mlp import SwiGLU
from models.layers.norms import Normed, RMSNorm
from models.layers.packed import rotate_packed

Segments = tuple[Tensor, int]
"""cu_seqlens int32 [segments + 1], and an upper bound of the longest segment."""


class RMSTowerBlock(nn.Module):
    """Parameters of x += out(attention(norm(x))); x += mlp(norm(x)); qkv holds the rows of q, then k, then v."""

    def __init__(self, hidden_size: int, intermediate_size: int, num_heads: int, norm_eps: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = RMSNorm(hidden_size, norm_eps)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)
        self.mlp_norm = RMSNorm(hidden_size, norm_eps)
        self.mlp = SwiGLU(hidden_size, intermediate_size, bias=True)

    def attend(self, normed: Normed, rotary: tuple[Tensor, Tensor], segments: Segments) -> Tensor:
        """[n, hidden_size] -> what each head attended [n, hidden_size]."""
        heads = gemm(normed, self.qkv.weight, self.qkv.bias).unflatten(-1, (3 * self.num_heads, -1))
        rotate_packed(heads, 2 * self.num_heads, *rotary)
        q, k, v = heads.chunk(3, dim=1)
        cu_seqlens, longest = segments
        return varlen_attention(q, k, v, cu_seqlens, cu_seqlens, longest=longest).flatten(-2)


def run_rms_tower(
    blocks: Iterable[nn.Module],
    x: Tensor,
    final_norm: RMSNorm,
    rotary: tuple[Tensor, Tensor],
    segments: Sequence[Segments],
) -> Tensor:
    """Packed patches x [n, hidden_size] through all RMSTowerBlocks -> their final norm [n, hidden_size].

    rotary: cos and sin float32 [n, head_dim / 2], half-split. segments: the attention segments of each block.
    """
    layers = cast("list[RMSTowerBlock]", list(blocks))
    normed: Normed = layers[0].attention_norm(x)
    norms = [*(block.attention_norm for block in layers[1:]), final_norm]
    for block, own, next_norm in zip(layers, segments, norms, strict=True):
        normed, x = add_and_norm(block.out, block.attend(normed, rotary, own), x, block.mlp_norm)
        hidden, last = block.mlp.gated(normed), next_norm is final_norm
        normed, x = add_and_norm(block.mlp.down, hidden, x, next_norm, deferrable=not last)
    assert isinstance(normed, Tensor)
    return normed
