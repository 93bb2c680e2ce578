"""The order of work in the event loop when many requests come at once."""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 4
"""Requests that are prepared between two looks at the sockets: a few milliseconds."""


class Turns:
    """Lets so many requests through in each turn of the loop, in the order in which they came.

    Without it 64 requests that come together are all prepared in one turn of the loop, tens of milliseconds in which
    no audio and no token of any stream is sent, theirs included.
    """

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._passed = 0

    async def mine(self) -> None:
        """Returns when it is the caller's turn."""
        loop = asyncio.get_running_loop()
        if self._passed == 0:
            loop.call_soon(self._next)
        if self._passed < self._at_once:
            self._passed += 1
            return
        future = loop.create_future()
        self._waiting.append(future)
        await future

    def _next(self) -> None:
        self._passed = 0
        while self._waiting and self._passed < self._at_once:
            future = self._waiting.popleft()
            if not future.done():  # its request was cancelled
                future.set_result(None)
                self._passed += 1
        if self._passed:
            asyncio.get_running_loop().call_soon(self._next)
