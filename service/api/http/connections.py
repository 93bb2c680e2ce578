"""HTTP connections: how many may be open, how long each may take to send a request head, and when each is closed."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import h11
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from service.api.http.admission import FREE_BYTES
from service.api.http.errors import ApiError, ResponseCut
from service.api.http.middleware import record_of
from service.api.http.streaming import ClientTimeout

log = logging.getLogger(__name__)

# WebSocket connections with bounds on tiny frames, each of which costs the event loop as much as thousands of bytes,
# and on the bytes of messages that no route has taken yet.
#
# Fragments and control frames reach no route.

FREE_FRAGMENTS, MIN_FRAGMENT = 1024, 64
"""A message in more fragments than that must have so many bytes a fragment on average."""
MAX_CONTROLS = 4096
"""Pings and pongs of a client between two messages: one a second for as long as an idle connection is kept."""
SLICE = 1 << 14
"""Bytes that are taken in before limits are looked at: one read has up to 256 KiB."""
POLICY, TRY_LATER = 1008, 1013


class BoundedSocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket with bounds on frames; it is closed with 1008 over them. Bytes that no route has taken yet
    are charged to the ticket of the connection, which is closed with 1013 if the server has no room for them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.app = self._run
        self._scope: Scope | None = None
        """While the application runs."""
        self._size = 0
        """Bytes of the message that is arriving in fragments."""
        self._controls = 0
        """Pings and pongs since the last message began."""
        self._pending = 0
        """Bytes since the route took a message. uvicorn reads nothing while a whole one waits for the route."""
        self._charged = 0

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), SLICE):
            if self.transport.is_closing():
                return
            piece = data[start : start + SLICE]
            self._pending += len(piece) if self.handshake_complete else 0
            super().data_received(piece)
        self._charge()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def take() -> Message:
            message = await receive()
            if message["type"] == "websocket.receive":
                if self._charged:
                    record_of(scope).ticket.adjust(-self._charged)
                self._pending = self._charged = 0
            return message

        self._scope = scope
        try:
            await self.config.loaded_app(scope, take, send)
        finally:
            self._scope = None

    def _charge(self) -> None:
        """Small amounts are free: most messages are a line of text."""
        more = self._pending - self._charged
        if more <= FREE_BYTES or self.transport.is_closing():
            return
        if self._scope is None:  # the route has ended
            self.transport.abort()
            return
        try:
            record_of(self._scope).ticket.grow(size=more)
        except ApiError as error:
            self._refuse(error.code or "", TRY_LATER)
        else:
            self._charged += more

    def handle_text(self, event: Frame) -> None:
        self._controls = 0
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        self._controls = 0
        super().handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        if self.transport.is_closing():
            return
        count = len(self.frames)
        self._size = len(event.data) + (self._size if count > 1 else sum(map(len, self.frames)))
        if count >= FREE_FRAGMENTS and self._size < MIN_FRAGMENT * count:
            self._refuse("too many small fragments")
        else:
            super().handle_cont(event)

    def handle_ping(self) -> None:
        if self._admits_control():
            super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        if self._admits_control():
            super().handle_pong(event)

    def _admits_control(self) -> bool:
        if self.transport.is_closing():
            return False
        self._controls += 1
        if self._controls > MAX_CONTROLS:
            self._refuse("too many pings or pongs")
            return False
        return True

    def _refuse(self, reason: str, code: int = POLICY) -> None:
        log.info("refused: %s", reason)
        if self.close_sent or not self.handshake_complete:
            self.transport.abort()
            return
        self.conn.send_close(code, reason)
        self.handle_parser_exception()


MAX_HEAD_BYTES = 1 << 16
FREE_CHUNKS, MIN_CHUNK = 1024, 64
"""A body in more chunks than that must have so many bytes a chunk on average: each costs the event loop as much as a
thousand bytes, and what comes in one read, up to 256 KiB, is taken in before anybody else's turn."""
LENGTHS = frozenset({b"content-length", b"transfer-encoding"})
CLOSE = (b"connection", b"close")
REQUEST_TIMEOUT = 408
"""This status closes its connection (RFC 9110, 15.5.9), since the rest of the body may never come."""
SHUTDOWN_LINGER = 0.2
"""Seconds before idle connections are closed at a shutdown: a request may be on its way already."""
UNREADABLE = {
    431: "The request head is too large: at most 64 KiB are allowed.",
    501: "Transfer encodings other than chunked are not supported.",
}
"""Messages for requests that h11 cannot parse, where it suggests another status than 400."""


class SmallChunks(h11.RemoteProtocolError):
    """A body in too many, too small chunks."""


