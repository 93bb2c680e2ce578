"""Messages to frames and back: one msgpack frame, then one raw frame per array.

Arrays are not copied: an encoder returns views of their memory, a decoder makes read-only arrays over the received
frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

Frame = bytes | bytearray | memoryview

DTYPES = frozenset({"bool", "uint8", "int16", "int32", "int64", "float16", "float32"})

_SMALL = 1 << 20
"""Bytes of a message up to which a socket copies the frames. When it borrows their memory instead, a thread of ZeroMQ's
releases it afterwards and needs the interpreter lock for that, which takes longer than copying the 0.6 MB of a picture
of 448 x 448."""

Message = TypeVar("Message")


class ArrayHeader(msgspec.Struct, frozen=True, array_like=True):
    """Stands for an array inside the msgpack frame; `frame` counts from 0 behind it."""

    frame: int
    dtype: str
    shape: tuple[int, ...]


def encode(message: Any) -> list[Frame]:
    """Frames of a message. Arrays must not be written to until the frames are sent."""
    frames: list[Frame] = [b""]

    def lift(value: Any) -> ArrayHeader:
        if not isinstance(value, np.ndarray):
            raise NotImplementedError(f"{type(value).__name__} is not part of the protocol")
        dtype = value.dtype.name
        if dtype not in DTYPES or not value.dtype.isnative:
            raise ValueError(f"arrays of dtype {value.dtype} are not sent; known are {sorted(DTYPES)}")
        frames.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        return ArrayHeader(len(frames) - 2, dtype, value.shape)

    frames[0] = msgspec.msgpack.encode(message, enc_hook=lift)
    return frames


def is_small(frames: Sequence[Frame]) -> bool:
    """Whether a socket should copy the frames instead of borrowing their memory."""
    return sum(map(len, frames)) <= _SMALL


class MessageDecoder(Generic[Message]):
    """Decodes messages of one type. Not thread-safe."""

    def __init__(self, message_type: Any) -> None:
        self._frames: Sequence[Frame] = ()
        self._decoder = msgspec.msgpack.Decoder(message_type, dec_hook=self._lower)

    def decode(self, frames: Sequence[Frame]) -> Message:
        """Raises what msgspec and NumPy do when the frames are no message."""
        self._frames = frames[1:]
        try:
            return self._decoder.decode(frames[0])
        finally:
            self._frames = ()

    def _lower(self, _: type, value: Any) -> np.ndarray:
        header = msgspec.convert(value, ArrayHeader)
        array = np.frombuffer(self._frames[header.frame], np.dtype(header.dtype)).reshape(header.shape)
        array.flags.writeable = False
        return array
