"""Sample rates are converted without aliases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from service.media.reference_audio import resample
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


@pytest.mark.parametrize(("rate_in", "rate_out"), [(8_000, 48_000), (16_000, 44_100)])
def test_no_images_above_the_old_nyquist_frequency(rate_in: int, rate_out: int) -> None:
    spectrum = np.abs(np.fft.rfft(resample(tone(0.3 * rate_in, rate_in), rate_in, rate_out) * np.hanning(rate_out)))
    assert 20 * np.log10(spectrum[rate_in // 2 + 50 :].max() / spectrum.max()) < -90


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
