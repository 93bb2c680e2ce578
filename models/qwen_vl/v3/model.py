"""Qwen3-VL's networks, and the map from published tensor names to ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.checkpoints.chat_model import VisionChatModel, load_chat_model, loader
from models.checkpoints.checkpoint import Source
from models.checkpoints.tied_head import with_the_files_head
from models.checkpoints.weight_files import WEIGHT_NAMES, tensor_shape
from models.interfaces.errors import CheckpointError
from models.interfaces.rule import Rule, renamed
from models.layers.block import ExpertLayout, ExpertsConfig
from models.layers.decoder import CausalDecoder, DecoderConfig, decoder_rules
from models.qwen_vl.model import BLOCK_NAMES
from models.qwen_vl.v3.config import Qwen3VLConfig, TowerConfig, load_config
from models.qwen_vl.v3.vision import Qwen3VLEncoder

LANGUAGE = "model.language_model."
"""Prefix of the language model's tensors."""


@loader
def load_model(source: Source) -> VisionChatModel[Qwen3VLEncoder, CausalDecoder]:
    config = load_config(source.directory)
    decoder = with_the_files_head(decoder_config(config), source)
    layout: ExpertLayout = "apart" if experts_apart(source, f"{LANGUAGE}layers.") else "published"
    experts, stored = decoder.block.experts, source.load_format == "published" and layout == "published"
    if stored and experts is not None and decoder.block.hidden_size / experts.intermediate_size in (1, 2):
        # Their shape would not tell published files, whose matrices are transposed, from those of transformers 5.
        raise CheckpointError("config.json: text_config.moe_intermediate_size makes square matrices, not supported")
    return load_chat_model(
        source,
        lambda: (Qwen3VLEncoder(config.tower, config.images), CausalDecoder(decoder)),
        [*vision_rules(config.tower), *decoder_rules(decoder, published=LANGUAGE, experts=layout)],
        ignore=["lm_head.weight"] if decoder.tied else [],
    )


def decoder_config(config: Qwen3VLConfig) -> DecoderConfig:
    text, levels = config.text, len(config.tower.deepstack)
    return DecoderConfig.from_published(text, qk_norm=True, experts=experts_of(text), feature_levels=levels)


def experts_of(text: Mapping[str, Any]) -> ExpertsConfig | None:
    """The mixture that a text_config describes."""
    if text.get("num_experts") is None:
        return None
    return ExpertsConfig(text["num_experts"], text["num_experts_per_tok"], text["moe_intermediate_size"])


def experts_apart(source: Source, layers: str) -> bool:
    """Whether each matrix of an expert is a tensor, as in quantised files and in those of other tools' converters.
    layers: prefix of the layers' tensors."""
    first = [f"{layers}0.mlp.experts.0.gate_proj.{name}" for name in WEIGHT_NAMES]
    return source.load_format == "published" and tensor_shape(source.directory, *first) is not None


def vision_rules(config: TowerConfig) -> list[Rule]:
    vision = config.vision
    published, ours, levels = "model.visual.", "encoder.", "deepstack_merger_list.{i}."
    block, our_block = f"{published}blocks.{{i}}.", f"{ours}blocks.{{i}}."
    rules = [
        Rule(
            f"{published}patch_embed.proj.weight",
            f"{ours}patch_embed.weight",
            shape=(vision.hidden_size, *vision.patch_shape),
        ),
        Rule(f"{published}patch_embed.proj.bias", f"{ours}patch_embed.bias"),
        Rule(f"{published}pos_embed.weight", f"{ours}position_table"),
        *renamed(block, our_block, BLOCK_NAMES),
        Rule(f"{block}mlp.linear_{{rest}}", f"{our_block}mlp.{{rest}}"),
    ]
    for merger, our_merger in (("merger.", "merger."), (levels, "deepstack.{i}.")):
        rules += [
            Rule(f"{published}{merger}norm.{{rest}}", f"{ours}{our_merger}norm.{{rest}}"),
            Rule(f"{published}{merger}linear_{{rest}}", f"{ours}{our_merger}mlp.{{rest}}"),
        ]
    return rules
