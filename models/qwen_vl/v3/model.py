"""Qwen3-VL's networks, and the map from published tensor names to ours."""

from __future__ import annotations

from pathlib import Path

from models.checkpoints.chat_model import VisionChatModel, load_chat_model, loader
from models.checkpoints.checkpoint import Source
from models.checkpoints.tied_head import with_the_files_head
from models.checkpoints.weight_files import WEIGHT_NAMES, tensor_shape
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
    layout = expert_layout(source.directory, decoder) if source.load_format == "published" else "published"
    return load_chat_model(
        source,
        lambda: (Qwen3VLEncoder(config.tower, config.images), CausalDecoder(decoder)),
        [*vision_rules(config.tower), *decoder_rules(decoder, published=LANGUAGE, experts=layout)],
        ignore=["lm_head.weight"] if decoder.tied else [],
    )


def decoder_config(config: Qwen3VLConfig) -> DecoderConfig:
    sizes = config.experts
    return DecoderConfig.from_published(
        config.text,
        qk_norm=True,
        experts=ExpertsConfig(sizes.count, sizes.top_k, sizes.intermediate_size) if sizes else None,
        dense_layers=sizes.dense_layers if sizes else frozenset(),
        feature_levels=len(config.tower.deepstack),
    )


def expert_layout(directory: Path, decoder: DecoderConfig) -> ExpertLayout:
    """The layout, by the names or the shapes of a layer's experts: published and saved tensors have the same names, and
    of their two shapes at most one is square."""
    sizes, hidden = decoder.block.experts, decoder.block.hidden_size
    if sizes is None:
        return "published"
    layer = next(layer for layer in range(decoder.num_layers) if layer not in decoder.dense_layers)
    prefix = f"{LANGUAGE}layers.{layer}.mlp.experts."
    if tensor_shape(directory, *(f"{prefix}0.gate_proj.{codes}" for codes in WEIGHT_NAMES)) is not None:
        return "apart"  # as quantised files and converters of other tools have them
    saved = {"gate_up_proj": (2 * sizes.intermediate_size, hidden), "down_proj": (hidden, sizes.intermediate_size)}
    for name, (rows, columns) in saved.items():
        if rows != columns and tensor_shape(directory, f"{prefix}{name}") == (sizes.count, rows, columns):
            return "saved"
    return "published"


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
