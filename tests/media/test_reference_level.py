"""Loudness of reference audio."""

from __future__ import annotations

import numpy as np
import pytest

from models.interfaces.errors import InputError
from service.media.reference_audio import TARGET_LUFS, TARGET_RMS, integrated_loudness, level_reference

RATE = 16_000


def tone(seconds: float, amplitude: float) -> np.ndarray:
    return (amplitude * np.sin(np.arange(round(seconds * RATE)) * 2 * np.pi * 440 / RATE)).astype(np.float32)


def silence(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * RATE), np.float32)


@pytest.mark.parametrize("amplitude", [0.01, 0.1, 0.9])
def test_long_clips_have_one_loudness(amplitude: float) -> None:
    wave = np.concatenate([silence(1), tone(4, amplitude), silence(2)])
    levelled = level_reference(wave, RATE, "clip")
    assert integrated_loudness(levelled, RATE) == pytest.approx(TARGET_LUFS, abs=0.3)
    assert 4 * RATE <= len(levelled) <= 4.25 * RATE
    assert levelled.dtype == np.float32


@pytest.mark.parametrize("amplitude", [0.01, 0.5])
def test_short_clips_have_one_rms(amplitude: float) -> None:
    levelled = level_reference(np.concatenate([silence(0.5), tone(1, amplitude)]), RATE, "clip")
    heard = levelled[len(levelled) - RATE :]
    assert 10 * np.log10(np.mean(np.square(heard))) == pytest.approx(TARGET_RMS, abs=0.3)


def test_peaks_stay_below_full_scale() -> None:
    wave = tone(4, 0.02)
    wave[RATE] = 0.8
    assert np.abs(level_reference(wave, RATE, "clip")).max() <= 0.9001


def test_pauses_inside_stay() -> None:
    wave = np.concatenate([tone(1, 0.1), silence(1), tone(1, 0.1)])
    assert len(level_reference(wave, RATE, "clip")) == len(wave)


@pytest.mark.parametrize(
    ("wave", "reason"),
    [
        (np.concatenate([silence(1), tone(0.1, 0.5), silence(1)]), "too short: 0.1"),
        (tone(4, 0.002), "too quiet: its loudest part has -57 dBFS"),
        (silence(1), "too quiet"),
    ],
)
def test_what_makes_no_voice_is_refused(wave: np.ndarray, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as refused:
        level_reference(wave, RATE, "clip")
    assert refused.value.field == "clip"
