"""Keys, admission, time limits, and what clients hear when the engine dies."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from service.api.http.errors import ApiError
from service.api.http.middleware import HostRule
from service.link.config import EngineConfig
from service.link.messages import SpeechDelta
from tests.api.http.raw import parse, read_to_end, send
from tests.support.fake_engine import FakeEngine, Speech
from tests.support.fake_talker import talking_catalog
from tests.support.rows import rows
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import GENEROUS, until, wait


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# operators\nfrom-the-file\n\n")
    with running_server(api_key=("first", "second"), api_key_file=str(file), cors_origin=("https://a.example",)) as it:
        yield it


CLOSED = ("/v1/models", "/v1/chat/completions", "/version", "/page/", "/nope", "/health/", "//health")
NO_KEY: list[Any] = [
    {},
    *({"authorization": value} for value in ("Bearer", "Bearer wrong", "Bearer firs", "Basic first", "first")),
    {"authorization": "# operators"},
    [("authorization", "Bearer first"), ("authorization", "Bearer wrong")],
    {"api-key": "first"},
    {"host": "127.0.0.1/health", "x-forwarded-path": "/health", "x-original-url": "/health"},
]


def test_each_key_opens_and_without_one_everything_is_closed(locked: RunningServer) -> None:
    with httpx.Client(base_url=locked.url) as client:
        for key in ("first", "second", "from-the-file"):
            assert client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
        for path, headers in product(CLOSED, NO_KEY):
            response = client.get(locked.url + path, headers=headers)
            assert response.status_code == 401, (path, headers)
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["x-request-id"] and response.headers["www-authenticate"] == "Bearer"


def test_the_log_says_who_knocks(locked: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    httpx.get(f"{locked.url}/nope", headers={"x-request-id": "knock"})
    found = partial(filter, lambda line: vars(line).get("request_id") == "knock", caplog.records)
    wait(lambda: any(found()), what="the request is logged")
    assert [(line.name, vars(line)["client"]) for line in found()] == [("reprise.access", "127.0.0.1")]


async def test_websockets_need_a_key_too(locked: RunningServer) -> None:
    url = locked.url.replace("http", "ws") + "/v1/audio/speech/stream"
    for headers in ({}, {"authorization": "Bearer wrong"}):
        with pytest.raises(InvalidStatus) as refusal:
            await connect(url, additional_headers=headers)
        response = refusal.value.response
        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
        assert b"invalid_api_key" in (response.body or b"")
    async with connect(url, additional_headers={"authorization": "Bearer first"}):
        pass


def test_probes_and_documents_are_open_and_can_be_closed(locked: RunningServer) -> None:
    for path in ("/health", "/ready", "/metrics", "/docs", "/openapi.json"):
        assert httpx.get(f"{locked.url}{path}").status_code == 200
    with running_server(api_key=("k",), metrics_open=False, page=False) as server:
        for path in ("/metrics", "/docs", "/openapi.json"):
            assert httpx.get(f"{server.url}{path}").status_code == 401
        assert httpx.get(f"{server.url}/metrics", headers={"authorization": "Bearer k"}).status_code == 200


def test_pages_that_may_call_may_use_openais_javascript_client(locked: RunningServer) -> None:
    """It sends headers of its own, which a browser first asks for."""
    own = "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-retry-count"
    ask = {"access-control-request-method": "POST", "access-control-request-headers": own}
    response = httpx.options(f"{locked.url}/v1/chat/completions", headers={"origin": "https://a.example", **ask})
    assert response.status_code == 200 and response.headers["access-control-allow-origin"] == "https://a.example"
    assert set(own.split(",")) <= set(response.headers["access-control-allow-headers"].replace(" ", "").split(","))


async def test_bodies_that_dribble_take_no_place_and_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.api.http.middleware.BODY_TIMEOUT", 1.0)
    with running_server(max_in_flight=2) as server, ExitStack() as stack:
        host, port = server.url.removeprefix("http://").split(":")
        slow = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(8)]
        for connection in slow:
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        await until(lambda: server.context.admission.pending_bytes == 8)
        async with httpx.AsyncClient(base_url=server.url, timeout=GENEROUS) as http:
            assert (await http.post("/v1/chat/completions", json=body("hello"))).status_code == 200
        for connection in slow:
            connection.settimeout(GENEROUS)
            assert b" 408 " in await asyncio.to_thread(connection.recv, 4096)
        await asyncio.to_thread(server.wait_idle)


def test_a_request_without_a_token_in_its_time_is_refused() -> None:
    with running_server(request_timeout=0.3) as server:
        for stream in (False, True):
            response = httpx.post(f"{server.url}/v1/chat/completions", json=body("!silent", stream=stream))
            assert response.status_code == 504 and response.json()["error"]["code"] == "timeout"
        server.wait_idle()


class LateTalker(FakeEngine):
    """Answers after half a second."""

    def _speak(self, speech: Speech) -> SpeechDelta | None:
        return super()._speak(speech) if time.monotonic() > speech.began + 0.5 else None


def test_speech_may_take_as_long_as_it_is_heard_in_addition() -> None:
    """A text of six letters may have 46 patches of 0.1 s."""
    with running_server(
        talking_catalog(), engine=LateTalker().serve, fixed_voices="off", request_timeout=0.3
    ) as server:
        for options in ({"stream": False}, {"stream": True}, {"stream_format": "sse"}):
            answer = httpx.post(f"{server.url}/v1/audio/speech", json={"input": "Hello.", **options}, timeout=GENEROUS)
            assert answer.status_code == 200, answer.text


def test_a_server_that_loads_answers_probes_and_refuses_work() -> None:
    def never_ready(config: EngineConfig, channel: Any) -> None:
        channel.receive(None)

    with running_server(engine=never_ready, wait=False) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/ready").status_code == 503
        refused = httpx.post(f"{server.url}/v1/chat/completions", json=body("hello"))
        assert refused.status_code == 503 and refused.headers["retry-after"]


def answered(rule: HostRule, host: str) -> bool:
    try:
        rule.check(Headers({"host": host}))
    except ApiError as error:
        assert error.status == 421 and error.code == "host_not_allowed" and "allowed_host" in error.message
        return False
    return True


def test_the_rule() -> None:
    """Rows: hosts by group, then what a server is bound to, and the groups and hosts that it answers and refuses."""
    groups, *cases = rows(__file__, "hosts.jsonl")
    for case in cases:
        rule = HostRule(case["bound"], tuple(case.get("allowed", ())), keyed=case.get("keyed", False))
        for told, expected in (("answered", True), ("refused", False)):
            hosts = [host for name in case[told] for host in groups.get(name, [name])]
            assert [host for host in hosts if answered(rule, host) != expected] == [], case
        rule.check(Headers({}))


def test_a_page_that_rebinds_its_name_reads_nothing_and_opens_no_socket(server: RunningServer) -> None:
    paths = ("/", "/v1/models", "/v1/audio/voices", "/health", "/metrics", "/docs", "/nope")
    for path, host in product(paths, ("evil.example", "evil.example:8000")):
        refused = httpx.get(f"{server.url}{path}", headers={"host": host, "origin": f"http://{host}"})
        assert refused.status_code == 421 and refused.json()["error"]["code"] == "host_not_allowed"
        assert refused.headers["x-request-id"] and "evil" not in refused.text
    head = (
        b"GET /v1/audio/speech/stream HTTP/1.1\r\nhost: evil.example\r\norigin: http://evil.example\r\n"
        b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    with send(server, head) as connection:
        answer = parse(read_to_end(connection))
    assert answer.status == 421 and answer.error["code"] == "host_not_allowed"


def test_keys_guard_by_themselves(locked: RunningServer) -> None:
    headers = {"host": "any.example", "authorization": "Bearer first"}
    assert httpx.get(f"{locked.url}/v1/models", headers=headers).status_code == 200
    with running_server(api_key=("first",), allowed_host=("app.example",)) as server:
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 421
        assert httpx.get(f"{server.url}/", headers=headers).status_code == 421
        headers["host"] = "app.example"
        for path in ("/", "/v1/models"):
            assert httpx.get(f"{server.url}{path}", headers=headers).status_code == 200


def test_a_page_can_read_an_error_that_nobody_expected(locked: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked.context, "catalog", None)
    headers = {"origin": "https://a.example", "authorization": "Bearer first"}
    failed = httpx.get(f"{locked.url}/v1/models", headers=headers)
    assert failed.status_code == 500 and failed.json()["error"]["code"] == "internal_error"
    assert failed.headers["access-control-allow-origin"] == "https://a.example" and failed.headers["x-request-id"]
