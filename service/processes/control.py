"""The messages between the supervisor and an API process. Requests do not pass through here; they go straight to the
engine.

Frames on a socket pair: the length in four bytes, then a msgpack struct.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Generic, TypeVar

import msgspec

from service.api.engines.engine_client import SleepState
from service.metrics.page import Families

ALIVE_SECONDS = 0.5


class Struct(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages; the tag is the class name."""


# supervisor -> API process


class EngineNews(Struct, frozen=True):
    """An engine was started, or has ended."""

    engine: int
    """Index of the engine."""
    address: str | None
    """Where it runs from now on; None: it has ended."""
    restarts: int
    """Number of its restarts so far."""
    was_ready: bool
    """Whether it has been ready, since this start or an earlier one."""
    sleep: SleepState = "awake"
    """Whether it ended to sleep (asleep), or was started by a request (waking)."""


class Doze(Struct, frozen=True):
    """The engines are about to sleep: hold requests from now on and answer Dozing; or answer Wake, if a request is in
    progress or an engine is not known to be ready."""

    number: int


class StayAwake(Struct, frozen=True):
    """The engines do not sleep after all: send the requests that were held since Doze."""


class Collect(Struct, frozen=True):
    """Answer with a Snapshot."""


class Page(Struct, frozen=True):
    """The metrics of all processes, for the Scrape of the same number."""

    number: int
    text: bytes


class Transcript(Struct, frozen=True):
    """The answer to KeepTranscript, once the transcript is kept, and to FindTranscript. text: None for KeepTranscript,
    and if there is no such transcript (any more)."""

    number: int
    text: str | None


Notice = EngineNews | Doze | StayAwake | Collect | Page | Transcript

# API process -> supervisor


class Accepting(Struct, frozen=True):
    """The process accepts connections; its engine was ready."""


class Alive(Struct, frozen=True):
    """The event loop runs; sent every ALIVE_SECONDS."""


class Snapshot(Struct, frozen=True):
    """The metrics of this process, the answer to Collect."""

    families: Families


class Scrape(Struct, frozen=True):
    """Answer with a Page."""

    number: int


class KeepTranscript(Struct, frozen=True):
    """Keep the transcript of a spoken answer for all processes. It is answered, so that a client gets the id only once
    every process can find it."""

    number: int
    id: str
    text: str


class FindTranscript(Struct, frozen=True):
    """Answer with the Transcript of that id."""

    number: int
    id: str


class Dozing(Struct, frozen=True):
    """This process has no request in progress, and sends none to the engines until they have been started again."""

    number: int


class Wake(Struct, frozen=True):
    """There is a request for the engines, which sleep or are about to sleep."""


Report = Accepting | Alive | Snapshot | Scrape | KeepTranscript | FindTranscript | Dozing | Wake

Message = TypeVar("Message")


class ControlChannel(Generic[Message]):
    """One end of the connection. message_type: the union of the messages that it receives. Only one task may receive at
    a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message_type: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(message_type)

    @classmethod
    async def open(cls, connection: socket.socket, message_type: Any) -> ControlChannel[Message]:
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        return cls(reader, writer, message_type)

    def send(self, message: Notice | Report) -> None:
        """Never blocks. The message is lost if the other process has ended."""
        data = msgspec.msgpack.encode(message)
        if not self._writer.is_closing():
            self._writer.write(len(data).to_bytes(4, "big") + data)

    async def receive(self) -> Message | None:
        """The next message; None once the other process has ended."""
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "big")
            return self._decoder.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        self._writer.close()
