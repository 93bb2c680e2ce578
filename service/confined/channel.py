"""A confined worker: what it may do, and its protocol with the API process, typed msgpack messages and raw blobs.

Each message or blob is preceded by its length (8 bytes, little endian) on a socket. No pickle: a worker that was taken
over by a hostile file can send nothing but these structs and blobs of the expected size.
"""

from __future__ import annotations

import ctypes
import resource
import socket
import time
from typing import Any

import msgspec

from service.system.children import leave_signals_to_parent

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


MAX_FILES = 64

_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000


def confine(memory_bytes: int) -> None:
    """Limits memory and files, and drops privileges and network access.

    The network is removed only where users may create namespaces, which many containers do not allow.
    """
    leave_signals_to_parent()
    for kind, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, MAX_FILES),
    ):
        limit = _attainable(kind, most)
        resource.setrlimit(kind, (limit, limit))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((_PR_SET_NO_NEW_PRIVS, 1), (_PR_SET_DUMPABLE, 0)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl {option}")
    # Root can create a network namespace alone; other users need a user namespace with it.
    if libc.unshare(_CLONE_NEWNET) != 0:
        libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET)


def allow_cpu(seconds: int) -> None:
    """Allows this job so many more seconds of processor time; SIGXCPU then ends the process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = _attainable(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime) + 1 + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _attainable(kind: int, most: int) -> int:
    """`most`, or the hard limit that the server was started with, if that is less: only root could raise it."""
    _, hard = resource.getrlimit(kind)
    return most if hard == resource.RLIM_INFINITY else min(most, hard)
