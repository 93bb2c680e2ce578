"""What deploy/ray decides by itself: keys and rankings, how many replicas, and what the front lets through."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.settings.reading import SettingsError
from service.settings.settings import Settings
from tests.support.ports import silent_port
from tests.support.ray_serve import ENVIRONMENT
from tests.support.victims import chat, image_part, video_part

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:::ray")]


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """That of test_ray.py, since Ray reads it at its import, and both may run in one process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


HALF = b"HTTP/1.1 200 OK\r\ncontent-type: audio/pcm\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\nconnection: close\r\ndate: then\r\nx-request-id: r\r\n\r\ngood"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def refused(code: str) -> bytes:
    body = json.dumps({"error": {"message": "Later.", "type": "server_error", "param": None, "code": code}}).encode()
    head = f"HTTP/1.1 503 Service Unavailable\r\nretry-after: 2\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


ENGINE_GONE = refused("engine_unavailable")


def key(body: object) -> str | None:
    from deploy.ray.routing import media_key

    return media_key(body if isinstance(body, bytes) else json.dumps(body).encode())


def test_a_conversation_keeps_the_key_of_its_first_picture() -> None:
    one, other = image_part(seed=1), image_part(seed=2)
    first = chat("What?", one)
    later = {**first, "messages": [*first["messages"], *chat("And this?", other)["messages"]], "temperature": 1}
    assert key(first) == key(later) is not None
    assert len({key(chat("?", part)) for part in (one, other, video_part())}) == 3
    assert key(chat("?", {"image_url": one["image_url"]["url"]})) == key(first)


@pytest.mark.parametrize("body", [chat("No picture."), {"messages": "?"}, [], b"", b"\xff", b"[" * 100_000])
def test_no_picture_no_key(body: object) -> None:
    assert key(body) is None


names = st.lists(st.text("abcdef0123456789", min_size=4, max_size=8), min_size=2, max_size=6, unique=True)


@given(st.text(), names)
def test_only_the_keys_of_a_replica_that_goes_move(key: str, names: list[str]) -> None:
    from deploy.ray.routing import ranked

    order = ranked(key, names)
    assert sorted(order) == sorted(names) and order == ranked(key, names[::-1])
    for gone in names:
        assert ranked(key, [name for name in names if name != gone]) == [name for name in order if name != gone]


def test_replicas_follow_the_gauges() -> None:
    from deploy.ray.replica import replicas_for_work

    gauges = {"waiting": {"a": 6.0, "b": 0.0}, "running": {"a": 8.0, "b": 4.0}}
    config = SimpleNamespace(get_target_ongoing_requests=lambda: 4.0)
    busy: Any = SimpleNamespace(aggregated_metrics=gauges, total_queued_requests=2.0, config=config)
    assert replicas_for_work(busy)[0] == 5.0
    fresh: Any = SimpleNamespace(aggregated_metrics=None, total_queued_requests=None, config=config)
    assert replicas_for_work(fresh)[0] == 0.0


@asynccontextmanager
async def front(
    *answers: bytes | None, listed_at_first: int | None = None, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, list[bytes]]]:
    """A front before replicas that always give these answers and hang up, chosen in this order, and the heads that they
    were sent. None: a replica that is not there. listed_at_first: how many the first listing finds; later ones find
    all."""
    from deploy.ray.front import Front

    heads: list[bytes] = []
    found = chain([listed_at_first], repeat(None))

    async def serve(answer: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        writer.close()

    async with AsyncExitStack() as stack:
        replicas = []
        for answer in answers:
            if answer is None:
                replicas.append(f"127.0.0.1:{stack.enter_context(silent_port())}")
            else:
                server = await asyncio.start_server(partial(serve, answer), "127.0.0.1", 0)
                replicas.append("{}:{}".format(*server.sockets[0].getsockname()))
                await stack.enter_async_context(server)

        def order(key: str | None, running: Iterable[str], failed: Collection[str]) -> list[str]:
            return sorted(running, key=lambda replica: (replica in failed, replicas.index(replica)))

        async def results_async(*, return_exceptions: bool) -> list[str | Exception]:
            assert return_exceptions
            return [RuntimeError("gone"), *reversed(replicas[: next(found)])]

        everyone = SimpleNamespace(results_async=results_async)
        handle: Any = SimpleNamespace(broadcast=lambda method: everyone)
        stack.enter_context(pytest.MonkeyPatch.context()).setattr("deploy.ray.routing.order", order)
        app: Any = Front(Settings(**settings), 8, handle).__serve_build_asgi_app__()
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")
        yield await stack.enter_async_context(client), heads


@pytest.mark.parametrize("setting", [{"api_processes": 2}, {"engines": 2}, {"gpus": 2}])
def test_a_replica_has_one_api_process_and_one_engine(setting: dict[str, int]) -> None:
    from deploy.ray.app import build

    with pytest.raises(SettingsError, match="api_processes, gpus, engines: a replica has one of each"):
        build({"settings": setting})


async def test_half_an_answer_does_not_look_complete() -> None:
    async with front(HALF) as (client, _):
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/v1/audio/speech", json={})


@pytest.mark.parametrize("lost", [b"", HEAD, ENGINE_GONE])
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/chat/completions"), ("POST", "/v1/audio/speech"), ("GET", "/v1/models")]
)
async def test_a_request_that_got_no_byte_is_tried_on_another_replica(lost: bytes, method: str, path: str) -> None:
    async with front(lost, WHOLE) as (client, heads):
        answer = await client.request(method, path, json=chat() if method == "POST" else None)
        assert (answer.status_code, answer.text) == (200, "good")
        assert [head.split()[:2] for head in heads] == [[method.encode(), path.encode()]] * 2


