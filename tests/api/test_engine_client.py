"""Requests to an engine and its answers; what happens when it crashes, hangs, is restarted or stops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from models.interfaces.media import Prompt
from service.api.engines.engine_client import EngineClient
from service.api.engines.request_stream import EngineError, RequestStream, merge
from service.link.config import EngineConfig, ModelConfig
from service.link.engine_link import EngineLink, ProcessLink
from service.link.messages import ChatDelta, ChatRequest, EncodeReference, PhaseTimes, StepCounts, TokenInfo
from service.link.sampling import SamplingParams
from service.metrics.metrics import Metrics
from tests.support import fake_engine
from tests.support.inline_link import InlineLink
from tests.support.waiting import GENEROUS, until

FAKE = "tests.support.fake_engine:serve"
CONFIG = EngineConfig((ModelConfig("tiny", "/nowhere"),))


def _links(kind: str, config: EngineConfig = CONFIG) -> Callable[[], EngineLink]:
    if kind == "process":
        return lambda: ProcessLink(config, FAKE)
    return lambda: InlineLink(config, fake_engine.serve)


@asynccontextmanager
async def _running(kind: str, **settings: float) -> AsyncIterator[EngineClient]:
    client = EngineClient(_links(kind), Metrics(), **settings)
    client.start()
    try:
        async with asyncio.timeout(GENEROUS):
            await client.wait_ready()
        yield client
    finally:
        await client.stop()


def _request(name: str, text: str, **sampling: int) -> ChatRequest:
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    prompt = Prompt(ids, np.arange(len(ids), dtype=np.int32)[None], len(ids))
    return ChatRequest(name, "tiny", prompt, SamplingParams(**{"max_tokens": 1000, **sampling}), time.monotonic())


async def _answer(client: EngineClient, request: ChatRequest) -> tuple[str, str | None]:
    text, finish = b"", None
    async with aclosing(client.submit(request)) as deltas:
        async for delta in deltas:
            text += bytes(delta.token_ids)
            finish = delta.finish_reason
    return text.decode(), finish


@pytest.mark.parametrize("kind", ["inline", "process"])
async def test_many_requests_at_once(kind: str) -> None:
    async with _running(kind) as client:
        texts = [f"request number {n}" for n in range(12)]
        answers = await asyncio.gather(*(_answer(client, _request(f"r{n}", text)) for n, text in enumerate(texts)))
        assert answers == [(text, "stop") for text in texts]
        assert await _answer(client, _request("cut", "abcdef", max_tokens=3)) == ("abc", "length")
        async with aclosing(client.submit(EncodeReference("e", "tiny", np.zeros(10, np.float32), "left", 0.0))) as one:
            assert [delta.patches.shape async for delta in one] == [(3, 4, 2)]
        assert len(client.requests) == 0
        exposition = client.metrics.exposition().decode()
        assert 'reprise_steps_total{kind="decode",model="tiny",reason="captured",route="replay"}' in exposition


async def test_closing_a_stream_aborts_the_work() -> None:
    async with _running("inline") as client:
        async with aclosing(client.submit(_request("r", "!endless", max_tokens=10**6))) as deltas:
            await anext(deltas)
            assert len(client.requests) == 1
        assert len(client.requests) == 0
        await until(lambda: client.state is not None and not client.state.models[0].running, what="the work has ended")


async def test_a_failed_request_raises_and_the_others_go_on() -> None:
    async with _running("inline") as client:
        other = asyncio.create_task(_answer(client, _request("other", "!slow but sure")))
        with pytest.raises(EngineError) as failure:
            await _answer(client, _request("bad", "!fail"))
        assert (failure.value.status, failure.value.code) == (500, "fake_failure")
        assert await other == ("!slow but sure", "stop")


async def test_a_crash_fails_all_waiters_at_once_and_the_engine_comes_back() -> None:
    async with _running("process") as client:
        waiters = [asyncio.create_task(_answer(client, _request(f"r{n}", "!silent"))) for n in range(3)]
        await until(lambda: len(client.requests) == 3, what="the waiters wait")
        with pytest.raises(EngineError) as failure:
            await _answer(client, _request("crash", "!crash please"))
        assert failure.value.status == 503 and failure.value.retry_after
        for waiter in waiters:
            with pytest.raises(EngineError, match="engine stopped"):
                await waiter
        with pytest.raises(EngineError, match="not ready"):
            client.submit(_request("early", "hello"))
        async with asyncio.timeout(GENEROUS):
            await client.wait_ready()
        assert await _answer(client, _request("again", "hello")) == ("hello", "stop")
        assert client.restarts == 1


async def test_an_engine_that_cannot_start_is_not_tried_for_ever() -> None:
    config = EngineConfig((ModelConfig("tiny", "/broken"),))
    client = EngineClient(_links("process", config), Metrics())
    client.start()
    with pytest.raises(EngineError, match="exit status 1"):
        await client.wait_ready()
    assert client.phase == "failed"
    await client.stop()


async def test_an_engine_that_was_ready_is_tried_again_whatever_ended_it() -> None:
    """Memory that a dead process still holds, a disk that is away for a moment: the next start may succeed."""
    good, broken = _links("process"), _links("process", EngineConfig((ModelConfig("tiny", "/unfit"),)))
    lives = iter([good, broken, good])
    client = EngineClient(lambda: next(lives)(), Metrics())
    client.start()
    async with asyncio.timeout(2 * GENEROUS):
        await client.wait_ready()
        with pytest.raises(EngineError):
            await _answer(client, _request("crash", "!crash please"))
        await client.wait_ready()
    assert client.restarts == 2
    assert await _answer(client, _request("again", "hello")) == ("hello", "stop")
    await client.stop()


async def test_stop_leaves_no_process_and_no_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with _running("process") as client:
        (directory,) = tmp_path.iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700
        link = client._link
        assert isinstance(link, ProcessLink) and link.begun is not None
        process = link.begun.process
    assert process.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_chat_deltas_merge_into_one() -> None:
    times, steps = PhaseTimes(1.0, 2.0), StepCounts(3, 2, 5, 0)
    deltas = [
        ChatDelta("r", (1,), (TokenInfo(-1.0),), None, 4, None, times),
        ChatDelta("r", (2, 3), (), "stop", 0, steps),
    ]
    assert merge(deltas) == ChatDelta("r", (1, 2, 3), (TokenInfo(-1.0),), "stop", 4, steps, times)


async def test_what_waits_for_a_slow_reader_comes_together() -> None:
    stream = RequestStream[ChatDelta](_request("r", "x"), lambda request_id: None)
    for token in (1, 2, 3):
        stream.deliver(ChatDelta("r", (token,)), last=token == 3)
    assert [delta.token_ids async for delta in stream] == [(1, 2, 3)]


async def test_what_the_engine_turns_away_is_counted() -> None:
    async with _running("inline") as client:
        with pytest.raises(EngineError):
            await _answer(client, _request("full", "!full"))
        line = 'reprise_admission_rejections_total{endpoint="chat",reason="queue_full"} 1.0'
        assert line in client.metrics.exposition().decode()
