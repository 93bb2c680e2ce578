"""Samples -> encoded audio, as it is made: the response formats of /v1/audio/speech, through LAME and PyAV.

PyAV is imported when first used: FFmpeg's libraries are large, and raw formats do not need them.
"""

from __future__ import annotations

import asyncio
import struct
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

import lameenc
import numpy as np

from models.interfaces.errors import InputError
from service.media.audio_formats import FORMATS, LAME, content_type
from service.system.concurrency import shielded

if TYPE_CHECKING:
    from service.media.ffmpeg_audio import Codec, TempoAndRate
MIN_SPEED, MAX_SPEED = 0.25, 4.0
WAV_HEADER = 44
"""Bytes."""
FLAC_SAMPLES = slice(18, 26)
"""Bytes of a FLAC file: the 64-bit field of STREAMINFO whose 36 lowest bits are the number of samples."""


class StreamingEncoder:
    """Encode one audio stream: float32 mono samples in, the bytes of a file out. Returned bytes never change.

    At speed 1 less than 100 ms of audio is held back. Sizes in a wav header are 0xFFFFFFFF (unknown). speed changes the
    tempo, not the pitch. Non-finite samples become silence, the others are clipped to -1..1. The first call of encode()
    or finish() sets up FFmpeg, which may take half a second. InputError names response_format, sample_rate or speed.
    """

    def __init__(self, name: str, sample_rate_in: int, sample_rate_out: int, speed: float = 1.0) -> None:
        if name not in FORMATS:
            raise InputError("response_format", f"{name!r} is not one of {', '.join(FORMATS)}")
        chosen = FORMATS[name]
        if sample_rate_out not in chosen.rates:
            rates = ", ".join(map(str, chosen.rates))
            raise InputError("sample_rate", f"{sample_rate_out} given, {name} supports {rates}")
        if not MIN_SPEED <= speed <= MAX_SPEED:
            raise InputError("speed", f"{speed} given, must be between {MIN_SPEED} and {MAX_SPEED}")
        self.content_type = content_type(name, sample_rate_out)
        self._name = name
        self._rate_in = sample_rate_in
        self._rate_out = sample_rate_out
        self._speed = speed
        self._unchanged = speed == 1.0 and sample_rate_in == sample_rate_out
        self._samples = 0
        """Number at the rate of the output that the codec was given."""

    @property
    def is_raw(self) -> bool:
        """Samples are only converted to integers, neither filtered nor compressed."""
        return self._unchanged and not FORMATS[self._name].codec

    @property
    def needs_ffmpeg(self) -> bool:
        return not self._unchanged or FORMATS[self._name].codec not in ("", LAME)

    @cached_property
    def _filter(self) -> TempoAndRate | None:
        if self._unchanged:
            return None
        from service.media.ffmpeg_audio import TempoAndRate

        return TempoAndRate(self._rate_in, self._rate_out, self._speed)

    @cached_property
    def _codec(self) -> Codec | Mp3 | _Raw:
        chosen = FORMATS[self._name]
        if not chosen.codec:
            return _Raw(wav_header(self._rate_out) if self._name == "wav" else b"")
        if chosen.codec == LAME:
            return Mp3(self._rate_out)
        from service.media.ffmpeg_audio import Codec

        return Codec(chosen, self._rate_out)

    def encode(self, samples: np.ndarray) -> bytes:
        """float32 [n] -> the bytes that are ready now, possibly none."""
        if self._filter is None:
            return self._encode(samples)
        return b"".join(map(self._encode, self._filter.push(_clean(samples))))

    def finish(self) -> bytes:
        """The rest: what filter and encoder hold back, and the end of the container."""
        rest = () if self._filter is None else self._filter.flush()
        return b"".join(map(self._encode, rest)) + self._codec.finish()

    def complete(self, data: bytearray) -> None:
        """Writes into the header of the whole file, after finish(), what was unknown when it was streamed: the sizes of
        wav, the number of samples of flac. Other formats stay as they are."""
        if self._name == "wav":
            struct.pack_into("<I", data, 4, len(data) - 8)
            struct.pack_into("<I", data, 40, len(data) - WAV_HEADER)
        if self._name == "flac":
            data[FLAC_SAMPLES] = (int.from_bytes(data[FLAC_SAMPLES], "big") | self._samples).to_bytes(8, "big")

    def _encode(self, samples: np.ndarray) -> bytes:
        """Of the rate of the output. Resampling can overshoot, so that what a filter gives is clipped, too."""
        self._samples += len(samples)
        return self._codec.encode(_clean(samples))


