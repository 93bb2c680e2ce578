"""Work that goes on when whoever waits for it leaves, and then fails without a word."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from service.system.shielded import shielded


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
