"""The connection of one lane of a load: HTTP/1.1 by h11 over asyncio's streams, kept open between requests.

httpx takes a millisecond of processor time for a request, as much as an idle server takes for its part.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import h11
import httpx

READ_BYTES = 1 << 16
PORTS = {"http": 80, "https": 443}


class ConnectionFailed(Exception):
    """No complete answer: not connected, cut off, or not HTTP."""


@dataclass(frozen=True)
class Peer:
    """The target of a load: host and port, tls for https, the prefix of every path, and the headers of every
    request."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    prefix: str
    headers: tuple[tuple[str, str], ...]


def peer_of(url: str, api_key: str | None) -> Peer:
    parts = urlsplit(url)
    if parts.scheme not in PORTS or parts.hostname is None:
        raise ValueError(f"url: {url!r} is not the address of a server")
    headers = [("host", parts.netloc.rpartition("@")[2]), ("accept-encoding", "identity")]
    if api_key:
        headers.append(("authorization", f"Bearer {api_key}"))
    tls = httpx.create_ssl_context(trust_env=False) if parts.scheme == "https" else None
    return Peer(parts.hostname, parts.port or PORTS[parts.scheme], tls, parts.path.rstrip("/"), tuple(headers))


class Connection:
    """Sends requests one after the other. If the server has closed the connection, or an answer was not read to its
    end, it is opened again for the next request.

    timeout: seconds to connect, and for each part of an answer. Past it TimeoutError, otherwise ConnectionFailed.
    """

    def __init__(self, peer: Peer, timeout: float) -> None:
        self._peer = peer
        self._timeout = timeout
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._http = h11.Connection(h11.CLIENT)
        self._fresh = True
        """Whether the current request is the first of its connection."""
        self._heard = False
        """Whether anything came since it was sent."""

    async def warm_up(self) -> None:
        """Opens the connection with one GET, so that no measured request is the first. Errors surface in the next
        request."""
        with suppress(ConnectionFailed, TimeoutError):
            await self.request("GET", "/health", b"")
            async for _ in self.body():
                pass

    async def request(self, method: str, path: str, content: bytes) -> h11.Response:
        """Sends a request and returns the head of its answer. The body must be read next.

        A server may close an idle connection at the moment when a request is sent on it. It has not read the request
        then, which is sent again on a new connection."""
        try:
            return await self._ask(method, path, content)
        except ConnectionFailed:
            if self._fresh or self._heard:
                raise
        self.close()
        return await self._ask(method, path, content)

    async def _ask(self, method: str, path: str, content: bytes) -> h11.Response:
        try:
            writer = await self._ready()
            headers = [*self._peer.headers, ("content-type", "application/json"), ("content-length", str(len(content)))]
            head = self._http.send(h11.Request(method=method, target=self._peer.prefix + path, headers=headers))
            body = self._http.send(h11.Data(data=content))
            self._http.send(h11.EndOfMessage())
            assert head is not None and body is not None
            self._heard = False
            writer.write(head + body)
            while not isinstance(event := await self._next(), h11.Response):
                if not isinstance(event, h11.InformationalResponse):
                    raise ConnectionFailed("the server closed the connection")
        except (OSError, h11.ProtocolError) as error:
            raise _failure(error) from error
        return event

    async def body(self) -> AsyncGenerator[bytes]:
        """The body of the current answer, in chunks as they arrive."""
        try:
            while isinstance(event := await self._next(), h11.Data):
                yield bytes(event.data)
        except (OSError, h11.ProtocolError) as error:
            raise _failure(error) from error

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _ready(self) -> asyncio.StreamWriter:
        """Returns a connection with nothing left of an earlier answer."""
        if self._http.our_state is self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        else:
            self.close()
        self._fresh = self._streams is None or self._streams[0].at_eof()
        if self._streams is None or self._fresh:
            self.close()
            async with asyncio.timeout(self._timeout):
                self._streams = await asyncio.open_connection(self._peer.host, self._peer.port, ssl=self._peer.tls)
            self._http = h11.Connection(h11.CLIENT)
        return self._streams[1]

    async def _next(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                return event
            assert self._streams is not None
            async with asyncio.timeout(self._timeout):
                data = await self._streams[0].read(READ_BYTES)
            self._heard = self._heard or bool(data)
            self._http.receive_data(data)


def _failure(error: Exception) -> Exception:
    return error if isinstance(error, TimeoutError) else ConnectionFailed(str(error))
