"""Qwen2-VL's networks, and the map from published tensor names to ours."""

from __future__ import annotations

from pathlib import Path

import torch

from models.checkpoints.chat_model import VisionChatModel, load_chat_model
from models.checkpoints.checkpoint import LoadFormat, Quantization
from models.checkpoints.tied_head import with_the_files_head
from models.interfaces.rule import Rule, renamed
from models.layers.decoder import CausalDecoder, DecoderConfig, decoder_ignored, decoder_rules
from models.qwen_vl.config import VisionConfig, load_config
from models.qwen_vl.vision import Qwen2VLEncoder

ALIASES = (
    ("model.visual.", "visual."),
    ("model.language_model.", "model."),
)
"""Names of parameters in transformers 5, which some tools save unchanged."""
BLOCK_NAMES = {"norm1": "attention_norm", "norm2": "mlp_norm", "attn.qkv": "qkv", "attn.proj": "out"}
"""Modules of a tower's block: published, and ours."""


def load_model(
    directory: Path,
    device: torch.device | str,
    dtype: torch.dtype,
    load_format: LoadFormat = "published",
    quantization: Quantization = "none",
) -> VisionChatModel[Qwen2VLEncoder, CausalDecoder]:
    """Raises CheckpointError that names the field or tensor; load_format "random" reads no tensor."""
    config = load_config(directory)
    decoder = DecoderConfig.from_published(config.text, qkv_bias=True)
    decoder = with_the_files_head(decoder, directory, device, load_format)
    return load_chat_model(
        lambda: (Qwen2VLEncoder(config.vision, config.images), CausalDecoder(decoder)),
        [*vision_rules(config.vision), *decoder_rules(decoder)],
        *(directory, device, dtype, load_format, quantization),
        aliases=ALIASES,
        ignore=["visual.rotary_pos_emb.inv_freq", *decoder_ignored(decoder)],
    )


def vision_rules(config: VisionConfig) -> list[Rule]:
    return [*shared_rules(config), Rule("visual.blocks.{i}.mlp.{rest}", "encoder.blocks.{i}.mlp.{rest}")]


def shared_rules(config: VisionConfig) -> list[Rule]:
    """Those of the tower and merger but the MLPs of the blocks, which Qwen2.5-VL's have, too."""
    return [
        Rule(
            "visual.patch_embed.proj.weight",
            "encoder.patch_embed.weight",
            shape=(config.hidden_size, *config.patch_shape),
        ),
        *renamed("visual.blocks.{i}.", "encoder.blocks.{i}.", BLOCK_NAMES),
        *renamed("visual.merger.", "encoder.merger.", {"ln_q": "norm", "mlp.0": "mlp.fc1", "mlp.2": "mlp.fc2"}),
    ]
