"""The socket that a server listens on. It is bound before anything is loaded, so that an address in use is reported at
once.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from service.api.engines.shared_usage import UsageRow
from service.settings.reading import SettingsError
from service.settings.settings import Settings

OPTIONS = {
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": 30,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 60_000,
    "TCP_NOTSENT_LOWAT": 1 << 17,
}
"""TCP_NODELAY: chunks of a stream are sent at once, not up to 40 ms later when the previous one is acknowledged;
asyncio sets it only on sockets that it creates itself. Keep-alives (s, s, count, ms): a vanished peer is noticed within
a minute. TCP_NOTSENT_LOWAT: the kernel buffers 128 KiB for a client that does not read, not megabytes, which would be
minutes of audio before a stream could be paused. Not every platform has all options."""
BACKLOG = 2048
"""Connections that wait to be accepted."""
_NO_ADDRESS = "; --host names an address of this machine"
_HINTS = {
    errno.EADDRINUSE: "; another server may be running there, --port 0 picks a free one",
    errno.EADDRNOTAVAIL: _NO_ADDRESS,
    errno.EACCES: "; ports below 1024 are for privileged users, --port names another one",
}
"""What to do about an address that cannot be bound, by the error."""


class Listener(socket.socket):
    """A listening socket that keeps its backlog. asyncio would set it to the number of connections that it accepts in
    one turn of the loop."""

    def listen(self, backlog: int = 0, /) -> None:
        """Does nothing, since the socket is listening already."""


def bind(settings: Settings) -> Listener:
    """The listening socket, created before anything is loaded. SettingsError if the address cannot be bound."""
    where = f"host, port: {settings.host}:{settings.port} cannot be bound"
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    every = settings.host == "::" and socket.has_dualstack_ipv6()  # of IPv4, too
    try:
        socket.getaddrinfo(settings.host, settings.port, family)  # create_server makes another error of its errors
        listener = socket.create_server(
            (settings.host, settings.port), family=family, backlog=BACKLOG, dualstack_ipv6=every
        )
    except socket.gaierror as error:
        raise SettingsError(f"{where} ({error.strerror}{_NO_ADDRESS})") from error
    except OSError as error:
        raise SettingsError(f"{where} ({os.strerror(error.errno or 0)}{_HINTS.get(error.errno or 0, '')})") from error
    _set_options(listener)
    return Listener(fileno=listener.detach())


def url_of(listener: socket.socket) -> str:
    """A URL at which this machine reaches the listener: one that listens on every address is reached on loopback."""
    host, port, *_ = listener.getsockname()
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _set_options(listener: socket.socket) -> None:
    """Sets OPTIONS on the listener; accepted sockets inherit them."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in OPTIONS.items():
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


CONNECTIONS = "connections"
"""The kind under which API processes tell each other the number of theirs."""
YIELD_SECONDS = 0.01
"""Seconds that a new connection is left to a process that has fewer."""
LULL = 0.1
"""Seconds without an attempt after which the next one is about another connection."""
YIELD = 0.0001
"""Seconds of sleep at each attempt that leaves a connection, since the other process may need the processor."""


class SharedListener(Listener):
    """The socket on which several API processes accept connections. All of them wake up for a new one, and the same one
    tends to come first, so a process leaves it to others that have fewer connections. If none of them accepts it within
    YIELD_SECONDS (it may be hung), it does so itself."""

    def __init__(self, fileno: int, connections: Callable[[], int], row: UsageRow) -> None:
        """connections: number of its own. row: of a table with the kind CONNECTIONS."""
        super().__init__(fileno=fileno)
        self._connections = connections
        self._row = row
        self._left_since = self._left_last = -LULL
        self._others = -1
        """Connections of the others at the last attempt that left one to them."""

    def accept(self) -> tuple[socket.socket, Any]:
        """BlockingIOError, which asyncio takes for nothing to accept, if the connection is left to another process. The
        loop calls again at once while it waits."""
        connections = self._connections()
        self._row.tell(CONNECTIONS, connections, 0)
        if connections > self._row.least(CONNECTIONS) and self._leaves(time.monotonic()):
            time.sleep(YIELD)
            raise BlockingIOError
        accepted = super().accept()
        self._row.tell(CONNECTIONS, connections + 1, 0)
        return accepted

    def _leaves(self, now: float) -> bool:
        others = self._row.requests()[CONNECTIONS]
        if others != self._others or now - self._left_last > LULL:
            self._left_since, self._others = now, others
        self._left_last = now
        return now - self._left_since < YIELD_SECONDS
