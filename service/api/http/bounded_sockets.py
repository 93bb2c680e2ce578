"""WebSocket connections with bounds on tiny frames, each of which costs the event loop as much as thousands of bytes.

Whole messages are held back until a route takes them; fragments and control frames reach no route.
"""

from __future__ import annotations

import logging
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

log = logging.getLogger(__name__)

FREE_FRAGMENTS, LEAST_FRAGMENT = 1024, 64
"""A message in more fragments than that must have so many bytes a fragment on average."""
MOST_CONTROLS = 4096
"""Pings and pongs of a client between two messages: one a second for as long as an idle connection is kept."""
SLICE = 1 << 14
"""Bytes that are taken in before limits are looked at: one read has up to 256 KiB."""
POLICY = 1008


class BoundedSocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket with bounds on frames; it is closed with 1008 over them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._size = 0
        """Bytes of the message that is arriving in fragments."""
        self._controls = 0
        """Pings and pongs since the last message began."""

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), SLICE):
            if self.transport.is_closing():
                return
            super().data_received(data[start : start + SLICE])

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
        if count >= FREE_FRAGMENTS and self._size < LEAST_FRAGMENT * count:
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
        if self._controls > MOST_CONTROLS:
            self._refuse("too many pings or pongs")
            return False
        return True

    def _refuse(self, reason: str) -> None:
        log.info("refused: %s", reason)
        if self.close_sent or not self.handshake_complete:
            self.transport.abort()
            return
        self.conn.send_close(POLICY, reason)
        self.handle_parser_exception()
