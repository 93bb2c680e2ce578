"""A semaphore that its clients get in rotation: one that asks for it many times delays each of the others by at most
one."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSemaphore:
    """Admits at most `size` holders at a time. Clients take turns, each one's requests in their order. Belongs to one
    event loop."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Waiting requests by client; the client that gets it next comes first."""

    @asynccontextmanager
    async def acquire(self, client: str) -> AsyncIterator[None]:
        """Waits for the semaphore, and releases it at the end."""
        await self._wait(client)
        try:
            yield
        finally:
            self._release()

    async def _wait(self, client: str) -> None:
        if self._free:
            self._free -= 1
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._release()  # It was granted in the same turn of the loop that cancelled it.
            raise

    def _release(self) -> None:
        """Grants the semaphore to the next waiting client; requests that were cancelled in the meantime are skipped."""
        while self._waiting:
            client, queue = next(iter(self._waiting.items()))
            granted = queue.popleft()
            if queue:
                self._waiting.move_to_end(client)
            else:
                del self._waiting[client]
            if not granted.done():
                granted.set_result(None)
                return
        self._free += 1
