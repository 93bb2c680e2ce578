"""Encoded audio -> mono samples. Runs in a decode worker: soundfile for WAV, FLAC, Ogg and MP3, PyAV for the rest."""

from __future__ import annotations

import io
from collections.abc import Iterator

import av
import numpy as np
import soundfile
from av.error import FFmpegError

from models.interfaces.errors import InputError
from service.media.cut_audio import is_cut_short
from service.media.file_formats import readers, refusal
from service.media.limits import AudioLimits
from service.media.resample import resample

# The codecs are those of browser and phone recordings.
FORMATS = ",".join(readers("audio"))
CODECS = frozenset(
    (
        *("aac", "alac", "flac", "mp3", "mp3float", "opus", "libopus", "vorbis", "libvorbis"),
        *("pcm_u8", "pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s24be", "pcm_s32le", "pcm_s32be", "pcm_f32le"),
    )
)
MAX_CHANNELS = 8
MIN_SAMPLE_RATE, MAX_SAMPLE_RATE = 4_000, 192_000
BLOCK_FRAMES = 16_384
# libsndfile reports such lengths for unfinished FLAC streams, of which it cannot read more than the first block.
UNKNOWN_LENGTH = 1 << 40
SILENCE = 10 ** (-80 / 20)

Block = tuple[int, np.ndarray]
"""(sample rate, float32 [frames, channels])"""


def decode_samples(data: bytes, *, sample_rate: int, field: str, limits: AudioLimits) -> np.ndarray:
    """Decodes audio to mono float32 [n] at `sample_rate`, peaks at most 1.

    Samples are counted while they are decoded: audio longer than limits.max_seconds is refused as soon as that is
    known. Raises InputError with `field` for it, and for anything that is not audio, damaged, empty, silent or has
    samples that are not finite.
    """
    parts: list[np.ndarray] = []
    count, rate = 0, 0
    for block_rate, block in _blocks(data, field):
        if rate == 0:
            rate = block_rate
            _check_format(rate, block.shape[1], field)
        elif block_rate != rate:
            raise InputError(field, "the audio changes its sample rate")
        count += len(block)
        if count > limits.max_seconds * rate:
            raise InputError(field, f"the audio is too long: at most {limits.max_seconds:g} seconds allowed")
        # In float64: a sum of float32 samples near the largest number would overflow.
        parts.append(block.mean(axis=1, dtype=np.float64))
    if count == 0:
        raise InputError(field, "the audio has no samples")
    mono = np.concatenate(parts)
    if not np.isfinite(mono).all():
        raise InputError(field, "the audio has samples that are not finite numbers")
    peak = float(np.abs(mono).max())
    if peak < SILENCE:
        raise InputError(field, "the audio is silent")
    resampled = resample((mono / max(peak, 1.0)).astype(np.float32), rate, sample_rate)
    return np.clip(resampled, -1.0, 1.0)


def _blocks(data: bytes, field: str) -> Iterator[Block]:
    if is_cut_short(data):
        raise InputError(field, "the audio is damaged or truncated")
    if _for_soundfile(data):
        try:
            file = soundfile.SoundFile(io.BytesIO(data))
        except soundfile.LibsndfileError:
            pass  # FFmpeg may be able to read it, e.g. AAC after an ID3 tag
        else:
            with file:
                if file.frames < UNKNOWN_LENGTH:
                    yield from _read_soundfile(file, field)
                    return
    yield from _read_av(data, field)


def _for_soundfile(data: bytes) -> bool:
    """Only these four formats are passed to libsndfile, which would guess among dozens."""
    if data[:4] in (b"RIFF", b"RF64"):
        return data[8:12] == b"WAVE"
    mpeg_frame = len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0 and data[1] & 0x06 != 0
    return data[:4] in (b"fLaC", b"OggS") or data[:3] == b"ID3" or mpeg_frame


def _read_soundfile(file: soundfile.SoundFile, field: str) -> Iterator[Block]:
    # Before the first block: a header with a thousand channels would make blocks of gigabytes.
    _check_format(file.samplerate, file.channels, field)
    while True:
        try:
            block = file.read(BLOCK_FRAMES, dtype="float32", always_2d=True)
        except (soundfile.LibsndfileError, RuntimeError) as error:
            raise InputError(field, "the audio is damaged") from error
        if not len(block):
            return
        yield file.samplerate, block


def _read_av(data: bytes, field: str) -> Iterator[Block]:
    options = {
        "format_whitelist": FORMATS,
        "protocol_whitelist": "none",
        "codec_whitelist": ",".join(sorted(CODECS)),
    }
    try:
        container = av.open(io.BytesIO(data), "r", options=options, metadata_errors="replace")
    except FFmpegError as error:
        raise InputError(field, refusal(data, "audio")) from error
    with container:
        stream = next(iter(container.streams.audio), None)
        if stream is None or stream.codec_context is None or stream.codec_context.name not in CODECS:
            raise InputError(field, "the file has no audio stream in a supported codec")
        resampler = av.AudioResampler(format="fltp")
        try:
            for frame in container.decode(stream):
                _check_format(frame.sample_rate, frame.layout.nb_channels, field)
                for converted in resampler.resample(frame):
                    yield converted.sample_rate, converted.to_ndarray().T
        except (FFmpegError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(field, "the audio is damaged") from error


def _check_format(rate: int, channels: int, field: str) -> None:
    if not MIN_SAMPLE_RATE <= rate <= MAX_SAMPLE_RATE:
        raise InputError(
            field, f"the audio has a sample rate of {rate}; {MIN_SAMPLE_RATE} to {MAX_SAMPLE_RATE} are supported"
        )
    if not 1 <= channels <= MAX_CHANNELS:
        raise InputError(field, f"the audio has {channels} channels; at most {MAX_CHANNELS} are supported")
