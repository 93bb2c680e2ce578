"""Several engines as one: what an engine refuses, or has not begun to answer when it ends, another one answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest

from service.api.engines.engine_client import EngineClient
from service.api.engines.engines import Engines, _with_text
from service.api.engines.in_flight_requests import InFlightRequests
from service.api.engines.request_stream import EngineError, EngineLost, RequestGroup, RequestStream
from service.link.config import EngineConfig
from service.link.engine_link import EngineLink, ProcessLink
from service.link.messages import ChatRequest, SamplingParams, SpeechAppend, SpeechRequest, SpeechSegment
from service.metrics.metrics import Metrics
from tests.support.servers import RunningServer, running_server
from tests.support.tiny_chat import tiny_prompt
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


def test_what_the_only_engine_refuses_is_not_offered_to_it_again(faults: Path) -> None:
    with running_server(make_link=process) as running:
        refused = ask(running, "!full")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
        assert choices(running, "moved") == 0


def test_requests_fail_when_no_engine_is_left(server: RunningServer) -> None:
    """A request that ends every engine it meets: it meets each once at most."""
    answer = ask(server, "!crash")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_unavailable"
    wait_whole(server)
    assert engines(server).restarts == 2
    assert ask(server, "hello").status_code == 200


@pytest.mark.parametrize("doses", ["0 0 0 0", "0 2 0 0", "2 0 0 0", "2 2 0 0"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_ends_two_engines_at_most(faults: Path, doses: str, stream: bool) -> None:
    """doses: tokens behind which each engine that gets the chat ends."""
    with running_server(make_link=process, num_engines=4) as running:
        (faults / "poison").write_text(doses)
        assert "engine_unavailable" in ask(running, "!poison", stream=stream).text
        left = len((faults / "poison").read_text().split())
        assert left == (3 if stream and doses.startswith("2") else 2)


@pytest.mark.parametrize("stream", [False, True])
def test_the_choices_of_a_chat_end_two_engines_at_most_together(faults: Path, stream: bool) -> None:
    """Each of them alone ends every engine that it meets, and the least loaded engines are four."""
    with running_server(make_link=process, num_engines=4) as running:
        assert "engine_unavailable" in ask(running, "!crash", n=8, stream=stream).text
        wait_whole(running)
        assert engines(running).restarts <= 2
        assert ask(running, "hello", n=8).status_code == 200
        assert engines(running).restarts <= 2


def test_choices_that_start_again_count_as_moved(server: RunningServer, faults: Path) -> None:
    (faults / "fault").touch()
    assert len(ask(server, "!fault this", n=4).json()["choices"]) == 4
    assert choices(server, "load") == 4
    assert 1 <= choices(server, "moved") <= 4


def test_choices_go_to_two_engines_and_after_an_end_to_one() -> None:
    made = [StandIn() for _ in range(4)]
    together = Engines(cast(list[EngineClient], made), Metrics())
    group = RequestGroup()
    streams = [together.submit(choice(number), group) for number in range(8)]
    first, second = (client for client in made if len(client.requests))
    assert len(first.requests) == len(second.requests) == 4, "the work is shared"
    first.requests.fail_all(EngineLost(503, "engine_unavailable", "it ended"))
    first.ready = False
    assert [len(client.requests) for client in made if client is not first].count(0) == 2
    assert len(second.requests) == 8
    streams.append(together.submit(choice(8), group))
    assert len(second.requests) == 9
    second.requests.fail_all(EngineLost(503, "engine_unavailable", "it ended"))
    assert all(type(stream.error) is EngineError for stream in streams), "nobody is to try again"
    with pytest.raises(EngineError, match="The engine stopped"):
        together.submit(choice(9), group)
    assert together.submit(choice(9)).error is None, "other requests go on"


class StandIn:
    """An EngineClient without an engine."""

    phase = "ready"
    state = None
    ready = True

    def __init__(self) -> None:
        self.requests = InFlightRequests(Metrics(), lambda: None)

    @property
    def in_flight(self) -> int:
        return len(self.requests)

    def submit(self, request: ChatRequest, group: RequestGroup | None) -> RequestStream:
        stream: RequestStream = RequestStream(request, lambda request_id: None, group=group)
        self.adopt(stream)
        return stream

    def adopt(self, stream: RequestStream) -> None:
        self.requests.add(stream)


def choice(number: int) -> ChatRequest:
    return ChatRequest(f"chat-{number}", "tiny", tiny_prompt([[1, 2, 3]]), SamplingParams(9), 0.0)


def test_an_engine_that_cannot_start_ends_the_start() -> None:
    lives = iter(["/broken", "/fine"])

    def make_link(config: EngineConfig) -> EngineLink:
        model = msgspec.structs.replace(config.models[0], directory=next(lives))
        return process(msgspec.structs.replace(config, models=(model,)))

    with running_server(make_link=make_link, num_engines=2, wait=False) as server:
        wait(lambda: server.context.engine.phase == "failed", what="it has failed")
        assert httpx.get(f"{server.url}/ready").status_code == 503


def test_text_that_was_added_moves_with_its_request() -> None:
    first, second = SpeechSegment((1,), 0, 9), SpeechSegment((2,), 0, 9)
    request = SpeechRequest("s", "m", (first,), 0, 2.0, 10, True, 0.0, open=True)
    longer = _with_text(request, SpeechAppend("s", (second,), last=False))
    assert isinstance(longer, SpeechRequest) and longer.segments == (first, second) and longer.open
    whole = _with_text(longer, SpeechAppend("s", (), last=True))
    assert isinstance(whole, SpeechRequest) and whole.segments == (first, second) and not whole.open
