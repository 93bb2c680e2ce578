"""MP3 by LAME's own interface, through lameenc.

A call encodes all of its samples without the interpreter lock. Through FFmpeg the lock changes hands several times for
each of a patch's seven frames, and with dozens of streams the threads of a process wait for it more than they encode.
"""

from __future__ import annotations

import lameenc
import numpy as np

LEVEL = 7
"""Without LAME's model of hearing, which would take more than twice the time. With that many bits for one voice there
is no more noise, and it lies in the same bands."""


class Mp3:
    """float32 mono samples (-1..1) in, frames of constant bit rate out: 128 kbit/s from 32 kHz on, below it 64. There
    is no Xing header, which would be written at the front when the stream ends."""

    def __init__(self, sample_rate: int) -> None:
        self._encoder = lameenc.Encoder()
        self._encoder.silence()
        self._encoder.set_channels(1)
        self._encoder.set_in_sample_rate(sample_rate)
        self._encoder.set_out_sample_rate(sample_rate)
        self._encoder.set_bit_rate(128 if sample_rate >= 32_000 else 64)
        self._encoder.set_quality(LEVEL)
        self._begun = False

    def encode(self, samples: np.ndarray) -> bytes:
        if not samples.size:
            return b""
        self._begun = True
        return bytes(self._encoder.encode(np.rint(samples * np.float32(32767)).astype(np.int16).tobytes()))

    def finish(self) -> bytes:
        return bytes(self._encoder.flush()) if self._begun else b""
