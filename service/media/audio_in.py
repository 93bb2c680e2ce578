"""Reference audio and voice uploads: encoded bytes -> mono samples, decoded in a worker process."""

from __future__ import annotations

import numpy as np

from models.interfaces.errors import InputError
from service.confined.channel import ProtocolError, WorkerChannel
from service.confined.workers import WorkerLost, WorkerPool
from service.media.limits import AudioLimits
from service.media.messages import DecodeAudio, Samples, expect


async def decode_audio(
    pool: WorkerPool, data: bytes, *, sample_rate: int, field: str, limits: AudioLimits
) -> np.ndarray:
    """WAV, FLAC, Ogg, MP3, M4A, AAC or WebM bytes -> mono float32 [n] at `sample_rate`, within -1..1.

    Raises InputError with `field` for anything that is not audio, is damaged, empty, silent, longer than
    limits.max_seconds, or costs too much to decode.
    """
    if len(data) > limits.max_bytes:
        raise InputError(field, f"the audio is too large: {len(data)} bytes given, at most {limits.max_bytes} allowed")

    def job(channel: WorkerChannel) -> np.ndarray:
        channel.send(DecodeAudio(field, sample_rate, limits), data)
        count = expect(channel.receive(), Samples).count
        if not 0 < count <= limits.max_seconds * sample_rate + 1:
            raise ProtocolError(f"{count} samples")
        samples = np.empty(count, np.float32)
        channel.receive_into(samples.data.cast("B"))
        return samples

    try:
        return await pool.run(job)
    except WorkerLost as error:
        raise InputError(field, "the audio takes more memory or time to decode than allowed") from error
