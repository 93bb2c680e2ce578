"""Requests to an engine and its answers, of one peer and of several; what happens when it crashes, is restarted or
stops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import numpy as np
import pytest

from models.interfaces.media import Prompt
from service.api.engines.engine_client import EngineClient
from service.api.engines.request_stream import EngineError, RequestStream, merge
from service.link.config import EngineConfig, ModelConfig
from service.link.engine_link import AttachedLink, EngineLink, ProcessLink
from service.link.messages import (
    Abort,
    ChatDelta,
    ChatRequest,
    Detach,
    EncodeReference,
    PhaseTimes,
    StepCounts,
    Stop,
    TokenInfo,
)
from service.link.sampling import SamplingParams
from service.metrics.metrics import Metrics
from tests.support import fake_engine
from tests.support.inline_link import InlineLink
from tests.support.waiting import GENEROUS, until

FAKE = "tests.support.fake_engine:serve"
CONFIG = EngineConfig((ModelConfig("tiny", "/nowhere"),))


def process_link(path: str = "/nowhere") -> EngineLink:
    return ProcessLink(EngineConfig((ModelConfig("tiny", path),)), FAKE)


def inline_link() -> EngineLink:
    return InlineLink(CONFIG, fake_engine.serve)


@asynccontextmanager
async def running_client(link: Callable[[], EngineLink] = inline_link) -> AsyncIterator[EngineClient]:
    client = EngineClient(link, Metrics())
    client.start()
    try:
        async with asyncio.timeout(GENEROUS):
            await client.wait_ready()
        yield client
    finally:
        await client.stop()


def request(name: str, text: str, **sampling: int) -> ChatRequest:
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    prompt = Prompt(ids, np.arange(len(ids), dtype=np.int32)[None], len(ids))
    return ChatRequest(name, "tiny", prompt, SamplingParams(**{"max_tokens": 1000, **sampling}), time.monotonic())


async def answer(client: EngineClient, asked: ChatRequest) -> tuple[str, str | None]:
    text, finish = b"", None
    async with aclosing(client.submit(asked)) as deltas:
        async for delta in deltas:
            text += bytes(delta.token_ids)
            finish = delta.finish_reason
    return text.decode(), finish


@pytest.mark.parametrize("link", [inline_link, process_link])
async def test_many_requests_at_once(link: Callable[[], EngineLink]) -> None:
    async with running_client(link) as client:
        texts = [f"request number {n}" for n in range(12)]
        answers = await asyncio.gather(*(answer(client, request(f"r{n}", text)) for n, text in enumerate(texts)))
        assert answers == [(text, "stop") for text in texts]
        assert await answer(client, request("cut", "abcdef", max_tokens=3)) == ("abc", "length")
        async with aclosing(client.submit(EncodeReference("e", "tiny", np.zeros(10, np.float32), "left", 0.0))) as one:
            assert [delta.patches.shape async for delta in one] == [(3, 4, 2)]
        assert len(client.requests) == 0
        exposition = client.metrics.exposition().decode()
        assert 'reprise_steps_total{kind="decode",model="tiny",reason="captured",route="replay"}' in exposition


async def test_closing_a_stream_aborts_the_work() -> None:
    async with running_client() as client:
        async with aclosing(client.submit(request("r", "!endless", max_tokens=10**6))) as deltas:
            await anext(deltas)
            assert len(client.requests) == 1
        assert len(client.requests) == 0
        await until(lambda: client.state is not None and not client.state.models[0].running, what="the work has ended")


async def test_a_failed_request_raises_and_the_others_go_on() -> None:
    """What the engine turns away is counted."""
    async with running_client() as client:
        with pytest.raises(EngineError) as refusal:
            await answer(client, request("full", "!full"))
        assert refusal.value.retry_after == 1.0
        line = 'reprise_admission_rejections_total{endpoint="chat",reason="queue_full"} 1.0'
        assert line in client.metrics.exposition().decode()
        other = asyncio.create_task(answer(client, request("other", "!slow but sure")))
        with pytest.raises(EngineError) as failure:
            await answer(client, request("bad", "!fail"))
        assert (failure.value.status, failure.value.code) == (500, "fake_failure")
        assert await other == ("!slow but sure", "stop")


async def test_an_engine_that_cannot_start_is_not_tried_for_ever() -> None:
    client = EngineClient(lambda: process_link("/broken"), Metrics())
    client.start()
    with pytest.raises(EngineError, match="exit status 1"):
        await client.wait_ready()
    assert client.phase == "failed"
    await client.stop()


async def test_an_engine_that_was_ready_is_tried_again_whatever_ended_it() -> None:
    """Memory that a dead process still holds, a disk that is away for a moment: the next start may succeed."""
    lives = iter(["/nowhere", "/unfit", "/nowhere"])
    client = EngineClient(lambda: process_link(next(lives)), Metrics())
    client.start()
    async with asyncio.timeout(2 * GENEROUS):
        await client.wait_ready()
        with pytest.raises(EngineError):
            await answer(client, request("crash", "!crash please"))
        await client.wait_ready()
    assert client.restarts == 2
    assert await answer(client, request("again", "hello")) == ("hello", "stop")
    await client.stop()


def test_chat_deltas_merge_into_one() -> None:
    times, steps = PhaseTimes(1.0, 2.0), StepCounts(3, 2, 5, 0)
    deltas = [
        ChatDelta("r", (1,), (TokenInfo(-1.0),), None, 4, None, times),
        ChatDelta("r", (2, 3), (), "stop", 0, steps),
    ]
    assert merge(deltas) == ChatDelta("r", (1, 2, 3), (TokenInfo(-1.0),), "stop", 4, steps, times)


async def test_what_waits_for_a_slow_reader_comes_together() -> None:
    stream = RequestStream[ChatDelta](request("r", "x"), lambda request_id: None)
    for token in (1, 2, 3):
        stream.deliver(ChatDelta("r", (token,)), last=token == 3)
    assert [delta.token_ids async for delta in stream] == [(1, 2, 3)]


# Several peers of one engine: each hears of its own requests, and none of them ends another's.

STEPS = 'reprise_steps_total{kind="decode",model="tiny",reason="captured",route="replay"}'


async def all_ready(*clients: EngineClient) -> None:
    async with asyncio.timeout(GENEROUS):
        for client in clients:
            await client.wait_ready()


@asynccontextmanager
async def peers() -> AsyncIterator[tuple[EngineClient, EngineClient, EngineClient]]:
    """The client that supervises an engine, and two more, as two API processes have them."""
    clients = {peer: EngineClient(None, Metrics({"tiny": "chat"})) for peer in ("api-1", "api-2")}
    attaching = []

    def announce(address: str | None) -> None:
        for peer, client in clients.items():
            link = None if address is None else AttachedLink(address, peer, pytest.fail)
            attaching.append(asyncio.ensure_future(client.attach(link)))

    supervisor = EngineClient(lambda: ProcessLink(CONFIG, FAKE, announce=announce), Metrics({"tiny": "chat"}))
    one, other = clients.values()
    supervisor.start()
    try:
        await all_ready(supervisor, one, other)
        yield supervisor, one, other
    finally:
        for each in (one, other, supervisor):
            await each.stop()


def running(client: EngineClient) -> int:
    assert client.state is not None
    return client.state.models[0].running


async def test_the_requests_of_a_peer_that_is_gone_are_aborted_and_no_others() -> None:
    async with peers() as (supervisor, gone, stays):
        lost = [gone.submit(request(f"lost-{number}", "!endless")) for number in range(2)]
        kept = stays.submit(request("kept", "!endless"))
        await asyncio.gather(*(anext(stream) for stream in (*lost, kept)))
        await until(lambda: running(supervisor) == 3, what="all three run")
        supervisor.send(Detach("api-1"))
        await until(lambda: running(supervisor) == 1, what="one is left")
        assert await anext(kept)
        late = gone.submit(request("late", "late"))  # sent before the news of its end, and read behind it
        assert await answer(stays, request("after", "after")) == ("after", "stop")
        assert not late.ended
        await kept.aclose()
        await until(lambda: running(supervisor) == 0, what="none is left")


async def test_a_peer_ends_neither_the_engine_nor_the_requests_of_others() -> None:
    """It gets the answers to its own, and the supervisor what the engine counts."""
    async with peers() as (supervisor, one, other):
        asked = [((one, other)[number % 2], f"request number {number}") for number in range(12)]
        answers = await asyncio.gather(*(answer(client, request(text, text)) for client, text in asked))
        assert answers == [(text, "stop") for _, text in asked]
        assert all(STEPS not in client.metrics.exposition().decode() for client in (one, other))
        assert STEPS in supervisor.metrics.exposition().decode()
        stream = one.submit(request("mine", "!endless"))
        await anext(stream)
        for command in (Abort("mine"), Stop(), Detach("api-1")):
            other.send(command)
        assert await answer(other, request("after", "after")) == ("after", "stop")
        assert await anext(stream)
        await other.stop()
        assert await anext(stream) and supervisor.ready
        await stream.aclose()


async def test_a_crash_is_noticed_by_all_and_all_come_back() -> None:
    async with peers() as (supervisor, *clients):
        waiting = [asyncio.create_task(answer(client, request(f"{client}", "!silent"))) for client in clients]
        await until(lambda: running(supervisor) == 2, what="both run")
        with pytest.raises(EngineError) as failure:
            await answer(clients[0], request("crash", "!crash please"))
        assert failure.value.status == 503 and failure.value.retry_after
        for waiter in waiting:
            with pytest.raises(EngineError, match="engine stopped"):
                await waiter
        await until(lambda: all(client.phase == "down" or client.ready for client in clients), what="noticed")
        with pytest.raises(EngineError, match="not ready"):
            supervisor.submit(request("early", "hello"))
        await all_ready(supervisor, *clients)
        for number, client in enumerate(clients):
            assert await answer(client, request(f"again-{number}", "hello")) == ("hello", "stop")
        assert supervisor.restarts == 1
