"""How several API processes share new connections evenly."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

from service.api.engines.shared_usage import UsageRow
from service.processes.listener import Listener

CONNECTIONS = "connections"
"""The kind under which API processes tell each other the number of theirs."""
PATIENCE = 0.01
"""Seconds that a new connection is left to a process that has fewer."""
LULL = 0.1
"""Seconds without an attempt after which the next one is about another connection."""
YIELD = 0.0001
"""Seconds of sleep at each attempt that leaves a connection, since the other process may need the processor."""


class SharedListener(Listener):
    """The socket on which several API processes accept connections. All of them wake up for a new one, and the same one
    tends to come first, so a process leaves it to others that have fewer connections. If none of them accepts it within
    PATIENCE (it may be hung), it does so itself."""

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
        return now - self._left_since < PATIENCE
