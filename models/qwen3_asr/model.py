"""Qwen3-ASR's networks, and the map from published tensor names to ours."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from models.checkpoints.chat_model import VisionChatModel, load_chat_model, loader
from models.checkpoints.checkpoint import Source
from models.checkpoints.tied_head import with_the_files_head
from models.interfaces.rule import Rule, qkv_rules, renamed
from models.layers.decoder import CausalDecoder, DecoderConfig, decoder_ignored, decoder_rules
from models.qwen3_asr.config import AudioConfig, load_config
from models.qwen3_asr.encoder import KERNEL, NUM_CONVS, AudioEncoder

ALIASES = (
    ("thinker.", ""),
    ("model.audio_tower.", "audio_tower."),
    ("model.multi_modal_projector.linear_1.", "audio_tower.proj1."),
    ("model.multi_modal_projector.linear_2.", "audio_tower.proj2."),
    ("model.language_model.", "model."),
    ("score.", "lm_head."),
)
"""The makers' prefix, and the names of the checkpoints that transformers 5 converted."""
_TABLES = ("thinker.model.embed_tokens.weight", "model.language_model.embed_tokens.weight")


@loader
def load_model(source: Source) -> VisionChatModel[AudioEncoder, CausalDecoder]:
    """The logits of an aligner's decoder are those of classes."""
    config = load_config(source.directory)
    decoder = DecoderConfig.from_published(config.text, qk_norm=True)
    decoder = with_the_files_head(decoder, source, head="thinker.lm_head.weight", embeddings=_TABLES)
    if config.aligner is not None:
        decoder = replace(decoder, tied=False)

    def build() -> tuple[AudioEncoder, CausalDecoder]:
        causal = CausalDecoder(decoder)
        if config.aligner is not None:
            causal.head = nn.Linear(causal.hidden_size, config.aligner.classes, bias=False)
        return AudioEncoder(config.audio), causal

    return load_chat_model(
        source,
        build,
        [*audio_rules(config.audio), *decoder_rules(decoder)],
        aliases=ALIASES,
        ignore=decoder_ignored(decoder),
    )


def audio_rules(config: AudioConfig) -> list[Rule]:
    width, channels = config.hidden_size, config.conv_channels
    published, block, ours = "audio_tower.", "audio_tower.layers.{i}.", "encoder.blocks.{i}."
    rules = []
    for number in range(NUM_CONVS):
        shape = (channels, channels if number else 1, KERNEL, KERNEL)
        name, conv = f"{published}conv2d{number + 1}", f"encoder.convs.{number}"
        rules += [Rule(f"{name}.weight", f"{conv}.weight", shape=shape), Rule(f"{name}.bias", f"{conv}.bias")]
    return [
        *rules,
        *qkv_rules(f"{block}self_attn.", f"{ours}qkv", (width, width, width)),
        Rule(f"{published}conv_out.weight", "encoder.conv_out.weight"),
        *renamed(block, ours, {"self_attn.out_proj": "out", "self_attn_layer_norm": "attention_norm"}),
        *renamed(block, ours, {"final_layer_norm": "mlp_norm", "fc1": "mlp.fc1", "fc2": "mlp.fc2"}),
        *renamed(published, "encoder.", {"ln_post": "norm", "proj1": "projector.fc1", "proj2": "projector.fc2"}),
    ]
