"""Loading Kimi-VL: published files in, encoder and decoder out."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from models.checkpoints.checkpoint import LoadFormat, Quantization, load_parameters, without_memory
from models.kimi_vl.config import KimiVLConfig, load_config
from models.kimi_vl.language import LatentDecoder, decoder_rules
from models.kimi_vl.pictures import ImageSettings, load_image_settings
from models.kimi_vl.vision import KimiVisionEncoder, encoder_rules


class KimiVLModel(nn.Module):
    """ChatModel of Kimi-VL."""

    def __init__(self, config: KimiVLConfig, images: ImageSettings) -> None:
        super().__init__()
        self.encoder = KimiVisionEncoder(config, images)
        self.decoder = LatentDecoder(config.text)


@torch.inference_mode()
def load_model(
    directory: Path,
    device: torch.device,
    dtype: torch.dtype,
    load_format: LoadFormat = "published",
    quantization: Quantization = "none",
) -> KimiVLModel:
    """Raises CheckpointError that names the field or tensor; load_format "random" reads no tensor."""
    config = load_config(directory)
    with without_memory():
        model = KimiVLModel(config, load_image_settings(directory, config.vision))
        if quantization == "fp8":
            model.decoder.hold_in_e4m3()
    load_parameters(
        model,
        directory,
        [*encoder_rules(config.vision, "encoder."), *decoder_rules(config.text, "language_model.", "decoder.")],
        device=device,
        dtype=dtype,
        load_format=load_format,
        ignore=[
            "language_model.model.layers.{i}.self_attn.rotary_emb.inv_freq",
            "language_model.model.rotary_emb.inv_freq",
        ],
    )
    model.encoder.prepare()
    model.decoder.reorder_rotary_rows()
    return model.eval()
