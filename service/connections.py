"""Connections that carry no request: how many, and how long each may take to send a request's head."""

from __future__ import annotations

import asyncio
import resource
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

OPTIONS = {
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": 30,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 60_000,
    "TCP_NOTSENT_LOWAT": 1 << 17,
}
"""A piece of a stream goes out at once, not when the peer has acknowledged the one before, 40 ms later; asyncio sees to
that only on sockets of its own making. A peer that vanished without a word is noticed within a minute (s, s, count,
ms). Of what a client does not read the kernel keeps 128 KiB, not megabytes: minutes of audio would lie there before a
stream could be paused. Not every platform has all of them."""
MOST_DESCRIPTORS = 1 << 16
MOST_HEAD_BYTES = 1 << 16
FRAMING = frozenset({b"connection", b"content-length", b"transfer-encoding"})


def set_options(listener: socket.socket) -> None:
    """Accepted sockets inherit them."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in OPTIONS.items():
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def raise_descriptor_limit() -> None:
    """Towards the hard limit: the soft one is often 1024, fewer than the connections that are allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class QuickBodies(h11.Connection):
    """h11, whose events and state machine take as long over one piece of a streamed body as the kernel over sending it:
    here a chunk is framed at once. The head goes out with what follows it, which ASGI applications have at hand: one
    packet, for which a client wakes once."""

    _chunked = False
    _head = b""

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]  # its overloads say the same
        head, self._head = self._head, b""
        if self._chunked and isinstance(event, h11.Data) and self.our_state is h11.SEND_BODY:
            return head + b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else head
        if isinstance(event, h11.Response):
            self._head = self._framed(event)
            self._chunked = b"\r\ntransfer-encoding: chunked\r\n" in self._head.lower()
            return b""
        data = super().send(event)
        return head + data if head and data is not None else data

    def _framed(self, response: h11.Response) -> bytes:
        """h11 checks headers anew for each that it adds about framing: here it adds them to a response without any."""
        headers = response.headers.raw_items()
        if not FRAMING.isdisjoint(name.lower() for name, _ in headers):
            return super().send(response) or b""
        bare = h11.Response(status_code=response.status_code, headers=[], reason=response.reason)
        status, _, framing = (super().send(bare) or b"").partition(b"\r\n")
        return b"%b\r\n%b%b" % (status, b"".join([b"%b: %b\r\n" % header for header in headers]), framing)


class BoundedConnection(H11Protocol):
    """uvicorn's connection, which alone would wait for a head for ever.

    max_connections: one more is closed at once. header_timeout: seconds from the connection, or from a later head's
    first byte, to the end of the head.
    """

    def __init__(self, *arguments: Any, max_connections: int, header_timeout: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = QuickBodies(h11.SERVER, MOST_HEAD_BYTES)
        self._max_connections = max_connections
        self._header_timeout = header_timeout
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            transport.abort()
        else:
            self._arm()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        upgraded = self not in self.connections
        if upgraded or self.transport.is_closing() or (self.cycle is not None and not self.cycle.response_complete):
            self._disarm()
        else:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._header_timeout, self._expire)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        self.transport.abort()
