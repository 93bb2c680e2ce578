"""Encoded audio -> mono samples, with PyAV. Runs in a decode worker."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import chain, groupby

import av
import numpy as np
from av.error import FFmpegError

from models.interfaces.errors import InputError
from service.media.ffmpeg_audio import TempoAndRate
from service.media.file_formats import MATROSKA
from service.media.messages import AudioLimits
from service.media.reference_audio import resample
from service.media.video_decode import open_container

# Whether audio was cut short, where its container tells how much there was.
#
# FFmpeg reads what is left of a WAV, MP3, Matroska or WebM file silently; it refuses cut FLAC, AAC and M4A itself.
# Nothing is known of what was streamed: MP3 without a Xing header, WebM of unknown size. Nor of Ogg: its last page
# should have a flag, but valid files lack it, Android's recordings among them.

# From here on a WAV's size stands for "unknown", as programs write it that do not seek back to the header.
UNKNOWN_WAV_SIZE = 0x7FFF_0000
MOST_CHUNKS = 1000
"""Of a WAV before its samples. A hostile file has millions, which would take seconds and hundreds of megabytes."""
SLIP = 100
"""A file may lack this fraction (1 / n) of what it tells: some programs count the header, too."""
SEGMENT = b"\x18\x53\x80\x67"
_XING_PLACES = (13, 21, 36)
"""Behind the head and the side information of an MP3's first frame: MPEG-2 mono; MPEG-1 mono, MPEG-2 stereo; MPEG-1
stereo."""

Extent = tuple[int, int]
"""(where it begins, bytes from there as the container tells them)"""


def is_cut_short(data: bytes) -> bool:
    """Whether more than 1 / SLIP is missing of what the header of a WAV, MP3, Matroska or WebM file tells."""
    wav = _chunks_of_wav(data).get(b"data")
    extent = wav or _segment_of_matroska(data) or _frames_of_mp3(data)
    if extent is None or (extent is wav and extent[1] >= UNKNOWN_WAV_SIZE):
        return False
    begin, size = extent
    return size - (len(data) - begin) > size // SLIP


def _chunks_of_wav(data: bytes) -> dict[bytes, Extent]:
    """The first of each name, up to the samples; none of another file."""
    found, place = dict[bytes, Extent](), 12 if data[:4] == b"RIFF" and data[8:12] == b"WAVE" else len(data)
    for _ in range(MOST_CHUNKS):
        if place + 8 > len(data) or b"data" in found:
            break
        name, size = data[place : place + 4], int.from_bytes(data[place + 4 : place + 8], "little")
        place += 8
        found.setdefault(name, (place, size))
        place += size + size % 2
    return found


def _segment_of_matroska(data: bytes) -> Extent | None:
    """The element behind the file's head, which holds all else. A live recording does not tell its size (RFC 9559)."""
    head = _ebml_extent(data, len(MATROSKA)) if data.startswith(MATROSKA) else None
    if head is None:
        return None
    begin, size = head
    segment = begin + size
    return _ebml_extent(data, segment + len(SEGMENT)) if data.startswith(SEGMENT, segment) else None


def _ebml_extent(data: bytes, place: int) -> Extent | None:
    """The data of an element whose size is written at `place`; None if the size is unknown (RFC 8794)."""
    first = data[place] if place < len(data) else 0
    length = 9 - first.bit_length() if first else 0
    unknown = (1 << 7 * length) - 1
    size = int.from_bytes(data[place : place + length], "big") & unknown
    return None if size == unknown else (place + length, size)


def _frames_of_mp3(data: bytes) -> Extent | None:
    """All of them, as the Xing header in the first frame tells, which encoders write when they have made the others."""
    place = 0
    if data[:3] == b"ID3":
        place = 10 + sum(byte << shift for byte, shift in zip(data[6:10], (21, 14, 7, 0), strict=False))
    if data[place : place + 1] != b"\xff":
        return None
    for header in (place + offset for offset in _XING_PLACES):
        if data[header : header + 4] in (b"Xing", b"Info"):
            flags = int.from_bytes(data[header + 4 : header + 8], "big")
            size = header + 8 + 4 * (flags & 1)  # behind the number of frames, if that is there
            return (place, int.from_bytes(data[size : size + 4], "big")) if flags & 2 else None
    return None


