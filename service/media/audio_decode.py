"""Encoded audio -> mono samples, with PyAV. Runs in a decode worker."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator
from itertools import chain, groupby

import av
import numpy as np
from av.error import FFmpegError

from models.interfaces.errors import InputError
from service.media.ffmpeg_audio import TempoAndRate
from service.media.messages import AudioLimits
from service.media.reference_audio import RESAMPLER
from service.media.video_decode import open_container

# The codecs are those of browser and phone recordings, and of WAV files.
CODECS = {
    *("aac", "alac", "flac", "mp3", "mp3float", "opus", "libopus", "vorbis", "libvorbis"),
    *("pcm_u8", "pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s24be", "pcm_s32le", "pcm_s32be", "pcm_f32le", "pcm_f64le"),
    *("pcm_alaw", "pcm_mulaw", "adpcm_ms", "adpcm_ima_wav"),
}
MAX_CHANNELS = 8
MIN_SAMPLE_RATE, MAX_SAMPLE_RATE = 4_000, 192_000
SILENCE = 10 ** (-80 / 20)

LOUDEST = 1e36
"""Amplitudes are cut there: a filter's sums of larger ones would not be finite."""

BLOCK_FRAMES = 1 << 15
Block = tuple[int, np.ndarray]
"""(sample rate, float32 [frames, channels])"""


def decode_samples(data: bytes, *, sample_rate: int, field: str, limits: AudioLimits) -> np.ndarray:
    """Decode audio to mono float32 [n] at `sample_rate`, peaks at most 1. InputError with `field` as soon as it is
    longer than limits.max_seconds, and for anything that is not audio, damaged, empty or not finite, or silent unless
    it is a recording."""
    pieces = [*_resampled(_mono_blocks(data, field, limits), sample_rate)]
    if not pieces:  # too few to be resampled
        raise InputError(field, "the audio has no samples")
    samples = np.concatenate(pieces)
    peak = max(samples.max(), -samples.min())
    if peak < SILENCE and not limits.recording:
        raise InputError(field, "the audio is silent")
    samples /= max(peak, np.float32(1.0))
    return samples


def _mono_blocks(data: bytes, field: str, limits: AudioLimits) -> Iterator[Block]:
    """(sample rate, float64 [frames]), at least one; the rate is the same for all."""
    count = 0
    for rate, block in _blocks(data, field):
        count += len(block)
        if count > limits.max_seconds * rate:
            raise InputError(field, f"the audio is too long: at most {limits.max_seconds:g} seconds allowed")
        # In float64: a sum of float32 samples near the largest number would overflow.
        mono = np.ascontiguousarray(block.T).mean(axis=0, dtype=np.float64)
        if not np.isfinite(mono).all():
            raise InputError(field, "the audio has samples that are not finite numbers")
        yield rate, mono
    if count == 0:
        raise InputError(field, "the audio has no samples")


def _resampled(blocks: Iterator[Block], sample_rate: int) -> Iterator[np.ndarray]:
    """float32 [n] at `sample_rate`, piece by piece: an hour would take too much memory at once."""
    converter = None
    for rate, block in blocks:
        samples = block.clip(-LOUDEST, LOUDEST).astype(np.float32)
        if rate == sample_rate:
            yield samples
            continue
        converter = converter or TempoAndRate(rate, sample_rate, options=RESAMPLER)
        yield from converter.push(samples)
    if converter is not None:
        yield from converter.flush()


def _blocks(data: bytes, field: str) -> Iterator[Block]:
    if (pcm := _pcm_of_wav(data)) is not None:
        rate, samples = pcm
        _check_format(rate, samples.shape[1], field)
        for start in range(0, len(samples), BLOCK_FRAMES):
            yield rate, samples[start : start + BLOCK_FRAMES] / np.float32(32768)
        return
    with open_container(data, "audio", CODECS, field) as container:
        stream = next(iter(container.streams.audio), None)
        if stream is None or stream.codec_context is None or stream.codec_context.name not in CODECS:
            raise InputError(field, "the file has no audio stream in a supported codec")
        rate = 0
        try:
            # Files that were joined may change their channels.
            for _, frames in groupby(container.decode(stream), lambda frame: (frame.format.name, frame.layout.name)):
                # Frames have 20 to 60 ms, for which NumPy's calls take longer than the decoder. Not "fltp": PyAV reads
                # a ninth plane of eight.
                resampler = av.AudioResampler(format="flt", frame_size=BLOCK_FRAMES)
                for frame in chain(frames, [None]):
                    if frame is not None:
                        rate = rate or frame.sample_rate
                        if frame.sample_rate != rate:
                            raise InputError(field, "the audio changes its sample rate")
                        _check_format(rate, frame.layout.nb_channels, field)
                    for converted in resampler.resample(frame):
                        yield converted.sample_rate, converted.to_ndarray().reshape(converted.samples, -1)
        except (FFmpegError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(field, "the audio is damaged") from error


MOST_CHUNKS = 1000
"""Of a WAV before its samples: `wave` reads them one at a time, and a hostile file has millions."""


def _pcm_of_wav(data: bytes) -> tuple[int, np.ndarray] | None:
    """(sample rate, int16 [frames, channels]) of a file of 16-bit samples: FFmpeg reads 2 KB of one at a time."""
    place = 12
    for _ in range(MOST_CHUNKS):
        if data[place : place + 4] == b"data":
            break
        place += 8 + int.from_bytes(data[place + 4 : place + 8], "little")
        place += place % 2
    else:
        return None
    try:
        with wave.open(io.BytesIO(data)) as file:
            if file.getsampwidth() != 2:
                return None
            rate, channels, samples = file.getframerate(), file.getnchannels(), file.readframes(file.getnframes())
    except Exception:  # on hostile bytes wave raises anything; FFmpeg judges them
        return None
    frames = len(samples) // (2 * channels)
    if not frames:  # as of one whose header says 0 for a length that is not known
        return None
    return rate, np.frombuffer(samples, "<i2", frames * channels).reshape(frames, channels)


def _check_format(rate: int, channels: int, field: str) -> None:
    if not MIN_SAMPLE_RATE <= rate <= MAX_SAMPLE_RATE:
        raise InputError(
            field, f"the audio has a sample rate of {rate}; {MIN_SAMPLE_RATE} to {MAX_SAMPLE_RATE} are supported"
        )
    if not 1 <= channels <= MAX_CHANNELS:
        raise InputError(field, f"the audio has {channels} channels; at most {MAX_CHANNELS} are supported")
