"""Loading MiniCPM-V 4.6 and 4.7: published files in, encoder and decoder out."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from models.checkpoints.chat_model import VisionChatModel
from models.checkpoints.checkpoint import LoadFormat, Quantization
from models.minicpmv.v4_6.config import load_config
from models.minicpmv.v4_6.encoder import MiniCPMV46Encoder, encoder_rules
from models.qwen_vl.v3_5.language import HybridDecoder
from models.qwen_vl.v3_5.model import load_hybrid


@torch.inference_mode()
def load_model(
    directory: Path,
    device: torch.device | str,
    dtype: torch.dtype,
    load_format: LoadFormat = "published",
    quantization: Quantization = "none",
) -> VisionChatModel[MiniCPMV46Encoder, HybridDecoder]:
    """Raises CheckpointError that names the field or tensor; load_format "random" reads no tensor."""
    config = load_config(directory)
    encoder, settings = partial(MiniCPMV46Encoder, config), (directory, device, dtype, load_format, quantization)
    model = load_hybrid(encoder, encoder_rules(config), config.text, *settings)
    model.encoder.prepare()
    return model
