"""Spreads a burst of requests over several turns of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 4
"""Requests prepared in one turn of the loop: a few milliseconds of work between two polls of the sockets."""


class Turns:
    """Lets at most `at_once` requests through in each turn of the loop, first come, first served.

    Without it, 64 requests that arrive together are all prepared in one turn: tens of milliseconds in which no stream
    gets audio or tokens.
    """

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._passed = 0

    async def wait(self) -> None:
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
