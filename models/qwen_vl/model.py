"""Qwen2-VL's networks, and the map from published tensor names to ours."""

from __future__ import annotations

from models.checkpoints.chat_model import VisionChatModel, load_chat_model, loader
from models.checkpoints.checkpoint import Source
from models.checkpoints.tied_head import with_the_files_head
from models.interfaces.rule import Rule, renamed
from models.layers.decoder import CausalDecoder, DecoderConfig, decoder_ignored, decoder_rules
from models.qwen_vl.config import VisionConfig, load_config
from models.qwen_vl.vision import Qwen2VLEncoder

ALIASES = (("model.visual.", "visual."), ("model.language_model.", "model."))
"""Names of parameters in transformers 5, which some tools save unchanged."""
BLOCK_NAMES = {"norm1": "attention_norm", "norm2": "mlp_norm", "attn.qkv": "qkv", "attn.proj": "out"}
"""Modules of a tower's block: published, and ours."""


@loader
def load_model(source: Source) -> VisionChatModel[Qwen2VLEncoder, CausalDecoder]:
    config = load_config(source.directory)
    decoder = DecoderConfig.from_published(config.text, qkv_bias=True)
    decoder = with_the_files_head(decoder, source)
    return load_chat_model(
        source,
        lambda: (Qwen2VLEncoder(config.vision, config.images), CausalDecoder(decoder)),
        [*vision_rules(config.vision), *decoder_rules(decoder)],
        aliases=ALIASES,
        ignore=["visual.rotary_pos_emb.inv_freq", *decoder_ignored(decoder)],
    )


def vision_rules(config: VisionConfig) -> list[Rule]:
    return [*shared_rules(config), Rule("visual.blocks.{i}.mlp.{rest}", "encoder.blocks.{i}.mlp.{rest}")]


def shared_rules(config: VisionConfig) -> list[Rule]:
    """Those of the tower and merger but the MLPs of the blocks, which Qwen2.5-VL's have, too."""
    return [
        Rule(
            "visual.patch_embed.proj.weight",
            "encoder.patch_embed.weight",
            shape=(config.hidden_size, *config.patch_shape),
        ),
        *renamed("visual.blocks.{i}.", "encoder.blocks.{i}.", BLOCK_NAMES),
        *renamed("visual.merger.", "encoder.merger.", {"ln_q": "norm", "mlp.0": "mlp.fc1", "mlp.2": "mlp.fc2"}),
    ]
