"""The golden recordings and prompts of Qwen3-ASR."""

from __future__ import annotations

import wave
from typing import Any

import numpy as np

from models.interfaces.media import Prompt
from tests.support.golden import GOLDEN, inputs

DIRECTORY = GOLDEN / "qwen3_asr"
INPUTS = inputs(DIRECTORY)


def samples(name: str) -> np.ndarray:
    """float32 [n]."""
    with wave.open(str(DIRECTORY / INPUTS["audio"][name]["file"])) as file:
        return np.frombuffer(file.readframes(file.getnframes()), dtype="<i2").astype(np.float32) / 32768


def golden_prompt(processor: Any, name: str) -> Prompt:
    spec = INPUTS["prompts"][name]
    tagged, _, said = spec["continue_text"].partition("<asr_text>")
    language = spec["language"] or tagged.removeprefix("language ") or None
    heard = processor.item(samples(spec["audio"]))
    made: Prompt = processor.prompt(heard, context=spec["context"], language=language, continuation=said)
    return made