INLINE_SAMPLES = 1 << 14
"""Up to so many raw samples are converted in the event loop: faster than handing them to a thread."""


class EncoderPool:
    """Threads that encode outside the event loop; LAME and FFmpeg release the interpreter lock."""

    def __init__(self, size: int) -> None:
        self._threads = ThreadPoolExecutor(max_workers=size, thread_name_prefix="encode")
        self._imported: Future[ModuleType] | None = None

    def import_ffmpeg(self) -> Future[ModuleType]:
        """Import FFmpeg in a thread, once. The first answer would wait for it, if it began with the answer."""
        if self._imported is None:
            self._imported = self._threads.submit(import_module, "service.media.ffmpeg_audio")
        return self._imported

    async def prepare(self, encoder: StreamingEncoder) -> None:
        """Wait until FFmpeg is imported, if the encoder needs it. ImportError before an answer has begun."""
        if encoder.needs_ffmpeg:
            await shielded(asyncio.wrap_future(self.import_ffmpeg()))

    async def encode(self, encoder: StreamingEncoder, samples: np.ndarray) -> bytes:
        """`encoder.encode(samples)`. At most one call at a time per encoder."""
        if encoder.is_raw and len(samples) <= INLINE_SAMPLES:
            return encoder.encode(samples)
        return await asyncio.get_running_loop().run_in_executor(self._threads, encoder.encode, samples)

    async def finish(self, encoder: StreamingEncoder) -> bytes:
        if encoder.is_raw:
            return encoder.finish()
        return await asyncio.get_running_loop().run_in_executor(self._threads, encoder.finish)

    def close(self) -> None:
        self._threads.shutdown()


def wav_header(sample_rate: int) -> bytes:
    """The 44-byte header of a 16-bit mono WAV file of unknown length."""
    unknown = 0xFFFFFFFF
    form = struct.pack("<4sI4s", b"RIFF", unknown, b"WAVE")
    layout = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, sample_rate, 2 * sample_rate, 2, 16)
    return form + layout + struct.pack("<4sI", b"data", unknown)


class _Raw:
    """16-bit little-endian samples behind an optional header."""

    def __init__(self, header: bytes) -> None:
        self._pending = header

    def encode(self, samples: np.ndarray) -> bytes:
        header, self._pending = self._pending, b""
        scaled = samples * np.float32(32767)
        return header + np.rint(scaled, out=scaled).astype("<i2").tobytes()

    def finish(self) -> bytes:
        header, self._pending = self._pending, b""
        return header


LAME_QUALITY = 7
"""Without LAME's model of hearing, which would take more than twice the time. With that many bits for one voice there
is no more noise, and it lies in the same bands."""


class Mp3:
    """float32 mono samples (-1..1) in, frames of constant bit rate out: 128 kbit/s from 32 kHz on, below it 64, without
    a Xing header. lameenc encodes all samples of a call without the interpreter lock; through FFmpeg the lock changes
    hands several times a frame, for which the threads of dozens of streams wait more than they encode."""

    def __init__(self, sample_rate: int) -> None:
        self._encoder = lameenc.Encoder()
        self._encoder.silence()
        self._encoder.set_channels(1)
        self._encoder.set_in_sample_rate(sample_rate)
        self._encoder.set_out_sample_rate(sample_rate)
        self._encoder.set_bit_rate(128 if sample_rate >= 32_000 else 64)
        self._encoder.set_quality(LAME_QUALITY)
        self._begun = False

    def encode(self, samples: np.ndarray) -> bytes:
        if not samples.size:
            return b""
        self._begun = True
        return bytes(self._encoder.encode(np.rint(samples * np.float32(32767)).astype(np.int16).tobytes()))

    def finish(self) -> bytes:
        return bytes(self._encoder.flush()) if self._begun else b""


def _clean(samples: np.ndarray) -> np.ndarray:
    samples = samples.astype(np.float32, copy=False)
    if samples.size and samples.min() >= -1.0 and samples.max() <= 1.0:  # false for NaN
        return np.ascontiguousarray(samples)
    if not np.isfinite(samples).all():
        samples = np.nan_to_num(samples, nan=0.0, posinf=0.0, neginf=0.0)
    return np.ascontiguousarray(samples.clip(-1.0, 1.0))
