"""Limits of bytes, waiting and origin, through the whole application; those of shapes and counts are in test_errors."""

from __future__ import annotations

import asyncio
import json
import socket
from functools import partial
from typing import Any

import httpx
import pytest

from service.api.app import create_admission
from service.media.fetch import FetchesBusy
from service.metrics.metrics import Metrics
from service.processes.listener import bind, url_of
from service.settings.reading import SettingsError
from service.settings.settings import Settings, load_settings
from tests.media.samples import data_url, encoded, picture
from tests.support.fake_chat import fake_catalog
from tests.support.servers import running_server
from tests.support.waiting import GENEROUS, until


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


def picture_body(url: str, text: str) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"model": "tiny", "messages": [{"role": "user", "content": [part, {"type": "text", "text": text}]}]}


def test_pieces_of_a_stream_are_not_held_back() -> None:
    """Or each answer would take 40 ms more on a line that acknowledges late."""
    with bind(Settings(port=0)) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_address_that_is_shown_can_be_opened() -> None:
    """0.0.0.0 is no address to connect to. Every address of IPv6 is every one of IPv4."""
    for host in ("0.0.0.0", "127.0.0.1", *["::"] * socket.has_dualstack_ipv6()):
        with bind(Settings(host=host, port=0, insecure_no_auth=True)) as listener:
            shown = f"[::1]:{listener.getsockname()[1]}" if host == "::" else f"127.0.0.1:{listener.getsockname()[1]}"
            assert url_of(listener) == f"http://{shown}"
            for address in ("127.0.0.1", "::1") if host == "::" else ("127.0.0.1",):
                socket.create_connection((address, listener.getsockname()[1]), GENEROUS).close()


SMALL_LIMITS = {"max_pending_bytes": 4_000_000, "max_request_pixels": 180_000, "max_body": 600_000}
"""Of 4 MB, 16 bytes for each of 180,000 pixels are set aside, and large requests can use 840 kB beside them."""


async def test_large_requests_wait_for_their_turn_and_small_ones_do_not() -> None:
    """Bodies, declared and not, and pictures, which count by their size when they are decoded."""

    def square(size: int) -> str:
        return data_url(encoded(picture(size, size), "JPEG"))

    def large(text: str) -> bytes:
        return json.dumps(body(text, max_tokens=5)).encode() + b" " * 500_000

    with running_server(**SMALL_LIMITS) as server:
        admission = server.context.admission
        async with httpx.AsyncClient(base_url=server.url, timeout=GENEROUS) as http:
            post = partial(http.post, "/v1/chat/completions")
            held = []
            for number in (1, 2):  # bodies that come together may each hold what the other one waits for
                held.append(asyncio.create_task(post(content=large("!silent"))))
                await until(lambda number=number: server.context.engine.in_flight == number)
            waiting = [asyncio.create_task(post(content=large("hello")))]
            await until(lambda: admission.num_waiting == 1)
            sent = partial(httpx.post, f"{server.url}/v1/chat/completions", timeout=GENEROUS)
            waiting.append(asyncio.create_task(asyncio.to_thread(sent, content=iter([large("hello")]))))
            await until(lambda: admission.num_waiting == 2)
            waiting.append(asyncio.create_task(post(json=picture_body(square(400), "hello"))))
            await until(lambda: admission.num_waiting == 3)
            assert (await post(json=body("hello"))).status_code == 200
            assert (await post(json=picture_body(square(100), "hello"))).status_code == 200
            await until(lambda: admission.in_flight == 3, what="bodies have no place yet")
            assert not any(task.done() for task in waiting)
            for task in held:
                task.cancel()
            answers = await asyncio.gather(*waiting)
            assert [answer.status_code for answer in answers] == [200, 200, 200]
            assert (await post(content=b" " * 700_000)).status_code == 413
        await asyncio.to_thread(server.wait_idle)