class FastBodyConnection(h11.Connection):
    """h11 that frames the chunks of a streamed body itself and sends the head together with the first chunk.

    h11's events and state machine cost as much processor time per chunk as the kernel's send (docs/performance.md, "The
    API process"). httptools is cheaper, but does not limit a request head. Tests compare the bytes with h11's own.
    """

    _chunked = False
    _head = b""

    def __init__(self, *arguments: Any, draining: Callable[[], bool]) -> None:
        super().__init__(*arguments)
        self._draining = draining
        self.ends = False
        """Whether the next response is the last one of the connection."""
        self._chunks = self._chunk_bytes = 0
        """Number and bytes of chunks of the present request's body, if it comes in chunks."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            # h11 limits a head that is not complete: one that came in a single read would pass.
            if len(event.target) + sum(len(name) + len(value) for name, value in event.headers) > MAX_HEAD_BYTES:
                raise h11.RemoteProtocolError("the head is too large", error_status_hint=431)
            if {name for name, _ in event.headers} >= LENGTHS:  # another server may read another body (RFC 9112, 6.1)
                raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding")
            self._chunks = self._chunk_bytes = 0
        elif isinstance(event, h11.Data):
            self._count(event)
        return event

    def _count(self, part: h11.Data) -> None:
        self._chunks += part.chunk_start
        self._chunk_bytes += len(part.data)
        if self._chunks > FREE_CHUNKS and self._chunk_bytes < MIN_CHUNK * self._chunks:
            raise SmallChunks(
                f"The body comes in too small chunks: {self._chunks} chunks of {self._chunk_bytes} bytes given, at "
                f"least {MIN_CHUNK} bytes each on average needed."
            )

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]  # its overloads say the same
        head, self._head = self._head, b""
        if self._chunked and isinstance(event, h11.Data) and self.our_state is h11.SEND_BODY:
            return head + b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else head
        if isinstance(event, h11.Response):
            unfinished = event.status_code == REQUEST_TIMEOUT
            last = self.ends or unfinished or self._draining()
            self._head = super().send(_closing(event) if last else event) or b""
            self._chunked = b"\r\ntransfer-encoding: chunked\r\n" in self._head.lower()
            return b""
        data = super().send(event)
        return head + data if head and data is not None else data


def _closing(response: h11.Response) -> h11.Response:
    """The response with `Connection: close` (RFC 9112, 9.6)."""
    headers = [(name, value) for name, value in response.headers.raw_items() if name.lower() != CLOSE[0]]
    return h11.Response(status_code=response.status_code, headers=[*headers, CLOSE], reason=response.reason)


class BoundedConnection(H11Protocol):
    """uvicorn's connection with limits; uvicorn itself would wait for a request head forever.

    max_connections: a further one replaces that which has been idle longest, or is closed if none is idle.
    header_timeout: seconds for a request head or handshake, from accepting the connection or the first byte of a later
    one. draining: whether each response is to be the last of its connection. idle: connections without a request, the
    longest idle first.
    """

    conn: FastBodyConnection

    def __init__(
        self,
        *arguments: Any,
        max_connections: int,
        header_timeout: float,
        draining: Callable[[], bool],
        idle: OrderedDict[BoundedConnection, None],
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.conn = FastBodyConnection(h11.SERVER, MAX_HEAD_BYTES, draining=draining)
        self.app = self._run
        self._max_connections = max_connections
        self._header_timeout = header_timeout
        self._idle = idle
        self._timer: asyncio.TimerHandle | None = None
        self._socket: WebSocketsSansIOProtocol | None = None
        """The WebSocket protocol after an upgrade."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            if not self._idle:
                transport.abort()
                return
            longest, _ = self._idle.popitem(last=False)
            longest.timeout_keep_alive_handler()
        self._arm()

    def data_received(self, data: bytes) -> None:
        self._idle.pop(self, None)
        super().data_received(data)
        if self._socket is None:
            if self.transport.is_closing() or self._answering:
                self._disarm()
            else:
                self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.pop(self, None)
        self._disarm()
        super().connection_lost(exc)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or self._answering or self._socket is not None:
            return
        if self.conn.trailing_data[0]:
            self._arm()  # the next head has started
        else:
            self._idle[self] = None

    def shutdown(self) -> None:
        self.conn.ends = True
        if self._answering:
            super().shutdown()
        else:
            self.loop.call_later(SHUTDOWN_LINGER, self._end_idle)

    def _end_idle(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Refuse handshakes to which the WebSocket parser would not respond: bodies, other methods, very long
        lines."""
        has_body = any(name in LENGTHS and value != b"0" for name, value in self.headers)
        if event.method != b"GET" or event.http_version != b"1.1" or has_body:
            self._refuse(ApiError(400, "A WebSocket handshake must be an HTTP/1.1 GET request without a body."))
            return
        self._arm()  # a pipelined head has no timer yet
        super().handle_websocket_upgrade(event)
        upgraded = self.transport.get_protocol()
        assert isinstance(upgraded, WebSocketsSansIOProtocol)
        self._socket = upgraded
        if not upgraded.handshake_initiated:
            self._refuse(ApiError(400, "The WebSocket handshake has too many header lines or a line that is too long."))

    def send_400_response(self, msg: str) -> None:
        """Answer a request that h11 cannot parse with an error object; uvicorn would send plain text."""
        problem = sys.exception()
        if isinstance(problem, SmallChunks):
            self._refuse(ApiError(400, str(problem)))
            return
        status = problem.error_status_hint if isinstance(problem, h11.RemoteProtocolError) else 400
        self._refuse(ApiError(status, UNREADABLE.get(status, "The request is not valid HTTP/1.1.")))

    def _refuse(self, error: ApiError) -> None:
        """Send an error object, if a response can still be started, and close the connection."""
        log.info("refused: %s", error.message)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = error.response()
            headers = [*answer.raw_headers, (b"x-request-id", f"req_{secrets.token_hex(16)}".encode()), CLOSE]
            for event in (
                h11.Response(status_code=error.status, headers=headers),
                h11.Data(data=bytes(answer.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application. Handles responses that are cut off here, and what uvicorn cancels at the end of a
        shutdown: it would log a traceback."""
        try:
            await self.config.loaded_app(scope, receive, send)
        except (ResponseCut, asyncio.CancelledError) as cut:
            self.cycle.disconnected = True
            if isinstance(cut, ClientTimeout):
                self.transport.abort()  # close() would wait until the buffered data is sent
            else:
                self.transport.close()

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._header_timeout, self._expire)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if self._socket is None or not self._socket.handshake_complete:
            self.transport.abort()
