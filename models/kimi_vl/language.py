"""The language model of Kimi-VL: latent attention, a dense first layer, experts in the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from models.interfaces.rule import Rule, renamed
from models.kimi_vl.config import TextConfig
from models.layers.block import NORM_NAMES, expert_rules, swiglu_rules
from models.layers.decoder import TokenDecoder, token_rules
from models.layers.kv_cache import CacheSpec, PagedBatch
from models.layers.mla import LatentAttention, LatentAttentionConfig, half_split_rows
from models.layers.mlp import SwiGLU
from models.layers.moe import Experts, MixtureOfExperts, SigmoidRouter
from models.layers.norms import RMSNorm, add_rms_norm
from models.layers.rope_scaling import Rotary


class LatentBlock(nn.Module):
    """Parameters of x += attention(norm(x)); x += mlp(norm(x)), the mlp dense or a mixture of experts."""

    def __init__(self, config: TextConfig, layer: int) -> None:
        super().__init__()
        hidden_size = config.hidden_size
        self.attention_norm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.attention = LatentAttention(attention_config(config))
        self.mlp_norm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.mlp: nn.Module
        if layer < config.first_k_dense_replace:
            self.mlp = SwiGLU(hidden_size, config.intermediate_size)
        else:
            router = SigmoidRouter(
                hidden_size,
                config.n_routed_experts,
                config.num_experts_per_tok,
                config.routed_scaling_factor,
                normalise=config.norm_topk_prob,
            )
            size, shared_size = config.moe_intermediate_size, config.moe_intermediate_size * config.n_shared_experts
            self.mlp = MixtureOfExperts(
                router, Experts(config.n_routed_experts, hidden_size, size), SwiGLU(hidden_size, shared_size)
            )


class LatentDecoder(TokenDecoder):
    """Packed rows through all layers over a paged cache of latents (models.protocol.Decoder). Capturable."""

    position_axes = 1
    drafter = None

    def __init__(self, config: TextConfig) -> None:
        super().__init__(config.vocab_size, config.hidden_size, config.max_position_embeddings)
        self.config = config
        self.layers = nn.ModuleList(LatentBlock(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = Rotary(config.qk_rope_head_dim, config.rope_theta)

    def cache_specs(self) -> list[CacheSpec]:
        return [attention_config(self.config).cache_spec] * self.config.num_hidden_layers

    def forward(self, hidden: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        """Embeddings [n, hidden_size], positions int64 [1, n] -> normed hidden states [n, hidden_size]."""
        rotary = self.rotary(positions)
        layers = cast("Sequence[LatentBlock]", self.layers)
        norms = [*(layer.attention_norm for layer in layers[1:]), self.norm]
        normed = layers[0].attention_norm(hidden)
        for index, (layer, following) in enumerate(zip(layers, norms, strict=True)):
            attended = layer.attention(normed, rotary, index, batch)
            normed, hidden = add_rms_norm(attended, hidden, layer.mlp_norm.weight, layer.mlp_norm.eps)
            normed, hidden = add_rms_norm(layer.mlp(normed), hidden, following.weight, following.eps)
        return normed

    def reorder_rotary_rows(self) -> None:
        """Permutes rows of q and k: the published order pairs neighbours, ours pairs halves. Scores stay the same."""
        rope = self.config.qk_rope_head_dim
        for layer in self.layers:
            assert isinstance(layer, LatentBlock)
            half_split_rows(layer.attention.q.weight, self.config.qk_nope_head_dim + rope, rope)
            half_split_rows(layer.attention.kv_down.weight, self.config.kv_lora_rank + rope, rope)


def attention_config(config: TextConfig) -> LatentAttentionConfig:
    """The sizes of a layer's attention, which are the same in all layers."""
    return LatentAttentionConfig(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        rank=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        rope_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
    )


def decoder_rules(config: TextConfig) -> list[Rule]:
    """Rules for a LatentDecoder named "decoder"."""
    layer, our_layer = "language_model.model.layers.{i}.", "decoder.layers.{i}."
    inner, projections = config.moe_intermediate_size, {"q_proj": "q", "kv_b_proj": "kv_up", "o_proj": "out"}
    latent = {"kv_a_proj_with_mqa": "kv_down", "kv_a_layernorm": "latent_norm"}
    return [
        *token_rules("language_model.model.", "language_model.lm_head.weight"),
        *renamed(layer, our_layer, NORM_NAMES),
        *renamed(f"{layer}self_attn.", f"{our_layer}attention.", {**projections, **latent}),
        Rule(f"{layer}mlp.gate.weight", f"{our_layer}mlp.router.weight"),
        Rule(f"{layer}mlp.gate.e_score_correction_bias", f"{our_layer}mlp.router.bias"),
        *swiglu_rules(f"{layer}mlp.", f"{our_layer}mlp.", config.intermediate_size),
        *swiglu_rules(f"{layer}mlp.shared_experts.", f"{our_layer}mlp.shared.", inner * config.n_shared_experts),
        *expert_rules(layer, our_layer, inner),
    ]
