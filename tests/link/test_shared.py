"""One engine process, several peers: each hears of its own requests, and none of them ends another's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from models.interfaces.media import Prompt
from service.api.engines.engine_client import EngineClient
from service.api.engines.request_stream import EngineError
from service.link.config import EngineConfig, ModelConfig
from service.link.engine_link import AttachedLink, ProcessLink
from service.link.messages import Abort, ChatRequest, Detach, Stop
from service.link.sampling import SamplingParams
from service.metrics.metrics import Metrics
from tests.support.waiting import GENEROUS, until

CONFIG = EngineConfig((ModelConfig("tiny", "/nowhere"),))
FAKE = "tests.support.fake_engine:serve"
STEPS = 'reprise_steps_total{kind="decode",model="tiny",reason="captured",route="replay"}'


@dataclass
class Matrix:
    """Two clients of one engine, as two API processes have them, and the client that supervises it."""

    supervisor: EngineClient
    clients: list[EngineClient]

    async def wait_ready(self) -> None:
        async with asyncio.timeout(GENEROUS):
            for client in (self.supervisor, *self.clients):
                await client.wait_ready()


@asynccontextmanager
async def matrix() -> AsyncIterator[Matrix]:
    clients = {peer: EngineClient(None, Metrics({"tiny": "chat"})) for peer in ("api-1", "api-2")}
    attaching = []

    def announce(address: str | None) -> None:
        for peer, client in clients.items():
            link = None if address is None else AttachedLink(address, peer, pytest.fail)
            attaching.append(asyncio.ensure_future(client.attach(link)))

    supervisor = EngineClient(lambda: ProcessLink(CONFIG, FAKE, announce=announce), Metrics({"tiny": "chat"}))
    made = Matrix(supervisor, [*clients.values()])
    supervisor.start()
    try:
        await made.wait_ready()
        yield made
    finally:
        for each in (*made.clients, supervisor):
            await each.stop()


def request(name: str, text: str, tokens: int = 1000) -> ChatRequest:
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    prompt = Prompt(ids, np.arange(len(ids), dtype=np.int32)[None], len(ids))
    return ChatRequest(name, "tiny", prompt, SamplingParams(tokens), time.monotonic())


async def answer(client: EngineClient, asked: ChatRequest) -> str:
    text = b""
    async with aclosing(client.submit(asked)) as deltas:
        async for delta in deltas:
            text += bytes(delta.token_ids)
    return text.decode()


def running(client: EngineClient) -> int:
    assert client.state is not None
    return client.state.models[0].running


async def test_each_peer_gets_the_answers_to_its_own_requests() -> None:
    async with matrix() as shared:
        texts = [f"request number {number}" for number in range(12)]
        clients = [shared.clients[number % 2] for number in range(12)]
        answers = await asyncio.gather(
            *(answer(client, request(text, text)) for client, text in zip(clients, texts, strict=True))
        )
        assert answers == texts
        assert all(STEPS not in client.metrics.exposition().decode() for client in shared.clients)
        assert STEPS in shared.supervisor.metrics.exposition().decode()


async def test_the_requests_of_a_peer_that_is_gone_are_aborted_and_no_others() -> None:
    async with matrix() as shared:
        gone, stays = shared.clients
        lost = [gone.submit(request(f"lost-{number}", "!endless")) for number in range(2)]
        kept = stays.submit(request("kept", "!endless"))
        await asyncio.gather(*(anext(stream) for stream in (*lost, kept)))
        await until(lambda: running(shared.supervisor) == 3, what="all three run")
        shared.supervisor.send(Detach("api-1"))
        await until(lambda: running(shared.supervisor) == 1, what="one is left")
        assert await anext(kept)
        late = gone.submit(request("late", "late"))  # sent before the news of its end, and read behind it
        assert await answer(stays, request("after", "after")) == "after"
        assert not late.ended
        await kept.aclose()
        await until(lambda: running(shared.supervisor) == 0, what="none is left")


async def test_a_peer_ends_neither_the_engine_nor_the_requests_of_others() -> None:
    async with matrix() as shared:
        one, other = shared.clients
        stream = one.submit(request("mine", "!endless"))
        await anext(stream)
        for command in (Abort("mine"), Stop(), Detach("api-1")):
            other.send(command)
        assert await answer(other, request("after", "after")) == "after"
        assert await anext(stream)
        await other.stop()
        assert await anext(stream) and shared.supervisor.ready
        await stream.aclose()


async def test_a_crash_is_noticed_by_all_and_all_come_back() -> None:
    async with matrix() as shared:
        waiting = [asyncio.create_task(answer(client, request(f"{client}", "!silent"))) for client in shared.clients]
        await until(lambda: running(shared.supervisor) == 2, what="both run")
        with pytest.raises(EngineError):
            await answer(shared.clients[0], request("crash", "!crash please"))
        for waiter in waiting:
            with pytest.raises(EngineError, match="engine stopped"):
                await waiter
        await until(lambda: all(client.phase == "down" or client.ready for client in shared.clients), what="noticed")
        await shared.wait_ready()
        for number, client in enumerate(shared.clients):
            assert await answer(client, request(f"again-{number}", "hello")) == "hello"
        assert shared.supervisor.restarts == 1
