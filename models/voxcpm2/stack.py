"""The transformer stack that VoxCPM2 uses four times: twice causal over a cache, twice bidirectional over one patch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from models.layers.block import Attend, Block, BlockConfig, run_blocks
from models.layers.fused import rotary_dense_attention
from models.layers.lora import StackLora
from models.layers.norms import RMSNorm
from models.layers.rotary import inverse_frequencies
from models.voxcpm2.config import LanguageModelConfig, LocalConfig
from models.voxcpm2.host_stack import run_local_host


class Stack(nn.Module):
    """Pre-norm blocks and a final norm."""

    def __init__(self, config: BlockConfig, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(config) for _ in range(num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def blocks(self) -> Sequence[Block]:
        return cast("Sequence[Block]", self.layers)

    def forward(
        self,
        x: Tensor,
        attend: Attend,
        keep: slice | None = None,
        *,
        first_norm: Tensor | None = None,
        lora: StackLora | None = None,
    ) -> Tensor:
        """[..., n, hidden_size] -> like x, or its rows `keep` alone. first_norm, lora: as run_blocks takes them."""
        return run_blocks(self.blocks(), x, self.norm, attend, keep, first_norm=first_norm, lora=lora)


class LocalStack(nn.Module):
    """Bidirectional stack over N sequences of `length` tokens; returns the tokens `kept`, [N, kept, hidden_size]."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self, config: LocalConfig, lm: LanguageModelConfig, length: int, dtype: torch.dtype, kept: slice
    ) -> None:
        super().__init__()
        self.stack = Stack(local_block(config, lm), config.num_layers)
        self.length, self.kept = length, kept
        cos, sin = longrope_table(lm, length, dtype)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @property
    def first_norm(self) -> RMSNorm:
        """The norm that the tokens enter by."""
        return self.stack.blocks()[0].attention_norm

    def forward(self, tokens: Tensor, normed: Tensor | None = None, lora: StackLora | None = None) -> Tensor:
        """normed: first_norm of the tokens, from a caller that has it."""
        if tokens.device.type == "cpu" and tokens.dtype == torch.float32:
            return run_local_host(
                self.stack.blocks(), self.stack.norm, tokens, normed, self.cos, self.sin, self.kept, lora
            )
        return self.stack(tokens, self._attend, self.kept, first_norm=normed, lora=lora)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        first_query = 0 if q.shape[1] == self.length else self.kept.start
        return rotary_dense_attention(q, k, v, self.cos, self.sin, first_query=first_query)


def language_block(config: LanguageModelConfig) -> BlockConfig:
    """A block of the text-semantic or of the residual model."""
    return BlockConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.kv_channels,
        norm_eps=config.rms_norm_eps,
    )


def local_block(config: LocalConfig, lm: LanguageModelConfig) -> BlockConfig:
    """A block of LocEnc or LocDiT."""
    return BlockConfig(
        hidden_size=config.hidden_dim,
        intermediate_size=config.ffn_dim,
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
    positions = torch.arange(length, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, 1.0 / factors) * inverse_frequencies(config.kv_channels, config.rope_theta)
    # Below 1 where the table is shorter than the original one: the published code does not ask, unlike transformers.
    scale = math.sqrt(1 + math.log(stretch) / math.log(rope.original_max_position_embeddings))
    return (angles.cos() * scale).to(dtype).float(), (angles.sin() * scale).to(dtype).float()
