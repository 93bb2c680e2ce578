"""Requests that come at once are prepared a few in each turn of the event loop."""

from __future__ import annotations

import asyncio

from service.api.http.admission import Turns


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
