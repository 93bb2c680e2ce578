"""Limits of bytes, waiting and origin, through the whole application; those of shapes and counts are in test_errors."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from PIL import Image
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from models import resizing
from service.link.config import EngineConfig
from service.link.engine_link import EngineLink, InlineLink
from service.link.messages import Outputs
from service.listener import bind
from service.media import image_decode
from service.media.fetch import FetchesBusy
from service.media.image_decode import upright_picture
from service.settings import Settings
from tests.media.samples import encoded, picture
from tests.support import fake_engine
from tests.support.servers import RunningServer, running_server
from tests.support.victims import data_url
from tests.support.waiting import GENEROUS, until, wait


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


def picture_body(size: int) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": data_url(encoded(picture(size, size), "JPEG"))}}
    return {"model": "tiny", "messages": [{"role": "user", "content": [part, {"type": "text", "text": "!silent"}]}]}


def test_pieces_of_a_stream_are_not_held_back() -> None:
    """Or each answer would take 40 ms more on a line that acknowledges late."""
    with bind(Settings(port=0)) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_every_address_of_ipv6_is_every_address_of_ipv4() -> None:
    with bind(Settings(host="::", port=0, insecure_no_auth=True)) as listener:
        port = listener.getsockname()[1]
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, port), GENEROUS).close()


def test_one_connection_is_accepted_at_a_time_while_many_may_wait(server: RunningServer) -> None:
    """asyncio takes the same number for both, and would try and log that many times when descriptors run out."""
    assert server.server.config.backlog == 1
    with bind(Settings(port=0)) as listener, ExitStack() as waiting:
        listener.listen(1)
        for _ in range(10):
            waiting.enter_context(socket.create_connection(listener.getsockname(), GENEROUS))


def test_isolated_pictures_are_answered_like_others() -> None:
    said = picture_body(300)
    said["messages"][0]["content"][1]["text"] = "what is it"
    answers = []
    for isolated in (False, True):
        with running_server(isolate_images=isolated) as server:
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=said, timeout=600)
            broken = json.loads(json.dumps(said).replace(";base64,", ";base64,AAAA"))
            refused = httpx.post(f"{server.url}/v1/chat/completions", json=broken, timeout=600)
            answers.append((answer.json()["choices"], refused.status_code, refused.json()))
    assert answers[0] == answers[1] and answers[0][1] == 400


def test_a_body_of_undeclared_length_counts() -> None:
    with running_server(max_pending_bytes=4000, max_body=100_000) as server:

        def pieces(size: int) -> Iterator[bytes]:
            yield json.dumps(body("x" * size, max_tokens=5)).encode()

        async def scenario() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=GENEROUS) as http:
                held = asyncio.create_task(http.post("/v1/chat/completions", json=body("!silent" + "x" * 3000)))
                await until(lambda: server.context.engine.in_flight == 1)
                refused = await asyncio.to_thread(
                    httpx.post, f"{server.url}/v1/chat/completions", content=pieces(3000), timeout=GENEROUS
                )
                assert refused.status_code == 503 and refused.headers["retry-after"]
                held.cancel()
                await asyncio.gather(held, return_exceptions=True)
                await until(lambda: server.context.admission.pending_bytes == 0)

        asyncio.run(scenario())
        alone = httpx.post(f"{server.url}/v1/chat/completions", content=pieces(3000), timeout=GENEROUS)
        assert alone.status_code == 200
        too_long = httpx.post(f"{server.url}/v1/chat/completions", content=pieces(200_000))
        assert too_long.status_code == 413
        server.wait_idle()


async def test_decoded_pictures_count_against_the_bytes_in_progress() -> None:
    """Small files, large pictures: what they take when they are decoded is what is bounded."""
    with running_server(max_pending_bytes=1_500_000) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=GENEROUS) as http:
            held = asyncio.create_task(http.post("/v1/chat/completions", json=picture_body(600)))
            await until(lambda: server.context.engine.in_flight == 1)
            assert server.context.admission.pending_bytes > 600 * 600 * 3
            refused = await http.post("/v1/chat/completions", json=picture_body(600))
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
            assert (await http.post("/v1/chat/completions", json=body("hello"))).status_code == 200
            held.cancel()
            await asyncio.gather(held, return_exceptions=True)
            await until(lambda: server.context.admission.pending_bytes == 0)
            alone = asyncio.create_task(http.post("/v1/chat/completions", json=picture_body(900)))
            await until(lambda: server.context.engine.in_flight == 1)
            alone.cancel()
            await asyncio.gather(alone, return_exceptions=True)


@pytest.mark.parametrize("path", ["chat", "realtime"])
async def test_a_picture_without_room_is_refused_before_it_is_decoded(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []

    def counting(image: Image.Image, data: bytes, *, field: str) -> Image.Image:
        decoded.append(image.width)
        return upright_picture(image, data, field=field)

    monkeypatch.setattr(image_decode, "upright_picture", counting)
    with running_server(max_pending_bytes=1_500_000) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=GENEROUS) as http:
            held = asyncio.create_task(http.post("/v1/chat/completions", json=picture_body(600)))
            await until(lambda: server.context.engine.in_flight == 1)
            if path == "chat":
                refused = await http.post("/v1/chat/completions", json=picture_body(500))
                assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
            else:
                url = picture_body(500)["messages"][0]["content"][0]["image_url"]["url"]
                item = {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": url}]}
                with connect(f"{server.url.replace('http', 'ws')}/v1/realtime?model=tiny") as socket:
                    socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
                    events = (json.loads(socket.recv(GENEROUS)) for _ in range(9))
                    error = next(event["error"] for event in events if event["type"] == "error")
                assert error["code"] == "overloaded"
            assert decoded == [600]
            held.cancel()
            await asyncio.gather(held, return_exceptions=True)
            await until(lambda: server.context.admission.pending_bytes == 0)


@pytest.mark.parametrize("kind", ["image_url", "video_url"])
def test_media_that_are_fetched_without_room_for_them_get_503(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch(url: str, *, admit: Callable[[int], None], **limits: object) -> bytes:
        for _ in range(1000):
            admit(1000)
        raise AssertionError("nobody stopped it")

    with running_server(max_pending_bytes=200_000) as server:
        monkeypatch.setattr(server.context.media._fetcher, "fetch", fetch)
        other = server.context.admission.ticket("chat")
        other.grow(1, 1000)
        part = {"type": kind, kind: {"url": "https://example.org/media"}}
        said = {"model": "tiny", "messages": [{"role": "user", "content": [part, {"type": "text", "text": "hello"}]}]}
        refused = httpx.post(f"{server.url}/v1/chat/completions", json=said, timeout=GENEROUS)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "overloaded"
        other.release()
        server.wait_idle()


def test_a_request_whose_url_gets_no_turn_can_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch(url: str, *, client: str, **limits: object) -> bytes:
        clients.append(client)
        raise FetchesBusy("messages[0].content[0].image_url: not fetched")

    clients: list[str] = []
    with running_server() as server:
        monkeypatch.setattr(server.context.media._fetcher, "fetch", fetch)
        part = {"type": "image_url", "image_url": {"url": "https://example.org/media"}}
        said = {"model": "tiny", "messages": [{"role": "user", "content": [part, {"type": "text", "text": "hello"}]}]}
        refused = httpx.post(f"{server.url}/v1/chat/completions", json=said, timeout=GENEROUS)
        assert refused.status_code == 503 and refused.headers["retry-after"] and clients == ["127.0.0.1"]
        assert refused.json()["error"]["message"] == "messages[0].content[0].image_url: not fetched"
        counted = 'reprise_admission_rejections_total{endpoint="chat",reason="fetches"} 1.0'
        assert counted in httpx.get(f"{server.url}/metrics").text
        server.wait_idle()


def test_health_tells_of_a_hung_engine() -> None:
    """An engine that sends nothing is not alive, even while nobody has been able to replace it."""

    hang, over = threading.Event(), threading.Event()

    def hangs(config: EngineConfig, channel: Any) -> None:
        while not hang.wait(0.02):
            channel.send(Outputs(state=fake_engine.state_of(config, "ready", 0)))
        over.wait()

    def make_link(config: EngineConfig) -> EngineLink:
        return InlineLink(config, hangs)

    def health() -> httpx.Response:
        return httpx.get(f"{server.url}/health")

    with running_server(make_link=make_link, hang_timeout=0.4) as server:
        try:
            wait(lambda: health().status_code == 200, what="the engine is alive")
            hang.set()
            wait(lambda: health().status_code == 503, what="health tells of the hung engine")
            assert health().json()["status"] == "engine_down" and health().headers["retry-after"]
        finally:
            hang.set()
            over.set()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(cors_origin=("https://app.example",)) as server:
        yield server


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("https://app.example", 200),
        ("https://evil.example", 403),
        ("null", 403),
        ("http://127.0.0.1:1", 403),
        ("same", 200),
    ],
)
def test_pages_of_other_origins_make_nothing_happen(server: RunningServer, origin: str | None, status: int) -> None:
    headers = {"content-type": "text/plain"}  # what a page may send without asking first
    if origin is not None:
        headers["origin"] = server.url if origin == "same" else origin
    response = httpx.post(f"{server.url}/v1/chat/completions", content=json.dumps(body("hello")), headers=headers)
    assert response.status_code == status
    assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200


def test_websockets_of_other_origins_are_refused(server: RunningServer) -> None:
    url = server.url.replace("http", "ws", 1) + "/v1/audio/speech/stream"
    with pytest.raises((InvalidStatus, ConnectionClosed)), connect(url, origin="https://evil.example") as socket:
        socket.recv(timeout=GENEROUS)
    with connect(url, origin="https://app.example") as socket:
        socket.send(json.dumps({"type": "session.close"}))
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=GENEROUS)


def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(server: RunningServer) -> None:
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body("x" * (16 * 4096 + 1)))
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("length", [4096, 16 * 4096 + 1])
def test_clients_can_tell_that_the_context_is_too_short(server: RunningServer, length: int) -> None:
    """Those that shorten a conversation look for words in the message: LangChain for the first of these, many for the
    last."""
    error = httpx.post(f"{server.url}/v1/chat/completions", json=body("x" * length)).json()["error"]
    assert "prompt is too long: this model's maximum context length is 4096 tokens" in error["message"]


def test_pages_that_may_call_can_read_refusals(server: RunningServer) -> None:
    origin = {"origin": "https://app.example"}
    refused = httpx.post(f"{server.url}/v1/chat/completions", headers={**origin, "content-encoding": "gzip"})
    assert refused.status_code == 415 and refused.headers["access-control-allow-origin"] == "https://app.example"
    assert "retry-after" in refused.headers["access-control-expose-headers"]
    preflight = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    asked = httpx.options(f"{server.url}/v1/chat/completions", headers=preflight)
    assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == "https://app.example"


def test_the_gauge_of_readiness_says_what_the_probe_says() -> None:
    """Also while it drains and the engine still works."""
    with running_server() as server:
        assert "reprise_ready 1.0" in httpx.get(f"{server.url}/metrics").text
        server.context.draining = True
        text = httpx.get(f"{server.url}/metrics").text
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert "reprise_ready 0.0" in text and "reprise_engine_up 1.0" in text


def test_media_threads_bound_those_that_resize(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resizing, "_threads", 0)  # put back afterwards
    with running_server(media_threads=3):
        assert resizing._threads == 3
