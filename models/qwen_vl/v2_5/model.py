"""Qwen2.5-VL's networks, and the map from published tensor names to ours."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from models.checkpoints.checkpoint import LoadFormat, Quantization, load_parameters, without_memory
from models.checkpoints.tied_head import with_the_files_head
from models.interfaces.errors import CheckpointError
from models.interfaces.rule import Rule
from models.layers.decoder import CausalDecoder, DecoderConfig, decoder_ignored, decoder_rules
from models.qwen_vl.config import VisionConfig
from models.qwen_vl.model import ALIASES
from models.qwen_vl.v2_5.config import Qwen25VLConfig, load_config
from models.qwen_vl.v2_5.vision import Qwen25VLEncoder


class Qwen25VL(nn.Module):
    """Implements models.protocol.ChatModel."""

    def __init__(self, config: Qwen25VLConfig, decoder: DecoderConfig) -> None:
        super().__init__()
        self.encoder = Qwen25VLEncoder(config)
        self.decoder = CausalDecoder(decoder)


def load_model(
    directory: Path,
    device: torch.device | str,
    dtype: torch.dtype,
    load_format: LoadFormat = "published",
    quantization: Quantization = "none",
) -> Qwen25VL:
    """Raises CheckpointError that names the field or tensor; load_format "random" reads no tensor."""
    if dtype == torch.float16:
        # The last block's MLP has inputs beyond 4000 and sums beyond 65504.
        raise CheckpointError(f"{directory}: the vision tower overflows in float16; use bfloat16 or float32")
    config = load_config(directory)
    decoder = DecoderConfig.from_published(config.shared.text, qkv_bias=True)
    decoder = with_the_files_head(decoder, directory, device, load_format)
    with without_memory():
        model = Qwen25VL(config, decoder)
        if quantization == "fp8":
            model.decoder.hold_in_e4m3()
    load_parameters(
        model,
        directory,
        [*vision_rules(config.shared.vision), *decoder_rules(decoder)],
        device=torch.device(device),
        dtype=dtype,
        load_format=load_format,
        aliases=ALIASES,
        ignore=["visual.rotary_pos_emb.inv_freq", *decoder_ignored(decoder)],
    )
    model.encoder.align()
    return model


def vision_rules(config: VisionConfig) -> list[Rule]:
    published, ours, inner = "visual.blocks.{i}.", "encoder.blocks.{i}.", config.intermediate_size
    halves = {"gate_proj": (0, inner), "up_proj": (inner, 2 * inner)}
    return [
        Rule(
            "visual.patch_embed.proj.weight",
            "encoder.patch_embed.weight",
            shape=(config.hidden_size, *config.patch_shape),
        ),
        Rule(f"{published}norm1.weight", f"{ours}attention_norm.weight"),
        Rule(f"{published}norm2.weight", f"{ours}mlp_norm.weight"),
        Rule(f"{published}attn.qkv.{{rest}}", f"{ours}qkv.{{rest}}"),
        Rule(f"{published}attn.proj.{{rest}}", f"{ours}out.{{rest}}"),
        *(
            Rule(f"{published}mlp.{half}.{{rest}}", f"{ours}mlp.gate_up.{{rest}}", rows=rows)
            for half, rows in halves.items()
        ),
        Rule(f"{published}mlp.down_proj.{{rest}}", f"{ours}mlp.down.{{rest}}"),
        Rule("visual.merger.ln_q.weight", "encoder.merger.norm.weight"),
        Rule("visual.merger.mlp.0.{rest}", "encoder.merger.mlp.fc1.{rest}"),
        Rule("visual.merger.mlp.2.{rest}", "encoder.merger.mlp.fc2.{rest}"),
    ]
