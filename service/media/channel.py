"""What the API process and a decode worker say to each other: typed msgpack messages and raw blobs over a socket.

Each piece is preceded by its length (8 bytes, little endian). No pickle: a worker that was taken over by a hostile
file can send nothing but these structs and bytes of an expected size.
"""

from __future__ import annotations

import socket
import time
from typing import Any, TypeVar

import msgspec

from models.errors import InputError
from models.media import VideoMetadata
from service.media.limits import AudioLimits, VideoLimits

MAX_MESSAGE_BYTES = 1 << 20


class ProtocolError(Exception):
    """The other side did not keep to the conversation."""


class Struct(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages; the tag is the class name. `field` is the request field that errors name."""


# API process -> worker


class OpenVideo(Struct, frozen=True):
    """Followed by the container's bytes. Answered by VideoOpened."""

    field: str
    limits: VideoLimits


class ReadFrames(Struct, frozen=True):
    """Frames of the opened video, indices ascending. Answered by one Frame each and Done."""

    indices: tuple[int, ...]


class DecodeAudio(Struct, frozen=True):
    """Followed by the clip's bytes. Answered by Samples."""

    field: str
    sample_rate: int
    limits: AudioLimits


# Worker -> API process


class VideoOpened(Struct, frozen=True):
    metadata: VideoMetadata


class Frame(Struct, frozen=True):
    """Followed by uint8 [height, width, 3]. `time` in seconds from the first frame."""

    index: int
    time: float


class Samples(Struct, frozen=True):
    """Followed by float32 [count]."""

    count: int


class Done(Struct, frozen=True):
    pass


class Refused(Struct, frozen=True):
    """The input's fault: raised as InputError."""

    field: str
    message: str


Job = OpenVideo | ReadFrames | DecodeAudio
Reply = VideoOpened | Frame | Samples | Done | Refused
T = TypeVar("T")


class Channel:
    """A blocking socket with messages on it. `deadline` (time.monotonic) bounds every read and write: TimeoutError.

    EOFError when the other side is gone; msgspec.DecodeError or ProtocolError when it sends something else.
    """

    def __init__(self, sock: socket.socket, received: Any) -> None:
        """received: the union of messages that the other side may send."""
        self._sock = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(received)
        self.deadline: float | None = None

    def send(self, message: Job | Reply, blob: bytes | memoryview | None = None) -> None:
        self._write(self._encoder.encode(message))
        if blob is not None:
            self._write(blob)

    def receive(self) -> Any:
        return self._decoder.decode(self.receive_blob(MAX_MESSAGE_BYTES))

    def receive_blob(self, max_bytes: int) -> bytearray:
        size = self._read_length()
        if size > max_bytes:
            raise ProtocolError(f"a piece of {size} bytes where at most {max_bytes} are expected")
        blob = bytearray(size)
        self._read_into(memoryview(blob))
        return blob

    def receive_into(self, buffer: memoryview) -> None:
        """Reads a blob of exactly the buffer's size."""
        size = self._read_length()
        if size != buffer.nbytes:
            raise ProtocolError(f"a piece of {size} bytes where {buffer.nbytes} are expected")
        self._read_into(buffer)

    def close(self) -> None:
        self._sock.close()

    def _read_length(self) -> int:
        length = bytearray(8)
        self._read_into(memoryview(length))
        return int.from_bytes(length, "little")

    def _read_into(self, view: memoryview) -> None:
        while view:
            self._arm()
            count = self._sock.recv_into(view)
            if count == 0:
                raise EOFError("the other side has closed the channel")
            view = view[count:]

    def _write(self, piece: bytes | memoryview) -> None:
        size = piece.nbytes if isinstance(piece, memoryview) else len(piece)
        self._arm()
        self._sock.sendall(size.to_bytes(8, "little"))
        self._arm()
        self._sock.sendall(piece)

    def _arm(self) -> None:
        if self.deadline is None:
            self._sock.settimeout(None)
            return
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline of the job has passed")
        self._sock.settimeout(left)


def expect(message: Reply, kind: type[T]) -> T:
    """The worker's answer, as the kind that the conversation calls for. Raises InputError for a refusal."""
    if isinstance(message, Refused):
        raise InputError(message.field, message.message)
    if not isinstance(message, kind):
        raise ProtocolError(f"{type(message).__name__} where {kind.__name__} is expected")
    return message
