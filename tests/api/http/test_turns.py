"""Requests that come at once are prepared a few in each turn of the event loop."""

from __future__ import annotations

import asyncio

from service.api.http.turns import Turns
from tests.support.waiting import GENEROUS


async def test_a_burst_passes_in_order_a_few_in_each_turn() -> None:
    turns = Turns(at_once=3)
    events: list[int | str] = []

    async def request(number: int) -> None:
        await turns.wait()
        events.append(number)

    async def other_streams() -> None:
        while len(events) < 40:
            events.append("io")
            await asyncio.sleep(0)

    await asyncio.gather(*(request(number) for number in range(10)), other_streams())
    assert [event for event in events if event != "io"] == list(range(10))
    served = "".join("." if event == "io" else "r" for event in events)
    assert "rrrr" not in served and served.count("rrr") == 3


async def test_a_request_that_is_cancelled_takes_no_turn() -> None:
    turns = Turns(at_once=1)
    tasks = [asyncio.create_task(turns.wait()) for _ in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), GENEROUS)
    assert [type(result) for result in results] == [type(None), asyncio.CancelledError, type(None), type(None)]
    await asyncio.wait_for(turns.wait(), GENEROUS)
