"""Messages to frames and back: one msgpack frame, then one raw frame per array.

Arrays are not copied: an encoder returns views of their memory, a decoder makes read-only arrays over the received
frames. dtype and shape are checked against the frame's length, and dtypes that could hold objects do not exist here.
"""

from __future__ import annotations

import math
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


class WireError(ValueError):
    """Frames that are not a message of this protocol."""


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
            raise WireError(f"arrays of dtype {value.dtype} are not sent; known are {sorted(DTYPES)}")
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
        """The message; WireError when the frames do not hold one."""
        if not frames:
            raise WireError("a message has at least one frame")
        self._frames = frames[1:]
        try:
            return self._decoder.decode(frames[0])
        except msgspec.DecodeError as error:
            raise WireError(f"not a message of this protocol: {error}") from error
        finally:
            self._frames = ()

    def _lower(self, wanted: type, value: Any) -> Any:
        if wanted is not np.ndarray:
            raise WireError(f"{wanted} is not part of the protocol")
        header = msgspec.convert(value, ArrayHeader)
        if header.dtype not in DTYPES:
            raise WireError(f"array of dtype {header.dtype!r}; known are {sorted(DTYPES)}")
        if not 0 <= header.frame < len(self._frames):
            raise WireError(f"array frame {header.frame} of {len(self._frames)}")
        dtype = np.dtype(header.dtype)
        frame = memoryview(self._frames[header.frame])
        if min(header.shape, default=0) < 0 or frame.nbytes != math.prod(header.shape) * dtype.itemsize:
            raise WireError(f"array frame of {frame.nbytes} bytes for shape {header.shape} of {header.dtype}")
        array = np.frombuffer(frame, dtype=dtype).reshape(header.shape)
        array.flags.writeable = False
        return array