def test_contradicting_limits_are_refused_at_the_start() -> None:
    for setting, value, other in (
        ("max_pending_bytes", 64_000_000, "max_request_pixels"),
        ("max_pending_bytes", 790_000_000, "max_request_pixels"),
        ("max_body", 2_000_000_000, "max_pending_bytes"),
    ):
        with pytest.raises(SettingsError) as refused:
            create_admission(load_settings({setting: value}), fake_catalog(), Metrics())
        assert setting in str(refused.value) and other in str(refused.value)
    create_admission(load_settings({"max_request_pixels": 10**9}), fake_catalog(), Metrics())  # of many pictures


async def test_fetches_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch(url: str, **limits: object) -> bytes:
        fetching.append(url)
        await go_on.wait()
        return encoded(picture(), "PNG")

    fetching, go_on = list[str](), asyncio.Event()
    with running_server(**SMALL_LIMITS) as server:
        monkeypatch.setattr(server.context.media.fetcher, "fetch", fetch)
        async with httpx.AsyncClient(base_url=server.url, timeout=GENEROUS) as http:
            post = partial(http.post, "/v1/chat/completions")
            urls = [f"https://example.org/{number}" for number in range(4)]
            tasks = [asyncio.create_task(post(json=picture_body(url, "hello"))) for url in urls]
            await until(lambda: server.context.admission.num_waiting == 2)
            assert len(fetching) == 2, "one beside the part set aside, one in it"
            server.loop.call_soon_threadsafe(go_on.set)
            assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 4
        await asyncio.to_thread(server.wait_idle)


def test_a_request_whose_url_gets_no_turn_can_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch(url: str, *, client: str, **limits: object) -> bytes:
        clients.append(client)
        raise FetchesBusy("messages[0].content[0].image_url: not fetched")

    clients: list[str] = []
    with running_server() as server:
        monkeypatch.setattr(server.context.media.fetcher, "fetch", fetch)
        said = picture_body("https://example.org/media", "hello")
        refused = httpx.post(f"{server.url}/v1/chat/completions", json=said, timeout=GENEROUS)
        assert refused.status_code == 503 and refused.headers["retry-after"] and clients == ["127.0.0.1"]
        assert refused.json()["error"]["message"] == "messages[0].content[0].image_url: not fetched"
        assert server.metric('admission_rejections_total{endpoint="chat",reason="fetches"}') == 1
        server.wait_idle()


def test_pages_of_other_origins_make_nothing_happen() -> None:
    """Those that may call can read refusals."""
    with running_server(cors_origin=("https://app.example",)) as server:
        for origin, status in (
            *((origin, 200) for origin in (None, "https://app.example", server.url)),
            *((origin, 403) for origin in ("https://evil.example", "null", "http://127.0.0.1:1")),
        ):
            headers = {"content-type": "text/plain"}  # what a page may send without asking first
            headers |= {"origin": origin} if origin is not None else {}
            response = httpx.post(
                f"{server.url}/v1/chat/completions", content=json.dumps(body("hello")), headers=headers
            )
            assert response.status_code == status
            assert status == 200 or "cors_origin" in response.json()["error"]["message"]
            assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
        headers = {"origin": "https://app.example", "content-encoding": "gzip"}
        refused = httpx.post(f"{server.url}/v1/chat/completions", headers=headers)
        assert refused.status_code == 415 and refused.headers["access-control-allow-origin"] == "https://app.example"
        assert "retry-after" in refused.headers["access-control-expose-headers"]


def test_the_gauge_of_readiness_says_what_the_probe_says() -> None:
    """Also while it drains and the engine still works."""
    with running_server() as server:
        assert "reprise_ready 1.0" in httpx.get(f"{server.url}/metrics").text
        server.context.draining = True
        text = httpx.get(f"{server.url}/metrics").text
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert "reprise_ready 0.0" in text and "reprise_engine_up 1.0" in text
