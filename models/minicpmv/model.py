"""Loading MiniCPM-V: published files in, encoder and decoder out."""

from __future__ import annotations

import torch

from models.checkpoints.chat_model import VisionChatModel, load_chat_model, loader
from models.checkpoints.checkpoint import Source
from models.checkpoints.tied_head import with_the_files_head
from models.layers.decoder import CausalDecoder, DecoderConfig, decoder_ignored, decoder_rules
from models.minicpmv.config import MiniCPMVConfig, load_config
from models.minicpmv.encoder import MiniCPMVEncoder
from models.minicpmv.resampler import resampler_rules
from models.minicpmv.tower import tower_rules

_LANGUAGE, _HEAD = "llm.model.", "llm.lm_head.weight"
"""Prefix of the language model's tensors, and its head."""


@loader
@torch.inference_mode()
def load_model(source: Source) -> VisionChatModel[MiniCPMVEncoder, CausalDecoder]:
    config = load_config(source.directory)
    tables = [f"{_LANGUAGE}embed_tokens.weight"]
    decoder = with_the_files_head(decoder_config(config), source, head=_HEAD, embeddings=tables)
    model = load_chat_model(
        source,
        lambda: (MiniCPMVEncoder(config), CausalDecoder(decoder)),
        [
            *tower_rules(config.vision, "encoder.tower."),
            *resampler_rules("encoder.resampler."),
            *decoder_rules(decoder, published=_LANGUAGE, head=_HEAD),
        ],
        ignore=decoder_ignored(decoder, published=_LANGUAGE, head=_HEAD),
    )
    model.encoder.prepare()
    return model


def decoder_config(config: MiniCPMVConfig) -> DecoderConfig:
    """2.5 and 4.0 are plain Llama, 2.6 is Qwen2 (biases on q, k and v), 4.5 is Qwen3 (norms on q and k)."""
    return DecoderConfig.from_published(config.text, qkv_bias=config.version == "2.6", qk_norm=config.version == "4.5")
