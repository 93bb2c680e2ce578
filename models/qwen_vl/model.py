"""The networks of Qwen2-VL and Qwen2.5-VL, and the map from published tensor names to ours."""

from __future__ import annotations

import torch

from models.checkpoints.chat_model import VisionChatModel, load_chat_model, loader
from models.checkpoints.checkpoint import Source
from models.checkpoints.tied_head import with_the_files_head
from models.interfaces.errors import CheckpointError
from models.interfaces.rule import Rule, renamed
from models.layers.decoder import CausalDecoder, DecoderConfig, decoder_ignored, decoder_rules
from models.qwen_vl.config import Qwen2VLConfig, load_config
from models.qwen_vl.vision import Qwen2VLEncoder
from models.qwen_vl.windowed_vision import Qwen25VLEncoder

ALIASES = (("model.visual.", "visual."), ("model.language_model.", "model."))
"""Names of parameters in transformers 5, which some tools save unchanged."""
BLOCK_NAMES = {"norm1": "attention_norm", "norm2": "mlp_norm", "attn.qkv": "qkv", "attn.proj": "out"}
"""Modules of a tower's block: published, and ours."""


@loader
def load_model(source: Source) -> VisionChatModel[Qwen2VLEncoder | Qwen25VLEncoder, CausalDecoder]:
    config = load_config(source.directory)
    if config.windows is not None and source.dtype == torch.float16:
        # The last block's MLP has inputs beyond 4000 and sums beyond 65504.
        raise CheckpointError(f"{source.directory}: the vision tower overflows in float16; use bfloat16 or float32")
    decoder = DecoderConfig.from_published(config.text, qkv_bias=True)
    decoder = with_the_files_head(decoder, source)
    model = load_chat_model(
        source,
        lambda: (_encoder(config), CausalDecoder(decoder)),
        [*vision_rules(config), *decoder_rules(decoder)],
        aliases=ALIASES,
        ignore=["visual.rotary_pos_emb.inv_freq", *decoder_ignored(decoder)],
    )
    if isinstance(model.encoder, Qwen25VLEncoder):
        model.encoder.align()
    return model


def _encoder(config: Qwen2VLConfig) -> Qwen2VLEncoder | Qwen25VLEncoder:
    if config.windows is None:
        return Qwen2VLEncoder(config.vision, config.images)
    return Qwen25VLEncoder(config.vision, config.images, config.windows)


def vision_rules(config: Qwen2VLConfig) -> list[Rule]:
    vision, published, ours = config.vision, "visual.blocks.{i}.", "encoder.blocks.{i}."
    inner = vision.intermediate_size
    if config.windows is None:
        mlp = [Rule(f"{published}mlp.{{rest}}", f"{ours}mlp.{{rest}}")]
    else:
        mlp = [
            Rule(f"{published}mlp.gate_proj.{{rest}}", f"{ours}mlp.gate_up.{{rest}}", rows=(0, inner)),
            Rule(f"{published}mlp.up_proj.{{rest}}", f"{ours}mlp.gate_up.{{rest}}", rows=(inner, 2 * inner)),
            Rule(f"{published}mlp.down_proj.{{rest}}", f"{ours}mlp.down.{{rest}}"),
        ]
    return [
        Rule(
            "visual.patch_embed.proj.weight",
            "encoder.patch_embed.weight",
            shape=(vision.hidden_size, *vision.patch_shape),
        ),
        *renamed(published, ours, BLOCK_NAMES),
        *renamed("visual.merger.", "encoder.merger.", {"ln_q": "norm", "mlp.0": "mlp.fc1", "mlp.2": "mlp.fc2"}),
        *mlp,
    ]
