"""The transformer stack that VoxCPM2 uses four times: twice causal over a cache, twice bidirectional over one patch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from models.layers.block import Block, BlockConfig, SelfAttention, add_norm, add_norm_for_product
from models.layers.fused import Unscaled, linear, linear_silu_mul, rms_norm, rotary_dense_attention
from models.layers.norms import RMSNorm
from models.voxcpm2.config import LanguageModelConfig, LocalConfig

Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""q [..., n, heads, head_dim], k and v [..., n, kv_heads, head_dim], layer number -> like q."""


class Stack(nn.Module):
    """Pre-norm blocks and a final norm."""

    def __init__(self, config: BlockConfig, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(config) for _ in range(num_layers))
        self.norm = RMSNorm(config.width, config.norm_eps)

    def blocks(self) -> Sequence[Block]:
        return cast("Sequence[Block]", self.layers)

    def forward(self, x: Tensor, attend: Attend, keep: slice | None = None) -> Tensor:
        """[..., n, width] -> like x, or its rows `keep` alone: the last layer then reads every row but computes
        queries, output and MLP of the kept ones only."""
        layers = self.blocks()
        first, last = layers[0].attention_norm, len(layers) - 1
        normed: Tensor | Unscaled = rms_norm(x, first.weight, first.eps)
        for index, layer in enumerate(layers):
            q, k, v = _project(layer.attention, normed, keep if index == last else None)
            attended = attend(q, k, v, index).flatten(-2)
            if keep is not None and index == last:
                x = x[..., keep, :]
            normed, x = add_norm_for_product(layer.attention.out, attended, x, layer.mlp_norm)
            hidden = linear_silu_mul(normed, layer.mlp.gate_up.weight)
            if index < last:
                # Rows that are cut need their norm at once.
                add = add_norm if keep is not None and index + 1 == last else add_norm_for_product
                normed, x = add(layer.mlp.down, hidden, x, layers[index + 1].attention_norm)
        return add_norm(layers[-1].mlp.down, hidden, x, self.norm)[0]


def _project(attention: SelfAttention, x: Tensor | Unscaled, keep: slice | None) -> tuple[Tensor, Tensor, Tensor]:
    config = attention.config
    if keep is None:
        heads = linear(x, attention.qkv.weight, attention.qkv.bias).unflatten(-1, (-1, config.head_dim))
        return heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=-2)
    assert isinstance(x, Tensor)
    q_weight, kv_weight = attention.qkv.weight.tensor_split((config.num_heads * config.head_dim,))
    q = linear(x[..., keep, :], q_weight, None).unflatten(-1, (-1, config.head_dim))
    k, v = linear(x, kv_weight, None).unflatten(-1, (-1, config.head_dim)).chunk(2, dim=-2)
    return q, k, v


class LocalStack(nn.Module):
    """Bidirectional stack over N sequences of `length` tokens; returns the tokens from `first_kept` to before
    `end_kept`, [N, kept, width]."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        config: LocalConfig,
        lm: LanguageModelConfig,
        length: int,
        dtype: torch.dtype,
        *,
        first_kept: int,
        end_kept: int,
    ) -> None:
        super().__init__()
        self.stack = Stack(local_block(config, lm), config.num_layers)
        self.length = length
        self.kept = slice(first_kept, end_kept)
        cos, sin = longrope_table(lm, length, dtype)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.stack(tokens, self._attend, self.kept)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        first_query = 0 if q.shape[1] == self.length else self.kept.start
        return rotary_dense_attention(q, k, v, self.cos, self.sin, first_query=first_query)


def language_block(config: LanguageModelConfig) -> BlockConfig:
    return BlockConfig(
        width=config.hidden_size,
        inner_width=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.kv_channels,
        norm_eps=config.rms_norm_eps,
    )


def local_block(config: LocalConfig, lm: LanguageModelConfig) -> BlockConfig:
    return BlockConfig(
        width=config.hidden_dim,
        inner_width=config.ffn_dim,
        num_heads=config.num_heads,
        num_kv_heads=lm.num_key_value_heads,
        head_dim=config.kv_channels,
        norm_eps=lm.rms_norm_eps,
    )


def longrope_table(config: LanguageModelConfig, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0..length - 1, float32 [length, head_dim / 2], rounded to `dtype`.

    The published loader casts its tables with the weights, so a bfloat16 model rotates by bfloat16-rounded values.
    LongRoPE (arXiv:2402.13753) in the published order of operations.
    """
    rope = config.rope_scaling
    stretch = config.max_position_embeddings / rope.original_max_position_embeddings
    factors = torch.tensor(rope.long_factor if stretch > 1 else rope.short_factor, device="cpu")
    exponents = torch.arange(0, config.kv_channels, 2, dtype=torch.float32, device="cpu") / config.kv_channels
    positions = torch.arange(length, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, 1.0 / factors) * (1.0 / config.rope_theta**exponents)
    scale = math.sqrt(1 + math.log(stretch) / math.log(rope.original_max_position_embeddings)) if stretch > 1 else 1.0
    return (angles.cos() * scale).to(dtype).float(), (angles.sin() * scale).to(dtype).float()
