"""Reference audio: sample rates are converted without aliases, and voices have one loudness."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models.interfaces.errors import InputError
from service.media.reference_audio import TARGET_LUFS, TARGET_RMS, integrated_loudness, level_reference, resample
from tests.media.samples import tone

RATES = [(44_100, 16_000), (48_000, 16_000), (24_000, 16_000), (16_000, 48_000), (8_000, 48_000), (96_000, 44_100)]


def level(samples: np.ndarray) -> float:
    """Decibels of a signal against a tone of amplitude 0.5, ends left out."""
    inner = samples[len(samples) // 8 : -len(samples) // 8]
    return 20 * np.log10(np.sqrt((inner.astype(np.float64) ** 2).mean()) / (0.5 / np.sqrt(2)) + 1e-12)


@pytest.mark.parametrize(("rate_in", "rate_out"), RATES)
@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.44])
def test_passband_is_exact_in_level_and_time(rate_in: int, rate_out: int, fraction: float) -> None:
    frequency = fraction * min(rate_in, rate_out)
    result = resample(tone(frequency, rate_in), rate_in, rate_out)
    assert result.shape == (rate_out,) and result.dtype == np.float32
    assert level(result - tone(frequency, rate_out)) < -90


@pytest.mark.parametrize(("rate_in", "rate_out"), [pair for pair in RATES if pair[0] > pair[1]])
@pytest.mark.parametrize("fraction", [0.505, 0.6, 0.95])
def test_what_would_alias_is_gone(rate_in: int, rate_out: int, fraction: float) -> None:
    frequency = fraction * rate_out
    if frequency < rate_in / 2:
        assert level(resample(tone(frequency, rate_in), rate_in, rate_out)) < -90


@given(st.integers(0, 3000), st.integers(4_000, 192_000), st.sampled_from([16_000, 24_000, 48_000]))
@example(2, 4_000, 16_000)
@example(255, 4_002, 48_000)
@example(3000, 4_002, 48_000)
@settings(max_examples=4, deadline=None)
def test_any_length_and_rate(count: int, rate_in: int, rate_out: int) -> None:
    result = resample(np.ones(count, np.float32), rate_in, rate_out)
    # Between two samples of 1 alone their band-limited curve rises to 4 / pi.
    assert np.isfinite(result).all() and np.abs(result).max(initial=0) < 4 / np.pi
    assert result.size == -(-count * rate_out // rate_in)


RATE = 16_000


def hum(seconds: float, amplitude: float) -> np.ndarray:
    return (amplitude * np.sin(np.arange(round(seconds * RATE)) * 2 * np.pi * 440 / RATE)).astype(np.float32)


def silence(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * RATE), np.float32)


@pytest.mark.parametrize("amplitude", [0.01, 0.1, 0.9])
def test_long_clips_have_one_loudness(amplitude: float) -> None:
    wave = np.concatenate([silence(1), hum(4, amplitude), silence(2)])
    levelled = level_reference(wave, RATE, "clip")
    assert integrated_loudness(levelled, RATE) == pytest.approx(TARGET_LUFS, abs=0.3)
    assert 4 * RATE <= len(levelled) <= 4.25 * RATE
    assert levelled.dtype == np.float32


@pytest.mark.parametrize("amplitude", [0.01, 0.5])
def test_short_clips_have_one_rms(amplitude: float) -> None:
    levelled = level_reference(np.concatenate([silence(0.5), hum(1, amplitude)]), RATE, "clip")
    heard = levelled[len(levelled) - RATE :]
    assert 10 * np.log10(np.mean(np.square(heard))) == pytest.approx(TARGET_RMS, abs=0.3)


def test_peaks_stay_below_full_scale() -> None:
    wave = hum(4, 0.02)
    wave[RATE] = 0.8
    assert np.abs(level_reference(wave, RATE, "clip")).max() <= 0.9001


def test_pauses_inside_stay() -> None:
    wave = np.concatenate([hum(1, 0.1), silence(1), hum(1, 0.1)])
    assert len(level_reference(wave, RATE, "clip")) == len(wave)


@pytest.mark.parametrize(
    ("wave", "reason"),
    [
        (np.concatenate([silence(1), hum(0.1, 0.5), silence(1)]), "too short: 0.1"),
        (hum(4, 0.002), "too quiet: its loudest part has -57 dBFS"),
        (silence(1), "too quiet"),
    ],
)
def test_what_makes_no_voice_is_refused(wave: np.ndarray, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as refused:
        level_reference(wave, RATE, "clip")
    assert refused.value.field == "clip"
