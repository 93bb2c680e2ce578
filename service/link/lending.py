"""How the large frames of a message reach the engine in shared memory (arena.py), and in the message where that does
not work.

Each API process makes an arena for each life of an engine, and hands its descriptor over through a socket beside the
engine's, in the directory that only this user may enter. The first frame of a message is never empty; an empty one
before it says that the next names the loan, or, while that one is empty, too, that an arena may be waiting at the
socket. A message goes whole through its socket if the engine has not mapped the arena, if the arena is full, and on
systems without such memory.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from service.link import wire
from service.link.arena import SIZE, Arena, Loan, MappedArena, Region, is_supported
from service.link.messages import Command, Failed
from service.link.wire import Frame, WireError

log = logging.getLogger(__name__)

LEAST = 64 << 10
"""Bytes of a frame from which on it is lent. Smaller ones cross the socket in one piece."""
MOST = 8 << 20
"""Bytes that are copied for a message, in the event loop, which takes 0.4 ms. ZeroMQ copies larger ones in a thread of
its own."""
_NAME_BYTES = 256


def _handover_path(address: str) -> str:
    return os.path.join(os.path.dirname(address.removeprefix("ipc://")), "memory")


class Lender:
    """Of one API process, for one life of an engine. peer: the process' name at the engine."""

    def __init__(self, address: str, peer: str) -> None:
        self._path = _handover_path(address)
        self._peer = peer.encode()
        self._arena: Arena | None = None
        self._handed_over = False
        self._works = is_supported()

    def lend(self, frames: list[Frame]) -> tuple[list[Frame], Region | None]:
        """The frames to send of a message, and the region that it needs, if one does."""
        large = [(number, frame) for number, frame in enumerate(frames[1:]) if len(frame) >= LEAST]
        if not self._works or not 0 < sum(len(frame) for _, frame in large) <= MOST:
            return frames, None
        arena = self._offered()
        if arena is None:
            return frames, None
        if not arena.is_mapped:
            return [b"", b"", *frames], None
        placed = arena.place(large)
        if placed is None:
            return frames, None
        loan, region = placed
        small: list[Frame] = list(frames)
        for number, _ in large:
            small[1 + number] = b""
        return [b"", msgspec.msgpack.encode(loan), *small], region

    def take_back(self, region: Region) -> None:
        """For a message that was not sent."""
        if self._arena is not None:
            self._arena.take_back(region)

    def trim(self) -> None:
        if self._arena is not None:
            self._arena.trim()

    @property
    def in_use(self) -> int:
        """Number of messages whose frames the engine has not given back."""
        return 0 if self._arena is None else self._arena.in_use

    def close(self) -> None:
        """The engine has ended, or this process leaves it."""
        self._arena, self._works = None, False

    def _offered(self) -> Arena | None:
        """The arena once its descriptor waits at the engine; None if there is no engine yet, or no memory."""
        if self._arena is None:
            try:
                self._arena = Arena(SIZE)
            except OSError as error:
                self._works = False
                log.warning("pixels go through sockets, since there is no shared memory for them: %s", error)
                return None
        if not self._handed_over:
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.connect(self._path)
                socket.send_fds(sender, [self._peer], [self._arena.file])
                self._handed_over = True
        return self._arena if self._handed_over else None


class _Identified(msgspec.Struct):
    request_id: str


class Borrower:
    """Reads an engine's commands of all peers, with frames from their arenas."""

    def __init__(self, address: str) -> None:
        self._decoder = wire.command_decoder()
        self._arenas: dict[str, MappedArena] = {}
        self._socket: socket.socket | None = None
        if is_supported():
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
            try:
                self._socket.bind(_handover_path(address))
            except OSError as error:
                log.warning("pixels go through sockets: no shared memory can be handed over (%s)", error)
                self.close()

    def decode(self, peer: str, frames: Sequence[Frame]) -> Command | Failed:
        """The command; Failed for a request whose frames are not where it says. WireError if it is no message."""
        if not frames or len(frames[0]):
            return self._decoder.decode(frames)
        loan, *message = frames[1:]
        if not len(loan):
            self._take_arenas()
            return self._decoder.decode(message)
        try:
            if peer not in self._arenas:
                raise WireError("the engine has no shared memory of this process")
            arrays = list(message[1:])
            self._arenas[peer].borrow(msgspec.msgpack.decode(loan, type=Loan), arrays)
            return self._decoder.decode([message[0], *arrays])
        except (WireError, msgspec.DecodeError) as error:
            return _failed(message, error)

    def forget(self, peer: str) -> None:
        """The process has ended. Its arena goes with the last array that lies in it."""
        self._take_arenas()
        self._arenas.pop(peer, None)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _take_arenas(self) -> None:
        """Maps those that wait at the socket."""
        while self._socket is not None:
            try:
                name, files, *_ = socket.recv_fds(self._socket, _NAME_BYTES, 1)
            except BlockingIOError:
                return
            for file in files:
                try:
                    self._arenas[name.decode()] = MappedArena(file)
                except (OSError, WireError) as error:
                    log.warning("pixels of %s go through its socket: %s", name.decode() or "the API process", error)
                finally:
                    os.close(file)


def _failed(message: Sequence[Frame], error: Exception) -> Failed:
    try:
        request_id = msgspec.msgpack.decode(message[0], type=_Identified).request_id
    except (IndexError, msgspec.DecodeError):
        raise WireError(f"not a message of this protocol: {error}") from error
    log.error("request %s: %s", request_id, error)
    reason = f"The pixels or the audio of the request did not reach the engine: {error}."
    return Failed(request_id, 500, "engine_error", reason)
