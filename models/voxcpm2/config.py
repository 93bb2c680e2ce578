"""config.json of a VoxCPM2 checkpoint.

Keys that inference does not need are left out: bos/eos ids, use_mup's scales (dead while use_mup is false), mean_mode,
cfm_config (cfg comes from the request), device. torch-free: the API process reads it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from models.checkpoints.published import read_config, require_fields, section_as, section_of
from models.interfaces.errors import CheckpointError

SOLVER_STEPS = (10, 4, 6, 16)
"""Numbers of solver steps that requests may ask for, the default first: one family of captured graphs each."""
_CODEC = {"depthwise": True, "use_noise_block": False, "cond_type": "scale_bias"}


@dataclass(frozen=True)
class LongRope:
    """lm_config.rope_scaling: LongRoPE (arXiv:2402.13753), factors of kv_channels / 2 frequencies."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int


@dataclass(frozen=True)
class LanguageModelConfig:
    """lm_config: the text-semantic model; the residual model has its widths and its own number of layers."""

    hidden_size: int
    intermediate_size: int
    max_position_embeddings: int
    num_attention_heads: int
    num_hidden_layers: int
    num_key_value_heads: int
    rms_norm_eps: float
    rope_theta: float
    kv_channels: int
    rope_scaling: LongRope
    vocab_size: int


@dataclass(frozen=True)
class LocalConfig:
    """encoder_config or dit_config: a bidirectional stack. Key heads and norm epsilon are the language model's."""

    hidden_dim: int
    ffn_dim: int
    num_heads: int
    num_layers: int
    kv_channels: int


@dataclass(frozen=True)
class AudioVAEConfig:
    """audio_vae_config. Rates are strides, from the waveform inwards and from the latents outwards; sample rates are
    those of the encoder's input and of the decoder's output."""

    encoder_dim: int
    encoder_rates: tuple[int, ...]
    latent_dim: int
    decoder_dim: int
    decoder_rates: tuple[int, ...]
    sr_bin_boundaries: tuple[int, ...]
    sample_rate: int
    out_sample_rate: int


@dataclass(frozen=True)
class VoxCPM2Config:
    """config.json. patch_size: latent frames of a patch. feat_dim: channels of a latent frame. max_length: positions of
    prompt and speech together."""

    lm: LanguageModelConfig
    encoder: LocalConfig
    dit: LocalConfig
    vae: AudioVAEConfig
    patch_size: int
    feat_dim: int
    scalar_quantization_latent_dim: int
    scalar_quantization_scale: int
    residual_lm_num_layers: int
    max_length: int


def load_config(directory: Path) -> VoxCPM2Config:
    """Raises CheckpointError that names a missing field or a setting of another model."""
    config = read_config(directory)
    lm, encoder, dit, vae = (
        section_of(config, name) for name in ("lm_config", "encoder_config", "dit_config", "audio_vae_config")
    )
    rope = section_of(lm, "rope_scaling")
    require_fields("config.json: ", config, {"architecture": "voxcpm2", "residual_lm_no_rope": True}, needed=True)
    require_fields("config.json: lm_config.", lm, {"use_mup": False}, needed=True)
    require_fields("config.json: lm_config.rope_scaling.", rope, {"type": "longrope"}, needed=True)
    # The published files' mean_mode is a name that their loader does not know.
    require_fields("config.json: dit_config.", dit, {"dit_mean_mode": False})
    require_fields("config.json: audio_vae_config.", vae, _CODEC)
    lm["rope_scaling"] = section_as(LongRope, rope, "config.json: lm_config.rope_scaling")
    sections = {
        "lm": section_as(LanguageModelConfig, lm, "config.json: lm_config"),
        "encoder": section_as(LocalConfig, encoder, "config.json: encoder_config"),
        "dit": section_as(LocalConfig, dit, "config.json: dit_config"),
        "vae": section_as(AudioVAEConfig, vae, "config.json: audio_vae_config"),
    }
    result = section_as(VoxCPM2Config, {**config, **sections}, "config.json")
    _require_agreement(result)
    return result


def _require_agreement(config: VoxCPM2Config) -> None:
    """Sizes that are in two sections must agree: later errors would not name them."""
    vae, width = config.vae, config.lm.kv_channels
    for name in ("short_factor", "long_factor"):
        if 2 * (count := len(getattr(config.lm.rope_scaling, name))) != width:
            raise CheckpointError(
                f"config.json: lm_config.rope_scaling.{name} has {count} values for kv_channels {width}"
            )
    for name, local in (("encoder_config", config.encoder), ("dit_config", config.dit)):
        if local.kv_channels != width:
            raise CheckpointError(f"config.json: {name}.kv_channels {local.kv_channels} is not lm_config's, {width}")
    encoded, decoded = vae.sample_rate / prod(vae.encoder_rates), vae.out_sample_rate / prod(vae.decoder_rates)
    if encoded != decoded:
        raise CheckpointError(
            f"config.json: audio_vae_config: sample_rate and encoder_rates make {encoded:g} latent frames a second, "
            f"out_sample_rate and decoder_rates {decoded:g}"
        )
    if config.feat_dim != vae.latent_dim:
        raise CheckpointError(f"config.json: feat_dim {config.feat_dim} is not latent_dim, {vae.latent_dim}")
    if config.max_length > config.lm.max_position_embeddings:
        raise CheckpointError(
            f"config.json: max_length {config.max_length} is more than lm_config.max_position_embeddings "
            f"{config.lm.max_position_embeddings}"
        )
