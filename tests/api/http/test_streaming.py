"""A streamed response, and work that a client waits for, by themselves, without a server."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import Request

from service.api.http import streaming
from service.api.http.streaming import unless_disconnected


class Client:
    """A request whose client leaves when `left` is set."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.listened = False
        self.request = Request({"type": "http"}, self._receive)

    async def _receive(self) -> dict[str, str]:
        self.listened = True
        await self.left.wait()
        return {"type": "http.disconnect"}


async def test_work_that_times_out_by_itself_has_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "MONITOR_DELAY", 0.0)
    client = Client()

    async def work() -> None:
        while not client.listened:
            await asyncio.sleep(0)
        raise TimeoutError("of the work")

    with pytest.raises(TimeoutError, match="of the work"):
        await unless_disconnected(client.request, work())


async def test_a_time_limit_around_the_work_is_no_disconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "MONITOR_DELAY", 0.0)
    client = Client()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as limit:

            async def work() -> None:
                limit.reschedule(0.0)
                await asyncio.Event().wait()

            await unless_disconnected(client.request, work())
