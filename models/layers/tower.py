"""The pre-norm block of the vision towers: LayerNorm, attention inside packed segments, two linears around a GELU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

from torch import Tensor, nn

from models.layers.dense_segments import attend_packed
from models.layers.mlp import MLP, Activation
from models.layers.packed import add_layer_norm, layer_norm

_LONG_SEGMENT = 16384
"""Patches. No captured pass has longer segments: one picture of more patches cannot be cut, and passes over the planned
workspace."""
_ROWS_AT_A_TIME = 8192


class TowerBlock(nn.Module):
    """Parameters of x += out(attention(norm(x))); x += mlp(norm(x)); qkv holds the rows of q, then k, then v."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_heads: int, activation: Activation, norm_eps: float
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(hidden_size, eps=norm_eps)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)
        self.mlp_norm = nn.LayerNorm(hidden_size, eps=norm_eps)
        self.mlp = MLP(hidden_size, intermediate_size, activation)


def run_tower(
    blocks: Iterable[nn.Module],
    x: Tensor,
    final_norm: nn.LayerNorm,
    rotary: tuple[Tensor, Tensor] | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    after: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """Runs packed patches x [n, hidden_size] through TowerBlocks and the final norm -> [n, hidden_size]. Overwrites x.
    Every residual sum is computed together with the norm that reads it.

    rotary: cos and sin float32 [n, head_dim / 2], half-split; None: no rotation.
    cu_seqlens: int32 [segments + 1]; None: the rows are segments of exactly max_seqlen rows.
    max_seqlen: upper bound on the longest segment.
    after: called with each block's number and output [n, hidden_size], which the next block overwrites.
    """
    layers = cast("list[TowerBlock]", list(blocks))
    norms = [*(block.attention_norm for block in layers[1:]), final_norm]
    normed = layer_norm(x, layers[0].attention_norm)
    for index, (block, following) in enumerate(zip(layers, norms, strict=True)):
        # What has been read is given up at once: the largest pictures take the memory of a whole pass.
        qkv = block.qkv(normed).unflatten(-1, (3 * block.num_heads, -1))
        del normed
        attended = attend_packed(qkv, rotary, cu_seqlens, max_seqlen).flatten(-2)
        del qkv
        normed = add_layer_norm(block.out(attended), x, block.mlp_norm)
        del attended
        normed = add_layer_norm(_mlp(block, normed, max_seqlen), x, following)
        if after is not None:
            after(index, x)
    return normed


def _mlp(block: TowerBlock, normed: Tensor, max_seqlen: int) -> Tensor:
    """block.mlp(normed), in parts where a segment is so long, so that the inner rows of one part are there at a time.
    Overwrites normed."""
    if max_seqlen <= _LONG_SEGMENT:
        return block.mlp(normed)
    for rows in normed.split(_ROWS_AT_A_TIME):
        rows.copy_(block.mlp(rows))
    return normed
