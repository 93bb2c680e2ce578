"""Speech that runs to its cap: retried where nobody has heard it, and said to be so where somebody has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from service.hub.catalog import load_catalog
from service.link.engine_link import InlineLink
from service.settings.settings import load_settings
from tests.support import miniature
from tests.support.fake_talker import PATCH, FakeTalker, talking_catalog
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import GENEROUS

RETRIES = 2


@pytest.fixture(scope="module")
def talker() -> FakeTalker:
    return FakeTalker()


@pytest.fixture(scope="module")
def server(talker: FakeTalker) -> Iterator[RunningServer]:
    flags: dict[str, Any] = {"fixed_voices": False, "speech_retries": RETRIES}
    with running_server(talking_catalog(), lambda config: InlineLink(config, talker.serve), **flags) as server:
        yield server


def speak(server: RunningServer, talker: FakeTalker, runaways: int, **fields: Any) -> httpx.Response:
    talker.requests.clear()
    talker.runaways = runaways
    body = {"input": "One. Two.", "response_format": "pcm", "seed": 5, **fields}
    answer = httpx.post(f"{server.url}/v1/audio/speech", json=body, timeout=GENEROUS)
    assert answer.status_code == 200, answer.text
    return answer


def counted(server: RunningServer, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=GENEROUS).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"reprise_{name}"))


@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_may_retry(server: RunningServer, talker: FakeTalker, stream: bool) -> None:
    answer = speak(server, talker, 0, stream=stream)
    assert [request.retries for request in talker.requests] == [RETRIES]
    assert len(answer.content) == 2 * PATCH


@pytest.mark.parametrize("stream", [False, True])
def test_a_length_that_was_asked_for_is_no_runaway(server: RunningServer, talker: FakeTalker, stream: bool) -> None:
    speak(server, talker, 1, stream=stream, max_len=3)
    assert [request.retries for request in talker.requests] == [0]


def test_segments_that_ended_at_their_cap_are_counted(server: RunningServer, talker: FakeTalker) -> None:
    before = counted(server, "speech_truncated_total")
    speak(server, talker, 2, stream=False, split_granularity="sentence")
    assert counted(server, "speech_truncated_total") - before == 2


@pytest.mark.parametrize("runaways", [0, 1])
def test_the_websocket_says_which_segment_ended_at_its_cap(
    server: RunningServer, talker: FakeTalker, runaways: int
) -> None:
    talker.requests.clear()
    talker.runaways = runaways
    with connect(f"{server.url.replace('http', 'ws')}/v1/audio/speech/stream") as socket:
        socket.send(json.dumps({"type": "input.text", "text": "This is the first one. And this is the next."}))
        socket.send(json.dumps({"type": "input.done"}))
        events: list[dict[str, Any]] = []
        while not events or events[-1]["type"] != "session.done":
            message = socket.recv(timeout=GENEROUS)
            events += [json.loads(message)] if isinstance(message, str) else []
    said = [event["finish_reason"] for event in events if event["type"] == "audio.done"]
    first = "length" if runaways else "stop"
    assert said == [first, "stop"] and events[-1]["finish_reason"] == first
    assert talker.requests[0].retries == RETRIES


@pytest.mark.parametrize(("runaways", "reason"), [(0, "stop"), (1, "length")])
def test_the_last_event_says_how_it_ended(
    server: RunningServer, talker: FakeTalker, runaways: int, reason: str
) -> None:
    lines = speak(server, talker, runaways, stream_format="sse").text.splitlines()
    last = json.loads([line for line in lines if line.startswith("data: {")][-1].removeprefix("data: "))
    assert (last["type"], last["finish_reason"]) == ("speech.audio.done", reason)
    assert len(talker.requests) == 1


def test_a_real_engine_retries_and_counts(tmp_path: Path) -> None:
    """min_len keeps the model from stopping before the last patch."""
    flags: dict[str, Any] = {"model": (str(miniature.talker()),), "voices_dir": tmp_path, "fixed_voices": False}
    flags |= {"max_running": 2, "decode_buckets": (1, 2), "speech_retries": 1}
    catalog = load_catalog(load_settings(flags))
    processor = catalog.models[0].speech_processor
    cap = processor.max_patches(processor.tokenize("Hi."))
    body = {"input": "Hi.", "response_format": "pcm", "stream": False, "seed": 1, "min_len": cap - 1}
    with running_server(catalog, InlineLink, **flags) as server:
        whole = httpx.post(f"{server.url}/v1/audio/speech", json=body, timeout=2 * GENEROUS)
        assert whole.status_code == 200, whole.text
        assert counted(server, "speech_retries_total") == 1
        assert counted(server, "speech_truncated_total") == 1
        assert len(whole.content) == 2 * cap * processor.samples_per_patch
