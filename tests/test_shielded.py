"""Work that goes on when whoever waits for it leaves, and then fails without a word."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from service.system.shielded import shielded

ROOT = Path(__file__).parents[1]


async def test_work_goes_on_when_its_waiter_leaves() -> None:
    work = asyncio.get_running_loop().create_future()
    left, stays = (asyncio.create_task(shielded(work)) for _ in range(2))
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert not work.done()
    work.set_result(5)
    assert await stays == 5


async def test_a_waiter_gets_the_failure() -> None:
    work = asyncio.get_running_loop().create_future()
    waiter = asyncio.create_task(shielded(work))
    await asyncio.sleep(0)
    work.set_exception(OSError("it failed"))
    with pytest.raises(OSError, match="it failed"):
        await waiter


async def test_a_failure_that_nobody_waits_for_is_not_logged() -> None:
    logged: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context))
    work = asyncio.get_running_loop().create_future()
    waiter = asyncio.create_task(shielded(work))
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    work.set_exception(OSError("it failed"))
    await asyncio.sleep(0)
    del work, waiter
    gc.collect()
    assert not logged


def test_nothing_is_shielded_in_a_way_that_logs() -> None:
    """asyncio.shield does, from Python 3.14 on, a traceback for each client that leaves while its work fails."""
    assert not [path for path in (ROOT / "service").rglob("*.py") if "await asyncio.shield(" in path.read_text()]
