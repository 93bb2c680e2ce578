"""The embedded voice says what it is asked to: its sentences are like Flite's of the same text, and unlike others.

spoken_sentences.npz holds the envelopes of Flite's voice slt; with the package flite, this writes it anew:

    python -m tests.api.test_spoken_meaning
"""

from __future__ import annotations

import io
import subprocess
import tempfile
from itertools import pairwise
from pathlib import Path

import httpx
import numpy as np
import pytest
import soundfile

from tests.support.processes import ServerProcess
from tests.support.waiting import GENEROUS

SENTENCES = (
    "There are three yellow stars.",
    "I see a large blue square.",
    "Good morning, how are you?",
    "The circle moves to the left.",
)
NATURAL = Path(__file__).with_name("spoken_sentences.npz")
BANDS = 24
"""Mel bands, up to 6 kHz."""

pytestmark = pytest.mark.timeout(900)


def envelope(wave: np.ndarray, rate: int) -> np.ndarray:
    """Samples -> logarithms of mel bands every 10 ms, each of zero mean and unit deviation, [frames, BANDS]. What a
    voice has of its own, loudness and timbre, falls out."""
    window, hop = rate // 40, rate // 100
    frames = np.lib.stride_tricks.sliding_window_view(wave, window)[::hop] * np.hanning(window)
    power = np.abs(np.fft.rfft(frames, rate // 25)) ** 2 / window**2
    hertz = np.fft.rfftfreq(rate // 25, 1 / rate)
    edges = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + 6000 / 700), BANDS + 1) / 2595) - 1)
    bands = [power[:, (low <= hertz) & (hertz < high)].sum(1) for low, high in pairwise(edges)]
    logarithms = np.log(np.stack(bands, axis=1) + 1e-8)
    return (logarithms - logarithms.mean(0)) / logarithms.std(0)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Mean distance of frames along the best path through both (dynamic time warping)."""
    apart = np.sqrt(np.square(one[:, None] - other[None]).mean(-1))
    total = np.full((len(one) + 1, len(other) + 1), np.inf)
    total[0, 0] = 0.0
    for i in range(len(one)):
        for j in range(len(other)):
            total[i + 1, j + 1] = apart[i, j] + min(total[i, j], total[i, j + 1], total[i + 1, j])
    return float(total[-1, -1] / (len(one) + len(other)))


def test_sentences_are_like_natural_ones_of_the_same_text(embedded_server: ServerProcess) -> None:
    def speak(text: str) -> np.ndarray:
        body = {"model": "reprise/voxcpm2", "input": text, "seed": 1, "response_format": "wav"}
        answer = httpx.post(f"{embedded_server.url}/v1/audio/speech", json=body, timeout=GENEROUS)
        return envelope(*soundfile.read(io.BytesIO(answer.raise_for_status().content)))

    with np.load(NATURAL) as file:
        natural = [file[str(index)].astype(np.float64) for index in range(len(SENTENCES))]
    apart = np.array([[distance(speech, other) for other in natural] for speech in map(speak, SENTENCES)])
    others = apart[~np.eye(len(SENTENCES), dtype=bool)]
    assert apart.diagonal().max() < 0.6 * others.min(), apart.round(3)


def write() -> None:
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        found = {}
        for index, text in enumerate(SENTENCES):
            subprocess.run(["flite", "-voice", "slt", "-t", text, "-o", file.name], check=True)
            found[str(index)] = envelope(*soundfile.read(file.name)).astype(np.float16)
    np.savez_compressed(NATURAL, **found)


if __name__ == "__main__":
    write()
