"""The protocol between the API process and a confined worker: typed msgpack messages and raw blobs over a socket.

Each message or blob is preceded by its length (8 bytes, little endian). No pickle: a worker that was taken over by a
hostile file can send nothing but these structs and blobs of the expected size.
"""

from __future__ import annotations

import socket
import time
from typing import Any

import msgspec

MAX_MESSAGE_BYTES = 1 << 20


class ProtocolError(Exception):
    """The other side violated the protocol."""


class Struct(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages, those of other workers too; the tag is the class name. `field` is the request field that
    errors name."""


class WorkerChannel:
    """Messages over a blocking socket. deadline (time.monotonic): TimeoutError for reads and writes after it.

    EOFError when the other side has gone; msgspec.DecodeError or ProtocolError when it sends something else.
    """

    def __init__(self, sock: socket.socket, received: Any) -> None:
        """received: the union of messages that the other side may send."""
        self._sock = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(received)
        self.deadline: float | None = None

    def send(self, message: Struct, blob: bytes | memoryview | None = None) -> None:
        self._write(self._encoder.encode(message))
        if blob is not None:
            self._write(blob)

    def receive(self) -> Any:
        return self._decoder.decode(self.receive_blob(MAX_MESSAGE_BYTES))

    def receive_blob(self, max_bytes: int) -> bytearray:
        size = self._read_length()
        if size > max_bytes:
            raise ProtocolError(f"a blob of {size} bytes where at most {max_bytes} are expected")
        blob = bytearray(size)
        self._read_into(memoryview(blob))
        return blob

    def receive_into(self, buffer: memoryview) -> None:
        """Reads a blob of exactly the buffer's size."""
        size = self._read_length()
        if size != buffer.nbytes:
            raise ProtocolError(f"a blob of {size} bytes where {buffer.nbytes} are expected")
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
                raise EOFError("the other side closed the channel")
            view = view[count:]

    def _write(self, blob: bytes | memoryview) -> None:
        size = blob.nbytes if isinstance(blob, memoryview) else len(blob)
        self._arm()
        self._sock.sendall(size.to_bytes(8, "little"))
        self._arm()
        self._sock.sendall(blob)

    def _arm(self) -> None:
        if self.deadline is None:
            self._sock.settimeout(None)
            return
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the job exceeded its time limit")
        self._sock.settimeout(left)
