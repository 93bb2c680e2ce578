"""Loading MiniCPM-V 4.6 and 4.7: published files in, encoder and decoder out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from models.checkpoints.checkpoint import LoadFormat, Quantization, load_parameters, without_memory
from models.checkpoints.tied_head import with_the_files_head
from models.minicpmv.v4_6.config import MiniCPMV46Config, load_config
from models.minicpmv.v4_6.encoder import MiniCPMV46Encoder, encoder_rules
from models.qwen_vl.v3_5.language import HybridConfig, HybridDecoder, hybrid_rules
from models.qwen_vl.v3_5.model import draft_tensors, hybrid_config


class MiniCPMV46(nn.Module):
    """Implements models.protocol.ChatModel."""

    def __init__(self, config: MiniCPMV46Config, decoder: HybridConfig) -> None:
        super().__init__()
        self.encoder = MiniCPMV46Encoder(config)
        self.decoder = HybridDecoder(decoder)


@torch.inference_mode()
def load_model(
    directory: Path,
    device: torch.device | str,
    dtype: torch.dtype,
    load_format: LoadFormat = "published",
    quantization: Quantization = "none",
) -> MiniCPMV46:
    """Raises CheckpointError that names the field or tensor; load_format "random" reads no tensor."""
    config = load_config(directory)
    hybrid = hybrid_config(config.text)
    hybrid = replace(hybrid, decoder=with_the_files_head(hybrid.decoder, directory, device, load_format))
    with without_memory():
        model = MiniCPMV46(config, hybrid)
        if quantization == "fp8":
            model.decoder.hold_in_e4m3()
    unread = ["model.vision_tower.vit_merger.{rest}"] if config.merge == 2 else []
    load_parameters(
        model,
        directory,
        [*encoder_rules(config), *hybrid_rules(hybrid, "saved")],
        device=torch.device(device),
        dtype=dtype,
        load_format=load_format,
        ignore=[*unread, *draft_tensors(hybrid), *(["lm_head.weight"] if hybrid.decoder.tied else [])],
    )
    if load_format == "published":
        model.decoder.shift_norms()
    model.encoder.prepare()
    return model.eval()
