"""Qwen3.5's networks, and the map from published tensor names to ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from models.checkpoints.chat_model import E, VisionChatModel, load_chat_model, loader
from models.checkpoints.checkpoint import Source
from models.checkpoints.tied_head import with_the_files_head
from models.checkpoints.weight_files import tensor_shape
from models.interfaces.rule import Rule
from models.layers.block import ExpertLayout
from models.layers.decoder import DecoderConfig
from models.layers.gated_delta import GatedDeltaConfig
from models.layers.rope_field import rope_field
from models.qwen_vl.v3.config import load_config
from models.qwen_vl.v3.model import LANGUAGE, experts_apart, experts_of, vision_rules
from models.qwen_vl.v3.vision import Qwen3VLEncoder
from models.qwen_vl.v3_5.config import FULL
from models.qwen_vl.v3_5.language import HybridConfig, HybridDecoder, drafter_rules, hybrid_rules


@loader
def load_model(source: Source, *, drafter: bool = False) -> VisionChatModel[Qwen3VLEncoder, HybridDecoder]:
    """drafter: loads the drafter, too, unless the files have none; some tools leave it out."""
    config = load_config(source.directory)
    encoder = partial(Qwen3VLEncoder, config.tower, config.images)
    return load_hybrid(source, encoder, vision_rules(config.tower), config.text, drafter=drafter)


def load_hybrid(
    source: Source,
    encoder: Callable[[], E],
    encoder_rules: Sequence[Rule],
    text: Mapping[str, Any],
    *,
    drafter: bool = False,
) -> VisionChatModel[E, HybridDecoder]:
    """load_model of an encoder over this language model. text: as of hybrid_config."""
    drafter &= source.load_format == "random" or tensor_shape(source.directory, "mtp.fc.weight") is not None
    hybrid = replace(hybrid_config(text), drafter=drafter)
    hybrid = replace(hybrid, decoder=with_the_files_head(hybrid.decoder, source))
    layers, draft_layers = (_expert_layout(source, prefix) for prefix in (f"{LANGUAGE}layers.", "mtp.layers."))
    model = load_chat_model(
        source,
        lambda: (encoder(), HybridDecoder(hybrid)),
        [*encoder_rules, *hybrid_rules(hybrid, layers), *drafter_rules(hybrid, draft_layers)],
        ignore=[*([] if drafter else draft_tensors(hybrid)), *(["lm_head.weight"] if hybrid.decoder.tied else [])],
    )
    if source.load_format == "published":
        model.decoder.shift_norms()
    return model


def _expert_layout(source: Source, layers: str) -> ExpertLayout:
    return "apart" if experts_apart(source, layers) else "saved"


def hybrid_config(text: Mapping[str, Any]) -> HybridConfig:
    """text: as of models.qwen_vl.v3_5.config.text_fields."""
    decoder = DecoderConfig.from_published(text, qk_norm=True, experts=experts_of(text))
    _, rope = rope_field(text)
    share = rope.get("partial_rotary_factor") or text.get("partial_rotary_factor") or 0.25
    return HybridConfig(
        decoder=decoder,
        full=tuple(kind == FULL for kind in text["layer_types"]),
        delta=GatedDeltaConfig(
            hidden_size=decoder.block.hidden_size,
            key_heads=text["linear_num_key_heads"],
            value_heads=text["linear_num_value_heads"],
            key_dim=text["linear_key_head_dim"],
            value_dim=text["linear_value_head_dim"],
            norm_eps=decoder.block.norm_eps,
        ),
        rotary_dim=int(decoder.block.head_dim * share),
        shared_size=text.get("shared_expert_intermediate_size") or 0,
    )


def draft_tensors(config: HybridConfig) -> list[str]:
    """Names of the drafter's tensors, whatever the number of its layers, for models that run without."""
    layouts: list[ExpertLayout] = ["saved", "apart"]
    names = [rule.published for layout in layouts for rule in drafter_rules(config, layout)]
    return [name.replace("mtp.layers.0.", "mtp.layers.{i}.") for name in names]
