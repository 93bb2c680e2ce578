"""The configuration of Qwen3-ASR, from the published JSON files. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.checkpoints.published import (
    check_heads,
    preprocessor_fields,
    read_config,
    read_optional_json,
    require_fields,
    require_text_fields,
    section_of,
    token_id,
)
from models.interfaces.errors import CheckpointError

SAMPLE_RATE = 16_000
HOP = 160
"""Samples from one frame of the log-mel spectrogram to the next."""
N_FFT = 400
MEL_BANDS = 128
CHUNK_FRAMES = 100
"""Frames that the convolutions read together, without those around them: one second."""
CHUNK_ROWS = 13
"""Rows that three convolutions of stride 2 make of a chunk."""
MIN_SAMPLES = 8_000
"""Shorter audio is padded with zeros, which count as audio, as transformers does."""
_FEATURES = {"feature_size": MEL_BANDS, "hop_length": HOP, "n_fft": N_FFT, "sampling_rate": SAMPLE_RATE}


@dataclass(frozen=True)
class AudioConfig:
    """The fields of audio_config."""

    hidden_size: int
    """Width of the tower (d_model)."""
    depth: int
    num_heads: int
    intermediate_size: int
    conv_channels: int
    """downsample_hidden_size."""
    window_chunks: int
    """Chunks that attend to each other: n_window_infer / CHUNK_FRAMES."""
    out_features: int
    """Width of the language model."""

    @property
    def window_rows(self) -> int:
        return self.window_chunks * CHUNK_ROWS


@dataclass(frozen=True)
class AlignerConfig:
    """What a forced aligner has in place of a head for tokens."""

    classes: int
    marker_id: int
    """timestamp_token_id."""
    class_ms: int
    """Milliseconds from one class to the next."""


@dataclass(frozen=True)
class Qwen3ASRConfig:
    """What the checkpoint's files say about the model."""

    text: Mapping[str, Any]
    """The language model's fields; positions have one axis."""
    audio: AudioConfig
    audio_token_id: int
    languages: tuple[str, ...]
    """support_languages; empty where the file names none."""
    aligner: AlignerConfig | None = None
    """None for a model that transcribes."""


def load_config(directory: Path) -> Qwen3ASRConfig:
    """Reads config.json in either published layout: with everything inside thinker_config, or as transformers 5 writes
    it. Raises CheckpointError that names the file and the field."""
    config = read_config(directory)
    inner = section_of(config, "thinker_config") if "thinker_config" in config else config
    text = section_of(inner, "text_config")
    text["tie_word_embeddings"] = bool(text.get("tie_word_embeddings") or inner.get("tie_word_embeddings"))
    require_text_fields(directory, text)
    where, settings = preprocessor_fields(directory, "feature_extractor", "preprocessor_config.json")
    require_fields(f"{where}: ", settings, _FEATURES)
    try:
        audio = _audio_config(section_of(inner, "audio_config"))
        audio_token_id = token_id(inner, "audio_token_id")
        aligner = _aligner_config(directory, {**inner, **config})
    except KeyError as error:
        raise CheckpointError(f"{directory}: config.json: field {error} is missing") from error
    place, width = f"{directory}: config.json: audio_config.", {"output_dim": text["hidden_size"]}
    require_fields(place, inner["audio_config"], width, said="expected the language model's hidden_size")
    languages = tuple(config.get("support_languages", ()))
    return Qwen3ASRConfig(_with_plain_positions(text), audio, audio_token_id, languages, aligner)


def _audio_config(config: Mapping[str, Any]) -> AudioConfig:
    """Every field must be there: the defaults of the published classes are not those of the published models."""
    expected = {
        "n_window": CHUNK_FRAMES // 2,
        "num_mel_bins": MEL_BANDS,
        "activation_function": "gelu",
        "scale_embedding": False,
    }
    require_fields("config.json: audio_config.", config, expected)
    window = int(config["n_window_infer"])
    if window < CHUNK_FRAMES or window % CHUNK_FRAMES:
        raise CheckpointError(
            f"config.json: audio_config.n_window_infer is {window}, expected a multiple of {CHUNK_FRAMES}"
        )
    # The converter of transformers 5 wrote num_attention_heads.
    heads = config.get("encoder_attention_heads") or config["num_attention_heads"]
    check_heads(config["d_model"], heads, ("d_model", "encoder_attention_heads"), section="audio_config")
    return AudioConfig(
        hidden_size=config["d_model"],
        depth=config["encoder_layers"],
        num_heads=heads,
        intermediate_size=config["encoder_ffn_dim"],
        conv_channels=config["downsample_hidden_size"],
        window_chunks=window // CHUNK_FRAMES,
        out_features=config["output_dim"],
    )


def _aligner_config(directory: Path, config: Mapping[str, Any]) -> AlignerConfig | None:
    """One layout has classify_num and timestamp_segment_time here, the other a name for each class, and the time in
    processor_config.json."""
    classes = config.get("classify_num") or len(config.get("id2label") or ())
    if not classes or ("classify_num" not in config and "timestamp_token_id" not in config):
        return None
    settings = {**read_optional_json(directory, "processor_config.json"), **config}
    return AlignerConfig(int(classes), token_id(config, "timestamp_token_id"), int(settings["timestamp_segment_time"]))


def _with_plain_positions(text: Mapping[str, Any]) -> dict[str, Any]:
    """One files' layout names M-RoPE, but gives every token the same position on its three axes."""
    names = ("rope_scaling", "rope_parameters")
    sections = {name: dict(text[name]) for name in names if isinstance(text.get(name), dict)}
    for section in sections.values():
        for name in ("mrope_section", "mrope_interleaved", "interleaved"):
            section.pop(name, None)
    return {**text, **sections}
