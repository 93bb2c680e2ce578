"""A streamed response by itself, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from service.api.http import streaming
from service.api.http.record import RequestRecord
from service.api.http.streaming import LiveResponse


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
