"""Loading Kimi-VL: published files in, encoder and decoder out."""

from __future__ import annotations

from pathlib import Path

import torch

from models.checkpoints.chat_model import VisionChatModel, load_chat_model
from models.checkpoints.checkpoint import LoadFormat, Quantization
from models.kimi_vl.config import load_config
from models.kimi_vl.language import LatentDecoder, decoder_rules
from models.kimi_vl.pictures import load_image_settings
from models.kimi_vl.vision import KimiVisionEncoder, encoder_rules


@torch.inference_mode()
def load_model(
    directory: Path,
    device: torch.device,
    dtype: torch.dtype,
    load_format: LoadFormat = "published",
    quantization: Quantization = "none",
) -> VisionChatModel[KimiVisionEncoder, LatentDecoder]:
    """Raises CheckpointError that names the field or tensor; load_format "random" reads no tensor."""
    config = load_config(directory)
    images = load_image_settings(directory, config.vision)
    model = load_chat_model(
        lambda: (KimiVisionEncoder(config, images), LatentDecoder(config.text)),
        [*encoder_rules(config.vision, "encoder."), *decoder_rules(config.text, "language_model.", "decoder.")],
        *(directory, device, dtype, load_format, quantization),
        ignore=[
            "language_model.model.layers.{i}.self_attn.rotary_emb.inv_freq",
            "language_model.model.rotary_emb.inv_freq",
        ],
    )
    model.encoder.prepare()
    model.decoder.reorder_rotary_rows()
    return model
