"""Band-limited resampling of a complete recording."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from math import ceil

import numpy as np

# A Kaiser-windowed sinc of 64 zero crossings on each side: about 100 dB of alias rejection, flat up to 0.9 of the
# lower Nyquist frequency (J. O. Smith, Digital Audio Resampling; Kaiser's design formula for beta).
ZERO_CROSSINGS = 64
ROLLOFF = 0.95
BETA = 10.0
WINDOW_POINTS = 1 << 14
BLOCK = 8192
# Rates without a common divisor (44101 : 16000) take the nearest fraction with at most this many phases. Next to a
# simple one (4002 : 48000 to 1 : 12) it is off by 6e-5 at most, a thousandth of a semitone.
MAX_PHASES = 8192


def resample(samples: np.ndarray, rate_in: int, rate_out: int) -> np.ndarray:
    """float32 [n] at rate_in -> float32 [ceil(n * rate_out / rate_in)] at rate_out, without delay."""
    if rate_in == rate_out or samples.size == 0:
        return samples.astype(np.float32, copy=False)
    step = Fraction(rate_in, rate_out).limit_denominator(MAX_PHASES)
    count = ceil(Fraction(samples.size * rate_out, rate_in))
    cutoff = ROLLOFF * min(1.0, float(1 / step))
    reach = ceil(ZERO_CROSSINGS / cutoff)
    beyond = max(0, ceil((count - 1) * step) - samples.size)  # of the last output, where the fraction is too large
    padded = np.pad(samples.astype(np.float32, copy=False), (reach, reach + beyond))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach)
    taps = np.arange(2 * reach) - reach
    out = np.empty(count, np.float32)
    # Outputs phase, phase + denominator, ... lie at one fraction between input samples and share their coefficients.
    for phase in range(min(step.denominator, count)):
        base, remainder = divmod(phase * step.numerator, step.denominator)
        coefficients = _kernel(taps - remainder / step.denominator, cutoff, reach)
        target = out[phase :: step.denominator]
        source = windows[base :: step.numerator]
        for start in range(0, target.size, BLOCK):
            block = np.ascontiguousarray(source[start : min(start + BLOCK, target.size)])
            target[start : start + BLOCK] = block @ coefficients
    return out


def _kernel(offsets: np.ndarray, cutoff: float, reach: int) -> np.ndarray:
    """Impulse response at distances in input samples, float32."""
    places, values = _kaiser_window()
    return (cutoff * np.sinc(cutoff * offsets) * np.interp(np.abs(offsets) / reach, places, values)).astype(np.float32)


@cache
def _kaiser_window() -> tuple[np.ndarray, np.ndarray]:
    """The window's right half, at places 0 to 1."""
    places = np.linspace(0, 1, WINDOW_POINTS)
    return places, np.i0(BETA * np.sqrt(1 - places**2)) / np.i0(BETA)
