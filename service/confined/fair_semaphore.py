"""A semaphore that its clients get in rotation: one that asks for it many times delays each of the others by at most
one."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSemaphore:
    """Admits at most `size` holders at a time, of one client at most `each` where that is given. Clients take turns,
    each one's requests in their order. Belongs to one event loop."""

    def __init__(self, size: int, each: int | None = None) -> None:
        self._free = size
        self._each = size if each is None else each
        self._held: Counter[str] = Counter()
        """How often clients hold it."""
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Waiting requests by client; the client that gets it next comes first."""

    @asynccontextmanager
    async def acquire(self, client: str) -> AsyncIterator[None]:
        """Waits for the semaphore, and releases it at the end."""
        await self._wait(client)
        try:
            yield
        finally:
            self._release(client)

    async def _wait(self, client: str) -> None:
        # If it is free, every waiting client holds it as often as one client may.
        if self._free and self._held[client] < self._each:
            self._take(client)
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._release(client)  # It was granted in the same turn of the loop that cancelled it.
            raise

    def _take(self, client: str) -> None:
        self._free -= 1
        self._held[client] += 1

    def _release(self, client: str) -> None:
        """Grants it to the next waiting client that may have it; requests that were cancelled in the meantime are
        skipped."""
        self._free += 1
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        for waiting in tuple(self._waiting):
            if self._held[waiting] < self._each and self._granted(waiting):
                return

    def _granted(self, client: str) -> bool:
        """Whether a request of a waiting client took it."""
        queue = self._waiting.pop(client)
        while queue:
            granted = queue.popleft()
            if not granted.done():
                self._take(client)
                granted.set_result(None)
                if queue:
                    self._waiting[client] = queue  # behind the other clients
                return True
        return False
