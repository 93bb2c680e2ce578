"""Qwen2.5-VL's networks, and the map from published tensor names to ours."""

from __future__ import annotations

import torch

from models.checkpoints.chat_model import VisionChatModel, load_chat_model, loader
from models.checkpoints.checkpoint import Source
from models.checkpoints.tied_head import with_the_files_head
from models.interfaces.errors import CheckpointError
from models.interfaces.rule import Rule
from models.layers.decoder import CausalDecoder, DecoderConfig, decoder_ignored, decoder_rules
from models.qwen_vl.config import VisionConfig
from models.qwen_vl.model import ALIASES, shared_rules
from models.qwen_vl.v2_5.config import load_config
from models.qwen_vl.v2_5.vision import Qwen25VLEncoder


@loader
def load_model(source: Source) -> VisionChatModel[Qwen25VLEncoder, CausalDecoder]:
    if source.dtype == torch.float16:
        # The last block's MLP has inputs beyond 4000 and sums beyond 65504.
        raise CheckpointError(f"{source.directory}: the vision tower overflows in float16; use bfloat16 or float32")
    config = load_config(source.directory)
    decoder = DecoderConfig.from_published(config.shared.text, qkv_bias=True)
    decoder = with_the_files_head(decoder, source)
    model = load_chat_model(
        source,
        lambda: (Qwen25VLEncoder(config), CausalDecoder(decoder)),
        [*vision_rules(config.shared.vision), *decoder_rules(decoder)],
        aliases=ALIASES,
        ignore=["visual.rotary_pos_emb.inv_freq", *decoder_ignored(decoder)],
    )
    model.encoder.align()
    return model


def vision_rules(config: VisionConfig) -> list[Rule]:
    published, ours, inner = "visual.blocks.{i}.", "encoder.blocks.{i}.", config.intermediate_size
    halves = {"gate_proj": (0, inner), "up_proj": (inner, 2 * inner)}
    return [
        *shared_rules(config),
        *(
            Rule(f"{published}mlp.{half}.{{rest}}", f"{ours}mlp.gate_up.{{rest}}", rows=rows)
            for half, rows in halves.items()
        ),
        Rule(f"{published}mlp.down_proj.{{rest}}", f"{ours}mlp.down.{{rest}}"),
    ]
