"""Waiting for what a test is about to look at: a condition is polled, and the limit only ends a test that has failed.

No result hangs on how long something takes. Limits are those of a machine that is busy with other work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

GENEROUS = 120.0
"""Seconds for what takes milliseconds to a few seconds on an idle machine."""
POLL = 0.02


def wait(condition: Callable[[], bool], seconds: float = GENEROUS, what: str = "the condition") -> None:
    """Until `condition()` is true; AssertionError names `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(POLL)


async def until(condition: Callable[[], bool], seconds: float = GENEROUS, what: str = "the condition") -> None:
    """`wait` that leaves the event loop its turns."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        await asyncio.sleep(POLL)