FULL, LEAVING = refused("overloaded"), refused("shutting_down")
CHAT, UPLOAD = "/v1/chat/completions", "/v1/audio/voices"


@pytest.mark.parametrize(
    ("replicas", "path", "code", "asked"),
    [
        ([b"", WHOLE], UPLOAD, "engine_unavailable", 1),  # what changes a replica is sent once
        ([FULL, FULL, WHOLE], CHAT, None, 3),
        ([LEAVING, LEAVING, WHOLE], CHAT, None, 3),
        ([FULL], CHAT, "overloaded", 1),
        ([FULL] * 2, CHAT, "overloaded", 2),
        ([FULL] * 4, CHAT, "overloaded", 3),
        ([b"", b"", WHOLE], CHAT, "engine_unavailable", 2),  # what ends a replica ends no third
        ([ENGINE_GONE, ENGINE_GONE, WHOLE], CHAT, "engine_unavailable", 2),
        ([None, None, WHOLE], CHAT, None, 1),  # it was never delivered
        ([None, None, None, WHOLE], CHAT, "engine_unavailable", 0),
        ([None, WHOLE], UPLOAD, "engine_unavailable", 0),
    ],
)
async def test_how_often_a_request_is_offered(
    replicas: list[bytes | None], path: str, code: str | None, asked: int
) -> None:
    async with front(*replicas) as (client, heads):
        answer = await client.post(path, json=chat())
        assert len(heads) == asked
        if code is None:
            assert (answer.status_code, answer.text) == (200, "good")
        else:
            assert answer.status_code == 503 and answer.headers["retry-after"]
            assert answer.json()["error"]["code"] == code


async def test_without_a_replica_requests_are_refused_in_time() -> None:
    async with front(queue_timeout=0.01) as (client, _):
        answer = await client.post("/v1/chat/completions", json=chat())
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "overloaded"
        assert answer.headers["retry-after"]


async def test_headers_of_a_connection_stay_on_it() -> None:
    async with front(WHOLE) as (client, heads):
        answer = await client.get("/v1/models?a=b%20c", headers={"te": "trailers", "x-mine": "1"})
        assert answer.text == "good" and not {"connection", "date", "x-request-id"} & answer.headers.keys()
        assert heads[0].startswith(b"GET /v1/models?a=b%20c HTTP/1.1\r\n")
        assert b"\r\nx-mine: 1\r\n" in heads[0] and b"\r\nte:" not in heads[0]


async def test_keys_and_origins_are_asked_for_at_the_door() -> None:
    async with front(WHOLE, api_key="k", metrics_open=False) as (client, heads):
        for method, path in (("POST", "/v1/chat/completions"), ("GET", "/metrics/targets"), ("GET", "/v1/models")):
            assert (await client.request(method, path)).status_code == 401
        foreign = {"authorization": "Bearer k", "origin": "http://elsewhere"}
        assert (await client.post("/v1/audio/speech", headers=foreign)).status_code == 403
        assert not heads
        assert (await client.options("/metrics/targets")).text == "good"  # the replica's to answer
        assert (await client.get("/v1/models", headers={"authorization": "Bearer k"})).text == "good"


async def test_a_name_that_a_page_may_have_bound_is_refused_at_the_door() -> None:
    foreign = {"host": "rebound.example"}
    async with front(WHOLE) as (client, heads):
        assert (await client.get("/v1/models", headers=foreign)).status_code == 421 and not heads
    async with front(WHOLE, allowed_host=("rebound.example",)) as (client, _):
        assert (await client.get("/v1/models", headers=foreign)).text == "good"
