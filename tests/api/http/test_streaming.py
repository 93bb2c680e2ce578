"""A streamed response, and work that a client waits for, by themselves, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
from starlette.requests import Request

from service.api.http import streaming
from service.api.http.errors import ClientLeft
from service.api.http.record import RequestRecord
from service.api.http.streaming import LiveResponse, unless_disconnected


async def test_a_client_that_leaves_while_the_error_is_sent_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit of the body is over by then: nobody may end it once more."""
    monkeypatch.setattr(streaming, "MONITOR_DELAY", 0.0)
    left, problems = asyncio.Event(), list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))

    async def receive() -> dict[str, str]:
        await left.wait()
        return {"type": "http.disconnect"}

    sent = []

    async def send(message: Any) -> None:
        sent.append(message.get("body"))
        if message.get("body") == b"failed":
            left.set()
            for _ in range(10):
                await asyncio.sleep(0)

    async def chunks() -> AsyncGenerator[bytes]:
        yield b"first"
        while response._watcher is None:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        raise ValueError("of the engine")

    response = LiveResponse(
        chunks(), media_type="text/plain", timeout=600.0, write_timeout=600.0, on_error=lambda answer: b"failed"
    )
    record = RequestRecord("one", "chat", cast(Any, None))
    await response({"reprise.record": record}, receive, send)
    watcher = response._watcher
    assert sent[-1] == b"failed" and record.outcome == "error"
    assert watcher is not None and watcher.cancelled() and not problems


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


async def test_work_ends_when_its_client_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "MONITOR_DELAY", 0.0)
    client, ended = Client(), list[str]()

    async def work() -> None:
        client.left.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    with pytest.raises(ClientLeft):
        await unless_disconnected(client.request, work())
    assert ended == ["cancelled"]
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()


async def test_short_work_takes_one_turn_of_the_loop_and_nobody_listens() -> None:
    client = Client()
    tasks = asyncio.all_tasks()

    async def work() -> tuple[str, set[Any]]:
        return "done", asyncio.all_tasks()

    assert await unless_disconnected(client.request, work()) == ("done", tasks)
    assert not client.listened


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
