"""The golden directories of Qwen3-ASR through the production loaders."""

from __future__ import annotations

import wave
from functools import cache
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from models.checkpoints.registry import family_of, resolve
from models.interfaces.media import MediaItem, Prompt
from tests.support.golden import GOLDEN, inputs

DIRECTORY, ALIGNER = GOLDEN / "qwen3_asr", GOLDEN / "qwen3_asr_aligner"
INPUTS = inputs(DIRECTORY)
AUDIO, PROMPTS = tuple(INPUTS["audio"]), tuple(INPUTS["prompts"])
CHUNK = 13
"""Tokens of a prefill that cuts audio."""


@cache
def expected() -> dict[str, Tensor]:
    return load_file(DIRECTORY / "expected.safetensors")


@cache
def processor() -> Any:
    return resolve(family_of(DIRECTORY).processor)(DIRECTORY)


@cache
def model(device: str = "cpu") -> Any:
    return resolve(family_of(DIRECTORY).model)(DIRECTORY, torch.device(device), torch.float32)


def samples(name: str) -> np.ndarray:
    """float32 [n]."""
    with wave.open(str(DIRECTORY / INPUTS["audio"][name]["file"])) as file:
        return np.frombuffer(file.readframes(file.getnframes()), dtype="<i2").astype(np.float32) / 32768


@cache
def item(name: str) -> MediaItem:
    made: MediaItem = processor().item(samples(name))
    return made


@cache
def prompt(name: str) -> Prompt:
    spec = INPUTS["prompts"][name]
    tagged, _, said = spec["continue_text"].partition("<asr_text>")
    language = spec["language"] or tagged.removeprefix("language ") or None
    made: Prompt = processor().prompt(
        item(spec["audio"]), context=spec["context"], language=language, continuation=said
    )
    return made


def of(name: str, value: str) -> Tensor:
    return expected()[f"prompt.{name}.{value}"]