# The codecs are those of browser and phone recordings, and of WAV files.
CODECS = {
    *("aac", "alac", "flac", "mp3", "mp3float", "opus", "libopus", "vorbis", "libvorbis"),
    *("pcm_u8", "pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s24be", "pcm_s32le", "pcm_s32be", "pcm_f32le", "pcm_f64le"),
    *("pcm_alaw", "pcm_mulaw", "adpcm_ms", "adpcm_ima_wav"),
}
MAX_CHANNELS = 8
MIN_SAMPLE_RATE, MAX_SAMPLE_RATE = 4_000, 192_000
SILENCE = 10 ** (-80 / 20)

LOUDEST = 1e6
"""Amplitudes of a recording are cut there: a filter's sums of far larger ones would not be finite."""
RECORDING_FILTER = "filter_size=64:cutoff=0.97"
"""Options of FFmpeg's resampler: at 16 kHz it is flat to 7.2 kHz."""

BLOCK_FRAMES = 1 << 15
Block = tuple[int, np.ndarray]
"""(sample rate, float32 [frames, channels])"""


def decode_samples(data: bytes, *, sample_rate: int, field: str, limits: AudioLimits) -> np.ndarray:
    """Decode audio to mono float32 [n] at `sample_rate`, peaks at most 1. InputError with `field` as soon as it is
    longer than limits.max_seconds, and for anything that is not audio, damaged, empty or not finite, or silent unless
    it is a recording."""
    blocks = _mono_blocks(data, field, limits)
    if limits.recording:
        pieces = [*_resampled(blocks, sample_rate)]
        if not pieces:  # too few to be resampled
            raise InputError(field, "the audio has no samples")
        samples = np.concatenate(pieces)
        samples /= max(samples.max(initial=1.0), -samples.min(initial=0.0))
        return samples
    found = [*blocks]
    mono = np.concatenate([block for _, block in found])
    peak = float(np.abs(mono).max())
    if peak < SILENCE:
        raise InputError(field, "the audio is silent")
    resampled = resample((mono / max(peak, 1.0)).astype(np.float32), found[0][0], sample_rate)
    return np.clip(resampled, -1.0, 1.0)


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
    """float32 [n] at `sample_rate`, piece by piece: an hour takes too much memory and time as `resample` does it."""
    converter = None
    for rate, block in blocks:
        samples = block.clip(-LOUDEST, LOUDEST).astype(np.float32)
        if rate == sample_rate:
            yield samples
            continue
        converter = converter or TempoAndRate(rate, sample_rate, options=RECORDING_FILTER)
        yield from converter.push(samples)
    if converter is not None:
        yield from converter.flush()


def _blocks(data: bytes, field: str) -> Iterator[Block]:
    if is_cut_short(data):
        raise InputError(field, "the audio is damaged or truncated")
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


def _pcm_of_wav(data: bytes) -> tuple[int, np.ndarray] | None:
    """(sample rate, int16 [frames, channels]) of a whole file of 16-bit samples: FFmpeg reads 2 KB of one at a time."""
    chunks = _chunks_of_wav(data)
    (head, length), (begin, size) = chunks.get(b"fmt ", (0, 0)), chunks.get(b"data", (0, 0))
    kind, channels, rate, _, width, bits = struct.unpack("<HHIIHH", data[head : head + 16].ljust(16))
    plain = length >= 16 and (kind, bits, width) == (1, 16, 2 * channels) and 0 < size <= len(data) - begin
    if not plain or not channels or size % width:
        return None
    return rate, np.frombuffer(data, "<i2", size // 2, begin).reshape(-1, channels)


def _check_format(rate: int, channels: int, field: str) -> None:
    if not MIN_SAMPLE_RATE <= rate <= MAX_SAMPLE_RATE:
        raise InputError(
            field, f"the audio has a sample rate of {rate}; {MIN_SAMPLE_RATE} to {MAX_SAMPLE_RATE} are supported"
        )
    if not 1 <= channels <= MAX_CHANNELS:
        raise InputError(field, f"the audio has {channels} channels; at most {MAX_CHANNELS} are supported")
