"""Phones of voices that tell none; neither Flite nor RHVoice is needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from models.embedded.voices.alignment import Aligner, path
from models.embedded.voices.flite import PHONES, Utterance
from models.embedded.voices.rhvoice import RHVoice, resampled

NAMES = ("pau", "aa", "iy", "uw", "s", "aa", "pau")
FORMANTS = {"aa": (750, 1200), "iy": (300, 2300), "uw": (320, 900)}


def said(pitch: float, mouth: float, lengths: list[float]) -> Utterance:
    """Harmonics under two resonances for each vowel, noise for s."""
    noise, parts = np.random.default_rng(7), []
    for name, length in zip(NAMES, lengths, strict=True):
        time = np.arange(int(16000 * length)) / 16000
        part = 0.001 * noise.standard_normal(len(time))
        if name == "s":
            part += 0.1 * np.diff(noise.standard_normal(len(time) + 1))
        for formant in FORMANTS.get(name, ()):
            tones = np.arange(pitch, 7000, pitch)
            gains = 0.2 / (1 + ((tones - mouth * formant) / 90) ** 2)
            part += (gains[:, None] * np.sin(2 * np.pi * tones[:, None] * time)).sum(0)
        parts.append(part)
    samples = np.clip(8000 * np.concatenate(parts), -32768, 32767).astype(np.int16)
    phones, ends = np.array([PHONES.index(name) for name in NAMES], np.int8), np.cumsum(lengths).astype(np.float32)
    return Utterance(samples, phones, ends, np.full(len(NAMES), 0, np.int16), "", np.ones(9, np.float32))


@pytest.mark.parametrize(("pitch", "mouth"), [(110, 1.0), (210, 1.18)])
def test_phones_are_found_at_another_pace_in_another_mouth(pitch: float, mouth: float) -> None:
    known = said(110, 1.0, [0.1, 0.12, 0.15, 0.1, 0.12, 0.2, 0.1])
    other = said(pitch, mouth, [0.2, 0.18, 0.1, 0.17, 0.1, 0.15, 0.25])
    found = Aligner()(known, other.samples)
    assert found.samples is other.samples
    np.testing.assert_array_equal(found.phones, other.phones)
    np.testing.assert_allclose(found.ends, other.ends, atol=0.025)


def test_the_path_stays_and_skips() -> None:
    known = np.eye(8)[:6]
    cost, places = path(known[[0, 1, 1, 1, 2, 4, 5]], known)
    np.testing.assert_array_equal(places, [0, 1, 1, 1, 2, 4, 5])
    # Beginning counts as staying; two more stays, and one frame left out.
    assert cost == pytest.approx((0.6 + 2 * 0.6 + 0.6) / 7)


def test_speech_that_is_too_short_ends_where_it_gets() -> None:
    _, places = path(np.eye(9)[:2], np.eye(9))
    assert len(places) == 2 and places[0] <= places[1]


def test_a_tone_keeps_its_pitch_at_another_rate() -> None:
    tone = 10000 * np.sin(2 * np.pi * 440 * np.arange(24000) / 24000)
    found = resampled(tone.astype(np.int16), 24000)
    assert found.dtype == np.int16 and len(found) == 16000
    wanted = 10000 * np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    np.testing.assert_allclose(found[200:-200], wanted[200:-200], atol=20)


def test_no_library_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="libRHVoice"):
        RHVoice("clb", tmp_path)
