"""Loading MiniCPM-V 4.6 and 4.7: published files in, encoder and decoder out."""

from __future__ import annotations

from functools import partial

import torch

from models.checkpoints.chat_model import VisionChatModel, loader
from models.checkpoints.checkpoint import Source
from models.minicpmv.v4_6.config import load_config
from models.minicpmv.v4_6.encoder import MiniCPMV46Encoder, encoder_rules
from models.qwen_vl.v3_5.language import HybridDecoder
from models.qwen_vl.v3_5.model import load_hybrid


@loader
@torch.inference_mode()
def load_model(source: Source) -> VisionChatModel[MiniCPMV46Encoder, HybridDecoder]:
    config = load_config(source.directory)
    model = load_hybrid(source, partial(MiniCPMV46Encoder, config), encoder_rules(config), config.text)
    model.encoder.prepare()
    return model
