"""config.json of a VoxCPM2 checkpoint.

Keys that inference does not need are left out: bos/eos ids, use_mup's scales (dead while use_mup is false), mean_mode,
cfm_config (cfg comes from the request), device. torch-free: the API process reads it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from models.checkpoints.published import read_config
from models.interfaces.errors import CheckpointError

SOLVER_STEPS = (10, 4, 6, 16)
"""Numbers of solver steps that requests may ask for, the default first: one family of captured graphs each."""


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
    lm, vae = _section(config, "lm_config"), _section(config, "audio_vae_config")
    _require(config, "architecture", "voxcpm2")
    _require(config, "residual_lm_no_rope", True)
    # The published files' mean_mode is a name that their loader does not know.
    _require({"dit_mean_mode": False, **_section(config, "dit_config")}, "dit_mean_mode", False, "dit_config.")
    for key, value in (("depthwise", True), ("use_noise_block", False), ("cond_type", "scale_bias")):
        _require({key: value, **vae}, key, value, "audio_vae_config.")
    result = VoxCPM2Config(
        lm=_language_model(lm),
        encoder=_local(config, "encoder_config"),
        dit=_local(config, "dit_config"),
        vae=AudioVAEConfig(
            **_integers(vae, "audio_vae_config.", "encoder_dim latent_dim decoder_dim sample_rate out_sample_rate"),
            encoder_rates=_list(vae, "encoder_rates"),
            decoder_rates=_list(vae, "decoder_rates"),
            sr_bin_boundaries=_list(vae, "sr_bin_boundaries"),
        ),
        **_integers(
            config,
            "",
            "patch_size feat_dim scalar_quantization_latent_dim scalar_quantization_scale residual_lm_num_layers "
            "max_length",
        ),
    )
    _require_agreement(result)
    return result


def _language_model(lm: Mapping[str, Any]) -> LanguageModelConfig:
    rope = _section(lm, "rope_scaling", "lm_config.")
    _require(lm, "use_mup", False, "lm_config.")
    _require(rope, "type", "longrope", "lm_config.rope_scaling.")
    return LanguageModelConfig(
        **_integers(
            lm,
            "lm_config.",
            "hidden_size intermediate_size max_position_embeddings num_attention_heads num_hidden_layers "
            "num_key_value_heads kv_channels vocab_size",
        ),
        rms_norm_eps=float(_value(lm, "rms_norm_eps", "lm_config.")),
        rope_theta=float(_value(lm, "rope_theta", "lm_config.")),
        rope_scaling=LongRope(
            tuple(map(float, _value(rope, "short_factor", "lm_config.rope_scaling."))),
            tuple(map(float, _value(rope, "long_factor", "lm_config.rope_scaling."))),
            **_integers(rope, "lm_config.rope_scaling.", "original_max_position_embeddings"),
        ),
    )


def _require_agreement(config: VoxCPM2Config) -> None:
    """Sizes that are in two sections must agree: later errors would not name them."""
    factors = config.lm.rope_scaling
    for name, values in (("short_factor", factors.short_factor), ("long_factor", factors.long_factor)):
        if 2 * len(values) != config.lm.kv_channels:
            raise CheckpointError(
                f"config.json: lm_config.rope_scaling.{name} has {len(values)} values for kv_channels "
                f"{config.lm.kv_channels}"
            )
    for name, local in (("encoder_config", config.encoder), ("dit_config", config.dit)):
        if local.kv_channels != config.lm.kv_channels:
            raise CheckpointError(
                f"config.json: {name}.kv_channels {local.kv_channels} is not "
                f"lm_config.kv_channels {config.lm.kv_channels}, whose rotary factors it uses"
            )
    vae = config.vae
    encoded, decoded = vae.sample_rate / prod(vae.encoder_rates), vae.out_sample_rate / prod(vae.decoder_rates)
    if encoded != decoded:
        raise CheckpointError(
            f"config.json: audio_vae_config: sample_rate and encoder_rates make {encoded:g} latent frames a second, "
            f"out_sample_rate and decoder_rates {decoded:g}"
        )
    if config.vae.latent_dim != config.feat_dim:
        raise CheckpointError(
            f"config.json: feat_dim {config.feat_dim} is not audio_vae_config.latent_dim {config.vae.latent_dim}"
        )
    if config.max_length > config.lm.max_position_embeddings:
        raise CheckpointError(
            f"config.json: max_length {config.max_length} is more than lm_config.max_position_embeddings "
            f"{config.lm.max_position_embeddings}"
        )


def _local(config: Mapping[str, Any], key: str) -> LocalConfig:
    section = _section(config, key)
    return LocalConfig(**_integers(section, f"{key}.", "hidden_dim ffn_dim num_heads num_layers kv_channels"))


def _section(config: Mapping[str, Any], key: str, prefix: str = "") -> Mapping[str, Any]:
    section: Mapping[str, Any] = _value(config, key, prefix)
    return section


def _value(section: Mapping[str, Any], key: str, prefix: str) -> Any:
    if section.get(key) is None:
        raise CheckpointError(f"config.json: {prefix}{key} is missing")
    return section[key]


def _integers(section: Mapping[str, Any], prefix: str, keys: str) -> dict[str, int]:
    return {key: _value(section, key, prefix) for key in keys.split()}


def _list(vae: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Without boundaries a codec has no sample-rate condition, which is another network."""
    values = _value(vae, key, "audio_vae_config.")
    if not values:
        raise CheckpointError(f"config.json: audio_vae_config.{key} is [], expected at least one integer")
    return tuple(values)


def _require(section: Mapping[str, Any], key: str, expected: object, prefix: str = "") -> None:
    value = _value(section, key, prefix)
    if value != expected:
        raise CheckpointError(f"config.json: {prefix}{key} is {value!r}; only {expected!r} is hosted")
