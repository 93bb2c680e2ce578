"""What the supervisor and an API process tell each other: the configuration, one JSON line on standard input, since it
holds the API keys; then messages on a socket pair. Requests do not pass through here; they go straight to the engine.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Generic, Literal, TypeVar

import msgspec

from service.api.app import ENDPOINTS
from service.api.engines.shared_usage import UsageTable
from service.api.http.admission import EXCESS, KINDS
from service.hub.catalog import HostedModel
from service.link.messages import Struct
from service.metrics.page import Families
from service.processes.config import connections_of_each
from service.processes.listener import CONNECTIONS
from service.settings.settings import Settings

WORK_KINDS = (*sorted({KINDS.get(endpoint, endpoint) for endpoint in ENDPOINTS.values()}), "other", EXCESS)
"""Columns of admitted work."""


def engine_kinds(engines: int) -> tuple[str, ...]:
    """Columns of the requests in flight at each engine."""
    return tuple(map(str, range(engines)))


class ApiConfig(msgspec.Struct, frozen=True):
    """What an API process needs to know at its start. listener, control and usage are inherited file descriptors."""

    index: int
    """From 0; a process that replaces another one takes over its index."""
    processes: int
    """Number of API processes."""
    peer: str
    """Name at the engines; no other process has ever had it."""
    listener: int
    """The listening socket."""
    control: int
    """The connection to the supervisor (control.py)."""
    usage: int
    """The table of what the API processes tell each other."""
    engines: int
    """Number of engines."""
    log_format: Literal["text", "json"]
    settings: dict[str, Any]
    models: tuple[HostedModel, ...]

    @property
    def inherited(self) -> tuple[int, ...]:
        """The file descriptors."""
        return (self.listener, self.control, self.usage)

    def table(self) -> UsageTable:
        return UsageTable(self.usage, self.processes, self.kinds)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Columns of the table."""
        return (*WORK_KINDS, *engine_kinds(self.engines), CONNECTIONS)

    def line(self) -> bytes:
        """The configuration as the process reads it: JSON, ended by a line break."""
        return msgspec.json.encode(self, enc_hook=str) + b"\n"

    @classmethod
    def read(cls, line: bytes) -> ApiConfig:
        return msgspec.json.decode(line, type=cls, dec_hook=lambda kind, value: kind(value))


def plain_settings(settings: Settings) -> dict[str, Any]:
    """Settings of each API process, as plain values except for paths. They hold the API keys that the supervisor has
    read; connections are divided among the processes."""
    return settings.model_dump() | {
        "api_processes": settings.num_api_processes,
        "api_key": settings.keys(),
        "api_key_file": None,
        "max_connections": connections_of_each(settings),
    }


# Frames on the socket pair: the length in four bytes, then a msgpack struct.

ALIVE_SECONDS = 0.5


# supervisor -> API process


class EngineNews(Struct, frozen=True):
    """An engine was started, or has ended."""

    engine: int
    """Index of the engine."""
    address: str | None
    """Where it runs from now on; None: it has ended."""
    restarts: int
    """Number of its restarts so far."""


class Collect(Struct, frozen=True):
    """Answer with a Snapshot."""


class Page(Struct, frozen=True):
    """The metrics of all processes, the answer to Scrape."""

    text: bytes


Notice = EngineNews | Collect | Page

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


Report = Accepting | Alive | Snapshot | Scrape

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
