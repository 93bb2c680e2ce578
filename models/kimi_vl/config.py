"""The published config.json of Kimi-VL-A3B-Instruct and the Thinking models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from models.checkpoints.published import check_heads, read_config, require_fields, section_as, section_of
from models.interfaces.errors import CheckpointError
from models.layers.rope_field import rope_field


@dataclass(frozen=True)
class VisionConfig:
    """MoonViT. Head dim is hidden_size / num_attention_heads; all norms use eps 1e-5."""

    patch_size: int
    num_attention_heads: int
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    init_pos_emb_height: int
    init_pos_emb_width: int
    merge_kernel_size: tuple[int, int]

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def patch_values(self) -> int:
        return 3 * self.patch_size**2

    @property
    def merged_patches(self) -> int:
        return self.merge_kernel_size[0] * self.merge_kernel_size[1]


@dataclass(frozen=True)
class TextConfig:
    """Latent attention without query down-projection, sigmoid-routed experts after the first dense layers."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    first_k_dense_replace: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    eos_token_id: int | list[int] | None = None


@dataclass(frozen=True)
class KimiVLConfig:
    """The sections and fields of config.json that are used."""

    vision: VisionConfig
    text: TextConfig
    media_placeholder_token_id: int


_REQUIRED_TEXT = {
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "rope_interleave": True,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
"""Fields of which other values would need other networks. One that is absent has this value."""


def load_config(directory: Path) -> KimiVLConfig:
    """CheckpointError names a field that is missing or describes an unsupported network."""
    config, where = read_config(directory), f"{directory}: config.json"
    text, vision = section_of(config, "text_config"), section_of(config, "vision_config")
    require_fields(f"{where}: text_config.", text, _REQUIRED_TEXT)
    name, rope = rope_field(text)  # transformers 5 writes rope_parameters
    if (rope.get("rope_type") or rope.get("type") or "default") != "default":
        raise CheckpointError(f"{where}: text_config.{name} is {rope!r}, expected no scaling")
    text["rope_theta"] = rope.get("rope_theta") or text.get("rope_theta")
    require_fields(f"{where}: vision_config.", vision, {"merge_kernel_size": [2, 2]}, needed=True)
    if "media_placeholder_token_id" not in config:
        raise CheckpointError(f"{where}: media_placeholder_token_id is missing")
    tower = section_as(VisionConfig, vision, f"{where}: vision_config")
    check_heads(tower.hidden_size, tower.num_attention_heads, ("hidden_size", "num_attention_heads"))
    return KimiVLConfig(
        vision=tower,
        text=section_as(TextConfig, text, f"{where}: text_config"),
        media_placeholder_token_id=config["media_placeholder_token_id"],
    )
