"""Reference audio as voices need it: without silence at its ends, of one loudness, and at the rate of the codec.

FFmpeg is imported where it is used: its libraries are large.
"""

from __future__ import annotations

import math

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
    from service.media.ffmpeg_audio import audio_frame, audio_graph, pulled

    graph = audio_graph(sample_rate, ("ebur128", "metadata=1"))
    graph.push(audio_frame(np.ascontiguousarray(wave), sample_rate, 0))
    graph.push(None)
    loudness = -math.inf
    for measured in pulled(graph):
        loudness = float(measured.metadata.get("lavfi.r128.I", loudness))
    return loudness if loudness > -70 else None


RESAMPLER = "filter_type=kaiser:kaiser_beta=10:filter_size=128:cutoff=0.95:exact_rational=1"
"""Options of FFmpeg's resampler: more than 100 dB of alias rejection, flat up to 0.9 of the lower Nyquist frequency."""
REACH = 64
"""Zero crossings of its filter on each side."""


def resample(samples: np.ndarray, rate_in: int, rate_out: int) -> np.ndarray:
    """float32 [n] at rate_in -> float32 [ceil(n * rate_out / rate_in)] at rate_out, without delay."""
    from service.media.ffmpeg_audio import TempoAndRate

    samples = samples.astype(np.float32, copy=False)
    if rate_in == rate_out or not samples.size:
        return samples
    resampler = TempoAndRate(rate_in, rate_out, options=RESAMPLER)
    silence = np.zeros(4 * REACH * math.ceil(max(1, rate_in / rate_out)), np.float32)  # it holds back what is behind
    resampled = [*resampler.push(np.concatenate([samples, silence])), *resampler.flush()]
    return np.concatenate(resampled)[: -(-samples.size * rate_out // rate_in)]
