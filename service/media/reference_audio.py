"""Reference audio as voices need it: without silence at its ends, of one loudness, and at the rate of the codec."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache
from math import ceil

import numpy as np

from models.interfaces.errors import InputError

FRAME_SECONDS = 0.02
MARGIN_SECONDS = 0.1
"""Kept on either side of what is heard."""
BELOW_LOUDEST = 40.0
"""dB under the loudest frame, below which a frame counts as silence."""
QUIETEST = -50.0
"""dBFS (RMS) that the loudest frame must reach."""
SHORTEST = 0.3
"""Seconds of what is heard."""
LOUDNESS_SECONDS = 3.0
"""Shorter audio has no loudness by EBU R128, whose short-term window this is; it is levelled by its RMS."""
TARGET_LUFS = -20.0
TARGET_RMS = -20.0
"""dBFS, of the frames that are heard."""
MAX_GAIN = 30.0
"""dB."""
PEAK = 0.9


def level_reference(wave: np.ndarray, sample_rate: int, field: str) -> np.ndarray:
    """float32 [n] mono -> float32 [m], trimmed and levelled. InputError with `field` when it is too short or too quiet.

    EBU R128 by FFmpeg's filter `ebur128`; the gain is one number for the whole clip and keeps peaks at most PEAK.
    """
    levels = _frame_levels(wave, sample_rate)
    loudest = float(levels.max(initial=-math.inf))
    if loudest < QUIETEST:
        raise InputError(
            field, f"too quiet: its loudest part has {max(loudest, -120):.0f} dBFS, at least {QUIETEST:.0f} needed"
        )
    heard = np.flatnonzero(levels >= max(loudest - BELOW_LOUDEST, QUIETEST - 10))
    frame = round(FRAME_SECONDS * sample_rate)
    margin = round(MARGIN_SECONDS * sample_rate)
    begin, end = int(heard[0]) * frame, min(len(wave), (int(heard[-1]) + 1) * frame)
    seconds = (end - begin) / sample_rate
    if seconds < SHORTEST:
        raise InputError(field, f"too short: {seconds:.2f} s of sound between silences, at least {SHORTEST:g} s needed")
    trimmed = wave[max(0, begin - margin) : end + margin]
    return _levelled(trimmed, sample_rate, 10 ** (levels[heard] / 10))


def _frame_levels(wave: np.ndarray, sample_rate: int) -> np.ndarray:
    """dBFS (RMS) of each frame; the last may be shorter."""
    frame = round(FRAME_SECONDS * sample_rate)
    squares = np.square(wave.astype(np.float64))
    starts = np.arange(0, len(wave), frame)
    sizes = np.minimum(frame, len(wave) - starts)
    with np.errstate(divide="ignore"):
        return np.asarray(10 * np.log10(np.add.reduceat(squares, starts) / sizes)) if len(wave) else np.zeros(0)


def _levelled(wave: np.ndarray, sample_rate: int, heard: np.ndarray) -> np.ndarray:
    """heard: mean squares of the frames that are heard."""
    loudness = integrated_loudness(wave, sample_rate) if len(wave) >= LOUDNESS_SECONDS * sample_rate else None
    gain = TARGET_RMS - 10 * math.log10(heard.mean()) if loudness is None else TARGET_LUFS - loudness
    factor = 10 ** (min(gain, MAX_GAIN) / 20)
    factor = min(factor, PEAK / max(float(np.abs(wave).max()), 1e-9))
    return (wave * np.float32(factor)).astype(np.float32, copy=False)


def integrated_loudness(wave: np.ndarray, sample_rate: int) -> float | None:
    """LUFS of float32 [n] mono by EBU R128; None where all of it is below the standard's gate."""
    from service.media.ffmpeg_audio import audio_frame, audio_graph, pulled  # FFmpeg's libraries are large

    graph = audio_graph(sample_rate, ("ebur128", "metadata=1"))
    graph.push(audio_frame(np.ascontiguousarray(wave), sample_rate, 0))
    graph.push(None)
    loudness = -math.inf
    for measured in pulled(graph):
        loudness = float(measured.metadata.get("lavfi.r128.I", loudness))
    return loudness if loudness > -70 else None


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
