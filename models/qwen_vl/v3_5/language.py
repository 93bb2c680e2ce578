"""The language model of Qwen3.5: Gated DeltaNet in most layers, gated attention in the others, and behind each a SwiGLU
or a mixture of experts. A drafter of one more layer predicts the token after the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from models.interfaces.capturable import BufferSpec
from models.interfaces.rule import Rule, renamed
from models.layers.block import ExpertLayout, add_and_norm, block_rules, swiglu_rules
from models.layers.decoder import DecoderConfig, TokenDecoder, token_rules
from models.layers.gated_attention import GatedAttention
from models.layers.gated_delta import CONV_WIDTH, GatedDeltaConfig, GatedDeltaNet
from models.layers.gemm import gemm
from models.layers.kv_cache import CacheSpec, PagedBatch
from models.layers.mlp import SwiGLU
from models.layers.moe import Experts, MixtureOfExperts, SoftmaxRouter
from models.layers.norms import Normed, RMSNorm, add_rms_norm
from models.layers.rope_scaling import Rotary


@dataclass(frozen=True)
class HybridConfig:
    """decoder: the fields that a CausalDecoder has, too. full: for each layer, whether it has attention instead of the
    delta rule. rotary_dim: number of leading values of a head that are rotated. shared_size: width of the shared
    expert. drafter: whether the decoder has one."""

    decoder: DecoderConfig
    full: tuple[bool, ...]
    delta: GatedDeltaConfig
    rotary_dim: int
    shared_size: int = 0
    drafter: bool = False


class HybridBlock(nn.Module):
    """x += mixer(norm(x)); x += mlp(norm(x)), where the mixer is `attention` or `delta`."""

    def __init__(self, config: HybridConfig, *, full: bool) -> None:
        super().__init__()
        block = config.decoder.block
        width, experts = block.hidden_size, block.experts
        self.attention_norm = RMSNorm(width, block.norm_eps, float32=True)
        self.attention: GatedAttention | None = None
        self.delta: GatedDeltaNet | None = None
        if full:
            self.attention = GatedAttention(width, block.num_heads, block.num_kv_heads, block.head_dim, block.norm_eps)
        else:
            self.delta = GatedDeltaNet(config.delta)
        self.mlp_norm = RMSNorm(width, block.norm_eps, float32=True)
        self.mlp: SwiGLU | MixtureOfExperts
        if experts is None:
            self.mlp = SwiGLU(width, block.intermediate_size)
        else:
            self.mlp = MixtureOfExperts(
                SoftmaxRouter(width, experts.count, experts.top_k),
                Experts(experts.count, width, experts.intermediate_size),
                SwiGLU(width, config.shared_size),
                nn.Linear(width, 1, bias=False),
            )

    def forward(
        self,
        normed: Normed,
        x: Tensor,
        following: RMSNorm,
        rotary: tuple[Tensor, Tensor],
        index: int,
        batch: PagedBatch,
    ) -> tuple[Normed, Tensor]:
        """x [n, hidden_size] and attention_norm of it -> (following of the output, the output). index: into
        batch.caches, or batch.states.layers."""
        if self.attention is not None:
            mixed, out = self.attention(normed, rotary, index, batch), self.attention.out
        else:
            assert self.delta is not None
            mixed, out = self.delta(normed, index, batch), self.delta.out
        # Weights of norms are float32, which a GEMM that made the norm would read for each of its programs.
        normed, x = add_and_norm(out, mixed, x, self.mlp_norm, deferrable=False)
        if isinstance(self.mlp, SwiGLU):
            return add_and_norm(self.mlp.down, self.mlp.gated(normed), x, following, deferrable=False)
        assert isinstance(normed, Tensor)
        return add_rms_norm(self.mlp(normed), x, following.weight, following.eps)


class Drafter(nn.Module):
    """Multi-token prediction (arXiv:2404.19737): row i, made of the hidden state of token i and the embedding of token
    i + 1, predicts token i + 2. Implements models.protocol.Drafter.

    Its keys are the last layer of the cache, in the KV slot of token i, so it takes the batches of the decoder.
    """

    def __init__(self, config: HybridConfig, rotary: Rotary) -> None:
        super().__init__()
        width, eps = config.decoder.block.hidden_size, config.decoder.block.norm_eps
        self.embedding_norm = RMSNorm(width, eps, float32=True)
        self.hidden_norm = RMSNorm(width, eps, float32=True)
        self.joined = nn.Linear(2 * width, width, bias=False)
        self.layer = HybridBlock(config, full=True)
        self.norm = RMSNorm(width, eps, float32=True)
        self.rotary, self.cache = rotary, sum(config.full)

    def forward(self, hidden: Tensor, embeddings: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        normed, x = self._inputs(hidden, embeddings)
        out, _ = self.layer(normed, x, self.norm, self.rotary(positions), self.cache, batch)
        assert isinstance(out, Tensor)
        return out

    def cache_keys(self, hidden: Tensor, embeddings: Tensor, positions: Tensor, batch: PagedBatch) -> None:
        assert self.layer.attention is not None
        normed, _ = self._inputs(hidden, embeddings)
        self.layer.attention.cache_keys(normed, self.rotary(positions), self.cache, batch)

    def _inputs(self, hidden: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat((self.embedding_norm(embeddings), self.hidden_norm(hidden)), dim=-1)
        x = gemm(both, self.joined.weight)
        return self.layer.attention_norm(x), x


class HybridDecoder(TokenDecoder):
    """Packed rows through all layers, over a paged cache and rows of recurrent state (models.protocol.Decoder).
    Capturable."""

    def __init__(self, config: HybridConfig) -> None:
        decoder = config.decoder
        super().__init__(decoder.vocab_size, decoder.block.hidden_size, decoder.max_positions)
        self.config = config
        self.position_axes = len(decoder.mrope_section)
        self.layers = nn.ModuleList(HybridBlock(config, full=full) for full in config.full)
        self.norm = RMSNorm(self.hidden_size, decoder.block.norm_eps, float32=True)
        self.head = None if decoder.tied else nn.Linear(self.hidden_size, self.vocab_size, bias=False)
        self.rotary = Rotary(
            config.rotary_dim, decoder.rope_theta, decoder.scaling, decoder.mrope_section, interleaved=True
        )
        self.drafter = Drafter(config, self.rotary) if config.drafter else None

    def cache_specs(self) -> list[CacheSpec]:
        row = (self.config.decoder.block.num_kv_heads, self.config.decoder.block.head_dim)
        return [CacheSpec({"k": row, "v": row})] * (sum(self.config.full) + self.config.drafter)

    def state_specs(self) -> list[Mapping[str, BufferSpec]]:
        return [self.config.delta.state_spec(self.embed_tokens.weight.dtype)] * self.config.full.count(False)

    def pending_specs(self, tokens: int) -> list[Mapping[str, BufferSpec]]:
        spec = self.config.delta.pending_spec(tokens, self.embed_tokens.weight.dtype)
        return [spec] * self.config.full.count(False)

    def forward(self, hidden: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        """Embeddings [n, hidden_size], positions int64 [3, n] -> normed hidden states [n, hidden_size]."""
        rotary = self.rotary(positions)
        layers = cast("Sequence[HybridBlock]", self.layers)
        norms = [*(layer.attention_norm for layer in layers[1:]), self.norm]
        normed: Normed = layers[0].attention_norm(hidden)
        for number, (layer, following) in enumerate(zip(layers, norms, strict=True)):
            index = self.config.full[:number].count(self.config.full[number])
            normed, hidden = layer(normed, hidden, following, rotary, index, batch)
        assert isinstance(normed, Tensor)
        return normed

    def shift_norms(self) -> None:
        """Adds 1 to the weights of all norms of rows and heads, which are published as their difference from 1."""
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.weight.add_(1)


def hybrid_rules(config: HybridConfig, layout: ExpertLayout) -> list[Rule]:
    """Rules for a HybridDecoder named "decoder"."""
    published = "model.language_model."
    layer, our_layer, delta = f"{published}layers.{{i}}.", "decoder.layers.{i}.", config.delta
    linear, our_linear = f"{layer}linear_attn.", f"{our_layer}delta."
    inner, heads = delta.value_heads * delta.value_dim, delta.value_heads
    return [
        *token_rules(published, "lm_head.weight"),
        *layer_rules(config, layer, our_layer, layout),
        Rule(f"{linear}in_proj_qkv.weight", f"{our_linear}in_qkvz.weight", rows=(0, delta.channels)),
        Rule(f"{linear}in_proj_z.weight", f"{our_linear}in_qkvz.weight", rows=(delta.channels, delta.channels + inner)),
        Rule(f"{linear}in_proj_b.weight", f"{our_linear}in_ba.weight", rows=(0, heads)),
        Rule(f"{linear}in_proj_a.weight", f"{our_linear}in_ba.weight", rows=(heads, 2 * heads)),
        Rule(f"{linear}conv1d.weight", f"{our_linear}conv", shape=(delta.channels, 1, CONV_WIDTH)),
        Rule(f"{linear}A_log", f"{our_linear}A_log"),
        Rule(f"{linear}dt_bias", f"{our_linear}dt_bias"),
        Rule(f"{linear}norm.weight", f"{our_linear}norm"),
        Rule(f"{linear}out_proj.weight", f"{our_linear}out.weight"),
    ]


def drafter_rules(config: HybridConfig, layout: ExpertLayout) -> list[Rule]:
    """Rules for the drafter of a HybridDecoder named "decoder"."""
    published, ours = "mtp.", "decoder.drafter."
    return [
        *renamed(published, ours, {"pre_fc_norm_embedding": "embedding_norm", "pre_fc_norm_hidden": "hidden_norm"}),
        *renamed(published, ours, {"fc": "joined", "norm": "norm"}),
        *layer_rules(config, f"{published}layers.0.", f"{ours}layer.", layout),
    ]


def layer_rules(config: HybridConfig, published: str, ours: str, layout: ExpertLayout) -> list[Rule]:
    """Rules for a layer without its delta rule. Each query head's rows are followed by those of its gate."""
    block = replace(config.decoder.block, num_heads=2 * config.decoder.block.num_heads)
    return [
        *block_rules(block, published, ours, experts=layout),
        *swiglu_rules(f"{published}mlp.shared_expert.", f"{ours}mlp.shared.", config.shared_size),
        Rule(f"{published}mlp.shared_expert_gate.weight", f"{ours}mlp.shared_gate.weight"),
    ]
