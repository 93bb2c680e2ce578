"""Await a task without cancelling it when the waiter is cancelled."""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


async def shielded(work: asyncio.Future[T]) -> T:
    """The result of the work, which a cancellation here does not reach. What the work raises when nobody waits any more
    is ignored: asyncio.shield logs it with a traceback from Python 3.14 on."""
    work.add_done_callback(_retrieve)
    await asyncio.wait([work])
    return work.result()


def _retrieve(work: asyncio.Future[T]) -> None:
    """asyncio logs what nobody has retrieved."""
    if not work.cancelled():
        work.exception()
