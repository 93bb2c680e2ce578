"""An idle engine is stopped and started again for the next request. Time is a clock that the tests set."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import httpx
import numpy as np
import pytest
from websockets.sync.client import connect

from models.interfaces.media import Prompt
from service.api.engines import engine_client
from service.api.engines.engine_client import EngineClient
from service.api.engines.request_stream import EngineError
from service.link.config import EngineConfig, ModelConfig
from service.link.engine_link import EngineLink, ProcessLink
from service.link.messages import (
    ChatRequest,
    EncodeReference,
)
from service.link.sampling import SamplingParams
from service.metrics.metrics import Metrics
from tests.support.servers import running_server
from tests.support.waiting import GENEROUS, until, wait

FAKE = "tests.support.fake_engine:serve"
AFTER = 1000.0
GOOD = EngineConfig((ModelConfig("tiny", "/nowhere"),))
BROKEN = EngineConfig((ModelConfig("tiny", "/broken"),))


@dataclass
class Rig:
    client: EngineClient
    links: list[ProcessLink]
    """One for each start of the engine."""
    skipped: list[float] = field(default_factory=lambda: [0.0])

    async def doze(self) -> None:
        """Until the idle engine's process has ended."""
        process = self.links[-1]._process
        assert process is not None
        self.skipped[0] += AFTER
        await until(lambda: self.client.phase == "asleep" and process.returncode == 0, what="the engine has ended")
        await until(lambda: self.client._link is None, what="its end was seen")

    def metric(self, name: str) -> float:
        page = self.client._metrics.exposition().decode().splitlines()
        return sum(float(line.split()[-1]) for line in page if line.split()[0] == f"reprise_{name}")


@asynccontextmanager
async def rig(
    monkeypatch: pytest.MonkeyPatch, *configs: EngineConfig, look_seconds: float = 0.01
) -> AsyncIterator[Rig]:
    """configs: of the starts, one after the other; later ones are GOOD. look_seconds: between two looks at whether it
    is idle."""
    monkeypatch.setattr(engine_client, "HEARTBEAT_CHECK_SECONDS", look_seconds)
    monkeypatch.setattr(engine_client, "BACKOFF_SECONDS", (0.01,))
    links: list[ProcessLink] = []
    skipped = [0.0]
    starts = iter(configs)

    def make() -> EngineLink:
        links.append(ProcessLink(next(starts, GOOD), FAKE))
        return links[-1]

    def clock() -> float:
        return time.monotonic() + skipped[0]

    client = EngineClient(make, Metrics({"tiny": "chat"}), sleep_after=AFTER, clock=clock)
    client.start()
    try:
        async with asyncio.timeout(GENEROUS):
            await client.wait_ready()
        yield Rig(client, links, skipped)
    finally:
        await client.stop()


def chat(name: str, text: str) -> ChatRequest:
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    prompt = Prompt(ids, np.arange(len(ids), dtype=np.int32)[None], len(ids))
    return ChatRequest(name, "tiny", prompt, SamplingParams(max_tokens=10**6), time.monotonic())


async def answer(client: EngineClient, request: ChatRequest) -> str:
    async with asyncio.timeout(GENEROUS), aclosing(client.submit(request)) as deltas:
        return "".join([bytes(delta.token_ids).decode() async for delta in deltas])


async def test_it_sleeps_and_wakes_as_often_as_requests_come(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(monkeypatch) as made:
        client = made.client
        for turn in range(3):
            assert client.ready and client.phase == "ready" and made.metric("engine_asleep") == 0
            await made.doze()
            assert client.ready and client.alive and made.metric("engine_asleep") == 1
            assert await answer(client, chat(f"r{turn}", "good morning")) == "good morning"
            assert len(made.links) == turn + 2
        assert client.restarts == 0 and made.metric("engine_wake_duration_seconds_count") == 3


async def test_requests_that_come_while_it_wakes_wait_and_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(monkeypatch) as made:
        await made.doze()
        texts = [f"request {number}" for number in range(8)]
        waiting = [asyncio.create_task(answer(made.client, chat(text, text))) for text in texts]
        encoded = made.client.submit(EncodeReference("voice", "tiny", np.zeros(10, np.float32), "left", 0.0))
        async with aclosing(encoded) as answers:
            assert [one.patches.shape async for one in answers] == [(3, 4, 2)]
        assert await asyncio.gather(*waiting) == texts and len(made.links) == 2


async def test_an_open_stream_keeps_it_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(monkeypatch) as made:
        async with aclosing(made.client.submit(chat("long", "!endless"))) as deltas:
            for _ in range(5):
                made.skipped[0] += 2 * AFTER
                looked = made.client._silence._looked
                await until(lambda looked=looked: made.client._silence._looked != looked, what="the watchdog looked")
                await anext(deltas)
            assert made.client.phase == "ready" and len(made.links) == 1
        await made.doze()


async def test_a_request_between_two_looks_keeps_it_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(monkeypatch, look_seconds=3600.0) as made:
        made.skipped[0] += AFTER
        assert made.client.sleep.due
        assert await answer(made.client, chat("short", "hello")) == "hello"
        assert not made.client.sleep.due


@pytest.mark.slow
async def test_a_wake_that_fails_is_said_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(monkeypatch, GOOD, BROKEN) as made:
        await made.doze()
        with pytest.raises(EngineError, match="could not be started for the request") as failure:
            await answer(made.client, chat("unlucky", "hello"))
        assert failure.value.status == 503 and failure.value.retry_after
        async with asyncio.timeout(GENEROUS):
            await made.client.wait_ready()
        assert await answer(made.client, chat("it", "hello")) == "hello" and made.client.restarts == 1
        await made.doze()
        assert await answer(made.client, chat("again", "hello")) == "hello"


def test_an_open_websocket_keeps_the_engine_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "HEARTBEAT_CHECK_SECONDS", 0.05)
    with running_server(sleep_after=0.2) as server:
        with connect(server.url.replace("http", "ws") + "/v1/realtime?model=tiny") as client:
            assert "session.created" in str(client.recv())
            body = {"model": "tiny", "messages": [{"role": "user", "content": "wake up"}]}
            assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=GENEROUS).status_code == 200
            (engine,), asked = server.context.engine.clients, list[bool]()
            in_use = engine.in_use
            monkeypatch.setattr(engine, "in_use", lambda: asked.append(in_use()) or asked[-1])
            wait(lambda: len(asked) >= 10, GENEROUS, "the engine has been looked at for longer than `sleep_after`")
            assert all(asked) and engine.phase == "ready"
        wait(lambda: server.context.engine.phase == "asleep", GENEROUS, "the engine sleeps once the socket is closed")
