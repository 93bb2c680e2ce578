"""Several engines as one: what an engine refuses, or has not begun to answer when it ends, another one answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from service.api.engines.engines import Engines
from service.link.config import EngineConfig
from service.link.engine_link import EngineLink, ProcessLink
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import GENEROUS, wait

FAKE = "tests.support.fake_engine:serve"


def process(config: EngineConfig) -> EngineLink:
    return ProcessLink(config, FAKE)


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REPRISE_TEST_FAULTS", str(tmp_path))
    return tmp_path


@pytest.fixture
def server(faults: Path) -> Iterator[RunningServer]:
    with running_server(make_link=process, num_engines=2) as running:
        yield running


def engines(server: RunningServer) -> Engines:
    found = server.context.engine
    assert isinstance(found, Engines)
    return found


def ask(server: RunningServer, text: str, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=GENEROUS)


def choices(server: RunningServer, reason: str) -> float:
    page = httpx.get(f"{server.url}/metrics", timeout=GENEROUS).text
    start = f'reprise_engine_choices_total{{reason="{reason}"}} '
    return next(float(line.removeprefix(start)) for line in page.splitlines() if line.startswith(start))


def wait_whole(server: RunningServer) -> None:
    wait(lambda: all(client.ready for client in engines(server).clients), what="both engines are ready")


def test_an_answer_that_nobody_has_seen_is_made_again(server: RunningServer, faults: Path) -> None:
    """The engine ends behind the second token of an answer that is sent as a whole."""
    usual = ask(server, "!fault this").json()
    (faults / "fault").touch()
    again = ask(server, "!fault this")
    assert again.status_code == 200 and not (faults / "fault").exists()
    assert (again.json()["choices"], again.json()["usage"]) == (usual["choices"], usual["usage"])
    wait_whole(server)
    assert engines(server).restarts == 1
    assert httpx.get(f"{server.url}/health").json()["engines"] == ["ready", "ready"]


def test_a_stream_that_has_begun_ends_with_an_error_and_the_server_goes_on(server: RunningServer, faults: Path) -> None:
    (faults / "fault").touch()
    lines = ask(server, "!fault this", stream=True).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert events[0]["choices"] and events[-1]["error"]["code"] == "engine_unavailable"
    assert httpx.get(f"{server.url}/ready").status_code == 200  # the other one serves
    assert ask(server, "hello").status_code == 200
    phases = httpx.get(f"{server.url}/ready").json()["engines"]
    assert len(phases) == 2 and "ready" in phases
    wait_whole(server)


def test_what_one_engine_refuses_is_offered_to_the_other(server: RunningServer) -> None:
    refused = ask(server, "!full")
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
    assert choices(server, "moved") == 1
    failed = ask(server, "!fail")  # what no other engine would do differently is not tried there
    assert failed.status_code == 500 and choices(server, "moved") == 1


@pytest.mark.slow
def test_requests_fail_when_no_engine_is_left(server: RunningServer) -> None:
    """A request that ends every engine it meets: it meets each once at most."""
    answer = ask(server, "!crash")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_unavailable"
    wait_whole(server)
    assert engines(server).restarts == 2
    assert ask(server, "hello").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("doses", ["0 2 0 0", "2 0 0 0"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_ends_two_engines_at_most(faults: Path, doses: str, stream: bool) -> None:
    """doses: tokens behind which each engine that gets the chat ends."""
    with running_server(make_link=process, num_engines=4) as running:
        (faults / "poison").write_text(doses)
        assert "engine_unavailable" in ask(running, "!poison", stream=stream).text
        left = len((faults / "poison").read_text().split())
        assert left == (3 if stream and doses.startswith("2") else 2)


def test_an_engine_that_cannot_start_ends_the_start() -> None:
    lives = iter(["/broken", "/fine"])

    def make_link(config: EngineConfig) -> EngineLink:
        model = msgspec.structs.replace(config.models[0], directory=next(lives))
        return process(msgspec.structs.replace(config, models=(model,)))

    with running_server(make_link=make_link, num_engines=2, wait=False) as server:
        wait(lambda: server.context.engine.phase == "failed", what="it has failed")
        assert httpx.get(f"{server.url}/ready").status_code == 503
