"""Qwen3-VL's networks, and the map from published tensor names to ours."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from models.checkpoint import LoadFormat, Quantization, Rule, holds_tensor, load_parameters, without_memory
from models.decoder import CausalDecoder, DecoderConfig
from models.layers.block import ExpertsConfig, block_rules
from models.qwen3_vl.config import Qwen3VLConfig, TowerConfig, load_config
from models.qwen3_vl.vision import Qwen3VLEncoder

_AN_EXPERT = "model.language_model.layers.0.mlp.experts.0.gate_proj.weight"


class Qwen3VL(nn.Module):
    """models.protocol.ChatModel."""

    def __init__(self, config: Qwen3VLConfig, decoder: DecoderConfig) -> None:
        super().__init__()
        self.encoder = Qwen3VLEncoder(config.tower, config.images)
        self.decoder = CausalDecoder(decoder)


def load_model(
    directory: Path,
    device: torch.device | str,
    dtype: torch.dtype,
    load_format: LoadFormat = "published",
    quantization: Quantization = "none",
) -> Qwen3VL:
    """Raises CheckpointError that names the field or tensor; load_format "random" reads no tensor."""
    config = load_config(directory)
    decoder = decoder_config(config)
    with without_memory():
        model = Qwen3VL(config, decoder)
        if quantization == "fp8":
            model.decoder.hold_in_e4m3()
    # As converters of other tools write them.
    experts_apart = load_format == "published" and holds_tensor(directory, _AN_EXPERT)
    load_parameters(
        model,
        directory,
        [*vision_rules(config.tower), *decoder_rules(decoder, experts_apart=experts_apart)],
        device=torch.device(device),
        dtype=dtype,
        load_format=load_format,
        ignore=["lm_head.weight"] if decoder.tied else [],
    )
    return model


def decoder_config(config: Qwen3VLConfig) -> DecoderConfig:
    sizes = config.experts
    return DecoderConfig.from_published(
        config.text,
        qk_norm=True,
        experts=ExpertsConfig(sizes.count, sizes.top_k, sizes.intermediate_size) if sizes else None,
        feature_levels=len(config.tower.deepstack),
    )


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
        Rule(f"{block}norm1.{{rest}}", f"{our_block}attention_norm.{{rest}}"),
        Rule(f"{block}norm2.{{rest}}", f"{our_block}mlp_norm.{{rest}}"),
        Rule(f"{block}attn.qkv.{{rest}}", f"{our_block}qkv.{{rest}}"),
        Rule(f"{block}attn.proj.{{rest}}", f"{our_block}out.{{rest}}"),
        Rule(f"{block}mlp.linear_{{rest}}", f"{our_block}mlp.{{rest}}"),
    ]
    for merger, our_merger in (("merger.", "merger."), (levels, "deepstack.{i}.")):
        rules += [
            Rule(f"{published}{merger}norm.{{rest}}", f"{ours}{our_merger}norm.{{rest}}"),
            Rule(f"{published}{merger}linear_{{rest}}", f"{ours}{our_merger}mlp.{{rest}}"),
        ]
    return rules


def decoder_rules(config: DecoderConfig, *, experts_apart: bool = False) -> list[Rule]:
    published, ours = "model.language_model.", "decoder."
    return [
        Rule(f"{published}embed_tokens.weight", f"{ours}embed_tokens.weight"),
        Rule(f"{published}embed_tokens.weight", f"{ours}tied_head", again=True),
        *block_rules(config.block, f"{published}layers.{{i}}.", f"{ours}layers.{{i}}.", experts_apart=experts_apart),
        Rule(f"{published}norm.weight", f"{ours}norm.weight"),
        Rule("lm_head.weight", f"{ours}head.weight"),
    ]
