"""Keys, admission, time limits, and what clients hear when the engine dies."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import numpy as np
import pytest
from openai import APIError, OpenAI
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from service.link.config import Channel, EngineConfig
from service.link.engine_link import EngineExit, EngineLink, InlineLink, ProcessLink
from service.link.engine_socket import OnOutputs
from service.link.messages import Outputs, SpeechDelta, SpeechRequest, Stop
from service.processes.server import quiet_uvicorn
from tests.support import fake_engine
from tests.support.fake_talker import talking_catalog
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


@pytest.mark.parametrize("key", ["first", "second", "from-the-file"])
def test_each_key_opens(locked: RunningServer, key: str) -> None:
    response = httpx.get(f"{locked.url}/v1/models", headers={"authorization": f"Bearer {key}"})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer firs"},
        {"authorization": "Basic first"},
        {"authorization": "first"},
        {"api-key": "first"},
        {"authorization": "# operators"},
        {"host": "127.0.0.1/health", "x-forwarded-path": "/health", "x-original-url": "/health"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/version", "/nope", "/health/", "//health"])
def test_without_a_key_everything_is_closed(locked: RunningServer, path: str, headers: dict[str, str]) -> None:
    response = httpx.get(f"{locked.url}{path}", headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["x-request-id"] and response.headers["www-authenticate"] == "Bearer"


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


async def test_a_refused_websocket_is_no_error_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    quiet_uvicorn()
    with running_server(api_key=("first",)) as server, pytest.raises(InvalidStatus):
        await connect(server.url.replace("http", "ws") + "/v1/realtime?model=tiny")
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/docs", "/openapi.json"])
def test_probes_and_documents_are_open(locked: RunningServer, path: str) -> None:
    assert httpx.get(f"{locked.url}{path}").status_code == 200


def test_metrics_and_documents_can_be_closed() -> None:
    with running_server(api_key=("k",), metrics_open=False, docs_open=False) as server:
        for path in ("/metrics", "/docs", "/openapi.json"):
            assert httpx.get(f"{server.url}{path}").status_code == 401
        assert httpx.get(f"{server.url}/metrics", headers={"authorization": "Bearer k"}).status_code == 200


def test_browsers_may_call_from_named_origins(locked: RunningServer) -> None:
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
        response = httpx.options(f"{locked.url}/v1/chat/completions", headers={"origin": origin, **ask})
        assert response.headers.get("access-control-allow-origin") == allowed


def test_pages_that_may_call_may_use_openais_javascript_client(locked: RunningServer) -> None:
    """It sends headers of its own, which a browser first asks for."""
    own = "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-retry-count"
    ask = {"access-control-request-method": "POST", "access-control-request-headers": own}
    response = httpx.options(f"{locked.url}/v1/chat/completions", headers={"origin": "https://a.example", **ask})
    assert response.status_code == 200
    assert set(own.split(",")) <= set(response.headers["access-control-allow-headers"].replace(" ", "").split(","))


async def test_requests_over_the_bound_are_refused_before_their_body_is_read() -> None:
    with running_server(max_in_flight=2) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=GENEROUS) as http:
            held = [asyncio.create_task(http.post("/v1/chat/completions", json=body("!silent"))) for _ in range(2)]
            await until(lambda: server.context.engine.in_flight == 2)
            refused = await http.post("/v1/chat/completions", json=body("hello"))
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "overloaded_error"
            held.pop().cancel()
            await until(lambda: server.context.admission.in_flight == 1)
            assert (await http.post("/v1/chat/completions", json=body("hello", n=2))).status_code == 503
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)
            await until(lambda: server.context.admission.in_flight == 0)
            assert (await http.post("/v1/chat/completions", json=body("hello"))).status_code == 200
            text = (await http.get("/metrics")).text
    assert 'reprise_admission_rejections_total{endpoint="chat",reason="in_flight"} 2.0' in text
    assert 'outcome="overloaded"' in text


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


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_without_a_token_in_its_time_is_refused(stream: bool) -> None:
    with running_server(request_timeout=0.5) as server:
        response = httpx.post(f"{server.url}/v1/chat/completions", json=body("!silent", stream=stream))
        assert response.status_code == 504 and response.json()["error"]["code"] == "timeout"
        server.wait_idle()


def speaks_late(config: EngineConfig, channel: Channel) -> None:
    """An engine that answers after a second."""
    channel.send(Outputs(state=fake_engine.state_of(config, "ready", 0)))
    while True:
        for command in channel.receive(0.05):
            if isinstance(command, SpeechRequest):
                time.sleep(1)
                audio = np.zeros(4800, np.float32)
                done = SpeechDelta(command.request_id, audio, 0, segment_done=True, finished=True)
                channel.send(Outputs(speech=(done,)))
            elif isinstance(command, Stop):
                return


@pytest.mark.parametrize("options", [{"stream": False}, {"stream": True}, {"stream_format": "sse"}])
def test_speech_may_take_as_long_as_it_is_heard_in_addition(options: dict[str, Any]) -> None:
    """A text of six letters may have 46 patches of 0.1 s."""
    talking = running_server(
        talking_catalog(), lambda config: InlineLink(config, speaks_late), fixed_voices=False, request_timeout=0.5
    )
    with talking as server:
        answer = httpx.post(f"{server.url}/v1/audio/speech", json={"input": "Hello.", **options}, timeout=GENEROUS)
        assert answer.status_code == 200, answer.text


class SecondLife(ProcessLink):
    """A restarted engine that begins when `may_begin` is set."""

    def __init__(self, config: EngineConfig, entry: str, may_begin: threading.Event) -> None:
        super().__init__(config, entry)
        self._may_begin = may_begin

    async def run(self, on_outputs: OnOutputs) -> EngineExit:
        await until(self._may_begin.is_set)
        return await super().run(on_outputs)


def test_when_the_engine_dies_clients_hear_at_once_and_it_comes_back() -> None:
    entry, may_begin = "tests.support.fake_engine:serve", threading.Event()
    lives: Iterator[Callable[[EngineConfig], EngineLink]] = iter(
        [lambda config: ProcessLink(config, entry), lambda config: SecondLife(config, entry, may_begin)]
    )
    with running_server(make_link=lambda config: next(lives)(config)) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        errors: list[Exception] = []

        def wait_in_vain() -> None:
            try:
                list(client.chat.completions.create(**body("!endless", stream=True)))
            except APIError as error:
                errors.append(error)

        other = threading.Thread(target=wait_in_vain)
        other.start()
        wait(lambda: server.context.engine.in_flight == 1, what="the other runs")
        with pytest.raises(APIError, match="engine stopped") as failure:
            client.chat.completions.create(**body("!crash now"))
        assert failure.value.response.status_code == 503 and failure.value.response.headers["retry-after"]
        other.join(GENEROUS)
        assert len(errors) == 1 and "engine stopped" in str(errors[0])
        assert httpx.get(f"{server.url}/ready").status_code == 503
        may_begin.set()
        wait(lambda: httpx.get(f"{server.url}/ready").status_code == 200, what="the engine comes back")
        assert client.chat.completions.create(**body("hello")).choices[0].message.content == "hello"
        assert httpx.get(f"{server.url}/health").json()["restarts"] == 1


def test_a_server_that_loads_answers_probes_and_refuses_work() -> None:
    def never_ready(config: EngineConfig, channel: Any) -> None:
        channel.receive(None)

    with running_server(make_link=lambda config: InlineLink(config, never_ready), wait=False) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/ready").status_code == 503
        refused = httpx.post(f"{server.url}/v1/chat/completions", json=body("hello"))
        assert refused.status_code == 503 and refused.headers["retry-after"]


def test_every_path_is_declared(locked: RunningServer) -> None:
    document = httpx.get(f"{locked.url}/openapi.json").json()
    schemas = document["components"]["schemas"]

    def references(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            for key, value in node.items():
                if key == "$ref":
                    yield value
                else:
                    yield from references(value)
        elif isinstance(node, list):
            for value in node:
                yield from references(value)

    assert {ref.removeprefix("#/components/schemas/") for ref in references(document)} <= set(schemas)
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert {"400", "401", "404", "408", "413", "415", "500", "503", "504"} <= set(chat["responses"])
    assert "422" not in str(document["paths"])


def test_keys_are_not_shown() -> None:
    with running_server(api_key=("very-secret",)) as server:
        assert "very-secret" not in repr(server.context.settings)
