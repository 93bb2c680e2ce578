"""Loading Kimi-VL: published files in, encoder and decoder out."""

from __future__ import annotations

import torch

from models.checkpoints.chat_model import VisionChatModel, load_chat_model, loader
from models.checkpoints.checkpoint import Source
from models.kimi_vl.config import load_config
from models.kimi_vl.language import LatentDecoder, decoder_rules
from models.kimi_vl.pictures import load_image_settings
from models.kimi_vl.vision import KimiVisionEncoder, encoder_rules


@loader
@torch.inference_mode()
def load_model(source: Source) -> VisionChatModel[KimiVisionEncoder, LatentDecoder]:
    config = load_config(source.directory)
    images = load_image_settings(source.directory, config.vision)
    model = load_chat_model(
        source,
        lambda: (KimiVisionEncoder(config, images), LatentDecoder(config.text)),
        [*encoder_rules(config.vision, "encoder."), *decoder_rules(config.text)],
        ignore=[
            "language_model.model.layers.{i}.self_attn.rotary_emb.inv_freq",
            "language_model.model.rotary_emb.inv_freq",
        ],
    )
    model.encoder.prepare()
    model.decoder.reorder_rotary_rows()
    return model
