"""WebSocket connections with bounds on tiny frames, each of which costs the event loop as much as thousands of bytes,
and on the bytes of messages that no route has taken yet.

Whole messages are held back until a route takes them; fragments and control frames reach no route.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from service.api.http.admission import FREE_BYTES
from service.api.http.errors import ApiError
from service.api.http.record import record_of

log = logging.getLogger(__name__)

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
        self._arriving = 0
        """Bytes since the last whole message."""
        self._whole = deque[int]()
        """Bytes of each message that waits for the route."""
        self._waiting = 0
        """Bytes of all of them."""
        self._charged = 0

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), SLICE):
            if self.transport.is_closing():
                return
            piece = data[start : start + SLICE]
            self._arriving += len(piece) if self.handshake_complete else 0
            super().data_received(piece)
        self._charge()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""

        async def take() -> Message:
            message = await receive()
            if message["type"] == "websocket.receive":
                self._waiting -= self._whole.popleft()
                if (freed := self._charged - self._arriving - self._waiting) > 0:
                    record_of(scope).ticket.adjust(-freed)
                    self._charged -= freed
            return message

        self._scope = scope
        try:
            await self.config.loaded_app(scope, take, send)
        finally:
            self._scope = None

    def _charge(self) -> None:
        """Small amounts are free: most messages are a line of text."""
        more = self._arriving + self._waiting - self._charged
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
        self._count_message(event, len(event.data))

    def handle_bytes(self, event: Frame) -> None:
        self._controls = 0
        super().handle_bytes(event)
        self._count_message(event, len(event.data))

    def _count_message(self, last: Frame, size: int) -> None:
        if last.fin:
            self._arriving = 0
            if not self.close_sent:  # otherwise it was dropped
                self._whole.append(size)
                self._waiting += size

    def handle_cont(self, event: Frame) -> None:
        if self.transport.is_closing():
            return
        count = len(self.frames)
        self._size = len(event.data) + (self._size if count > 1 else sum(map(len, self.frames)))
        if count >= FREE_FRAGMENTS and self._size < MIN_FRAGMENT * count:
            self._refuse("too many small fragments")
        else:
            super().handle_cont(event)
            self._count_message(event, self._size)

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
