"""Common parts of WebSocket routes: sessions, bounded reading, sending to clients that may be slow or gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import msgspec
from fastapi import WebSocket
from starlette.websockets import WebSocketDisconnect, WebSocketState

from service.api.context import LARGE_BODY, ServerContext, context_of
from service.api.engines.request_stream import EngineError
from service.api.http.admission import FREE_BYTES, Ticket
from service.api.http.errors import ApiError, as_api_error
from service.api.http.middleware import RequestRecord, record_of
from service.media.messages import AudioLimits

log = logging.getLogger(__name__)

MAX_MESSAGE = AudioLimits.max_bytes
"""Bytes of a message, which may have reference audio."""

# Close codes (RFC 6455).
GOING_AWAY = 1001
NOT_JSON = 1007
POLICY = 1008
FAILED = 1011
TRY_LATER = 1013
GOODBYES = (1000, GOING_AWAY, 1005)
"""Codes in the close frames of clients that are done: also of a page that is left, and of a frame without a code."""


class StreamClosed(Exception):
    def __init__(self, code: int = 1000, reason: str = "") -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class Session(Protocol):
    """What a client and the server do over one connection."""

    async def run(self) -> None:
        """Return or raise at the end: ApiError or EngineError if the connection cannot be served any further,
        StreamClosed to close it, or if the client has closed it when nothing was going on, WebSocketDisconnect if the
        client has gone."""
        ...

    async def send_error(self, error: ApiError) -> None: ...

    async def stop(self) -> None:
        """End what still goes on for the client."""
        ...


async def run_session(
    socket: WebSocket, make: Callable[[ServerContext, WebSocket, RequestRecord], Session], protocol: str | None = None
) -> None:
    """Accept a handshake, run the session to its end, and close the socket with the code that says how it ended."""
    context, record = context_of(socket), record_of(socket.scope)
    await socket.accept(protocol)
    session = make(context, socket, record)
    context.open_sockets += 1
    try:
        await session.run()
    except StreamClosed as closed:
        await close(socket, closed.code, closed.reason)
    except WebSocketDisconnect:
        record.outcome = "aborted"
    except (ApiError, EngineError) as error:
        answer = as_api_error(error)
        record.outcome = record.end_with(answer.status)
        with suppress(WebSocketDisconnect, StreamClosed):
            await session.send_error(answer)
        code = TRY_LATER if answer.status == 503 else FAILED if answer.status >= 500 else POLICY
        await close(socket, code, answer.code or "")
    finally:
        await session.stop()
        context.open_sockets -= 1


class Inbox:
    """Messages of a client, one of which is read ahead: until it is taken, the transport holds back a client that
    writes too fast. The bytes of large messages are charged to `ticket` until the session asks for the one after."""

    def __init__(self, socket: WebSocket, ticket: Ticket) -> None:
        self._socket = socket
        self._ticket = ticket
        self._charged = self._taken = 0
        """What the message that was read ahead, and the one that the session has, are charged with."""
        self._goodbye = False
        """Whether the client has closed the socket because it is done, and has not just vanished."""
        self._reading = asyncio.create_task(self._read())

    async def next_during(
        self, context: ServerContext, work: asyncio.Task[None] | None, idle: float | None, *, busy: bool
    ) -> str | bytes | None:
        """Return the next message; None if `work` has ended before it came, or none came for `idle` seconds.

        Raises StreamClosed at a shutdown without work, and when a client that is done has closed the socket; if it has
        while the session was busy, or has gone, WebSocketDisconnect; ApiError 503 when the server has no room for the
        message.
        """
        self._ticket.adjust(-self._taken)
        self._taken = 0
        other: asyncio.Task[Any] = work or asyncio.create_task(context.drain_begun.wait())
        try:
            await asyncio.wait({self._reading, other}, timeout=idle, return_when=asyncio.FIRST_COMPLETED)
            if other.done() and work is None:
                raise StreamClosed(GOING_AWAY, "shutting down")
        finally:
            if work is None:
                other.cancel()
        if not self._reading.done() or other.done():
            return None
        if (message := self._reading.result()) is None:
            raise StreamClosed if self._goodbye and not busy else WebSocketDisconnect
        self._taken, self._charged = self._charged, 0
        self._reading = asyncio.create_task(self._read())
        return message

    async def wait(self, work: asyncio.Task[None]) -> None:
        """Until `work` has ended. WebSocketDisconnect if the client goes meanwhile without another message."""
        await asyncio.wait({work, self._reading}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done() and self._reading.result() is None:
            raise WebSocketDisconnect
        await asyncio.wait({work})

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> str | bytes | None:
        """The next message; None when the client has gone."""
        received = await self._socket.receive()
        if received["type"] == "websocket.disconnect":
            # A lost connection has 1005, too, but no reason, not even an empty one.
            self._goodbye = received.get("code") in GOODBYES and "reason" in received
            return None
        message: str | bytes = received.get("text") or received.get("bytes") or b""
        charged = len(message) if len(message) > FREE_BYTES else 0
        self._ticket.grow(size=charged)
        self._charged = charged
        return message


def as_text(message: msgspec.Struct) -> str:
    return msgspec.json.encode(message).decode()


async def send(context: ServerContext, socket: WebSocket, message: msgspec.Struct | bytes, size: int = 0) -> None:
    """A struct as JSON, bytes as a binary frame. WebSocketDisconnect when the client has gone, StreamClosed when it
    reads nothing for the write timeout. size: approximate bytes of a struct that may be large; the JSON of a large one
    is encoded in a thread."""
    try:
        async with asyncio.timeout(context.settings.write_timeout):
            if isinstance(message, bytes):
                await socket.send_bytes(message)
            else:
                large = size > LARGE_BODY
                text = await context.in_thread(partial(as_text, message)) if large else as_text(message)
                await socket.send_text(text)
    except TimeoutError:
        raise StreamClosed(POLICY, "the client reads too slowly") from None
    except (RuntimeError, OSError):
        raise WebSocketDisconnect from None


async def close(socket: WebSocket, code: int, reason: str) -> None:
    """Nothing is raised if the client has gone, as one that says goodbye and does not wait for the answer."""
    if socket.application_state is not WebSocketState.DISCONNECTED:
        try:
            await socket.close(code, reason)
        except (WebSocketDisconnect, RuntimeError, OSError):
            log.debug("the client had closed the socket")
