"""Several engines as one: what an engine refuses, or has not begun to answer when it ends, another one answers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from models.interfaces.media import MediaItem, Prompt
from service.api.engines.engines import EXCESS, HEAD_START, LITTLE_SLACK, PREFIXES, Load, choose, keys, ranked
from service.link.config import EngineConfig
from service.link.engine_link import EngineLink, ProcessLink
from service.link.messages import ChatRequest, EncodeReference, SpeechRequest
from service.link.sampling import SamplingParams
from tests.support.processes import ROOT
from tests.support.servers import RunningServer, running_server
from tests.support.slow import slow
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


def ask(server: RunningServer, text: str, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=GENEROUS)


MOVED = 'engine_choices_total{reason="moved"}'


def test_a_stream_that_has_begun_ends_with_an_error_and_the_server_goes_on(server: RunningServer, faults: Path) -> None:
    (faults / "poison").write_text("2")
    lines = ask(server, "!poison this", stream=True).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert events[0]["choices"] and events[-1]["error"]["code"] == "engine_unavailable"
    assert httpx.get(f"{server.url}/ready").status_code == 200  # the other one serves
    assert ask(server, "hello").status_code == 200
    phases = httpx.get(f"{server.url}/ready").json()["engines"]
    assert len(phases) == 2 and "ready" in phases
    wait(lambda: all(client.ready for client in server.context.engine.clients), what="both engines are ready")
    assert server.context.engine.restarts == 1
    assert httpx.get(f"{server.url}/health").json()["engines"] == ["ready", "ready"]


def test_what_one_engine_refuses_is_offered_to_the_other(server: RunningServer) -> None:
    refused = ask(server, "!full")
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
    assert server.metric(MOVED) == 1
    failed = ask(server, "!fail")  # what no other engine would do differently is not tried there
    assert failed.status_code == 500 and server.metric(MOVED) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("doses", "left"), [("0 0 0 0", 2), ("0 2 0 0", 2), ("2 0 0 0", 3)])
def test_a_chat_ends_two_engines_at_most(faults: Path, doses: str, left: int) -> None:
    """doses: tokens behind which each engine that gets the chat ends."""
    with running_server(make_link=process, num_engines=4) as running:
        (faults / "poison").write_text(doses)
        assert "engine_unavailable" in ask(running, "!poison").text
        assert len((faults / "poison").read_text().split()) == left


IDLE = {index: Load(0) for index in range(4)}


def chat(text: bytes = b"", *, digests: tuple[bytes, ...] = (), name: str = "r", model: str = "m") -> ChatRequest:
    ids = np.frombuffer(text, np.uint8).astype(np.int32)
    items = tuple(MediaItem("image", (), {}, 1, 1, 1, digest) for digest in digests)
    return ChatRequest(name, model, Prompt(ids, ids[None], len(ids), items), SamplingParams(1), 0.0)


def speech(name: str) -> SpeechRequest:
    return SpeechRequest(name, "m", (), 0, 2.0, 10, True, 0.0)


def long_text(seed: int, length: int = PREFIXES[0]) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, length, np.uint8).tobytes()


def test_what_may_be_found_again_goes_to_one_place() -> None:
    """A picture, whatever is asked and whatever picture comes later; a long prompt, where its beginning is. An engine
    that ends moves its own keys alone."""
    for number in range(20):
        first, start = b"picture %d" % number, long_text(number)
        pictures = [chat(b"question %d" % n, digests=(first,)) for n in range(3)]
        pictures.append(chat(b"and this?", digests=(first, b"another")))
        for asked in (pictures, [chat(start + tail) for tail in (b"", b" and", long_text(99, 5000))]):
            ((home, reason),) = {choose(one, IDLE) for one in asked}
            assert reason == "affinity"
            left = {index: load for index, load in IDLE.items() if index != 2}
            assert home == 2 or choose(asked[0], left) == (home, "affinity")


def test_keys_spread_and_differ_by_model() -> None:
    places = Counter(choose(chat(digests=(b"%d" % number,)), IDLE)[0] for number in range(400))
    assert min(places.values()) > 60 and len(places) == 4
    assert keys(chat(digests=(b"a",))) != keys(chat(digests=(b"a",), model="other"))


def test_what_is_not_worth_finding_again_goes_to_the_freest() -> None:
    loads = {0: Load(3), 1: Load(2), 2: Load(3)}
    short = chat(long_text(0, PREFIXES[0] - 1))
    reference = EncodeReference("e", "m", np.zeros(1, np.float32), "left", 0.0)
    for request in (short, speech("s"), reference):
        assert not keys(request)
        assert choose(request, loads) == (1, "load")
    drawn = Counter(choose(speech(f"s{number}"), IDLE)[0] for number in range(400))
    assert min(drawn.values()) > 60 and len(drawn) == 4


def test_a_hot_key_spills_over_and_comes_back() -> None:
    request = chat(digests=(b"hot",))
    home, _ = choose(request, IDLE)
    in_flight = Counter(dict.fromkeys(IDLE, 0))
    reasons: Counter[str] = Counter()
    for _ in range(200):
        engine, reason = choose(request, {index: Load(in_flight[index]) for index in IDLE})
        in_flight[engine] += 1
        reasons[reason] += 1
    assert in_flight[home] == max(in_flight.values())
    assert max(in_flight.values()) <= EXCESS * 50 + 1 and min(in_flight.values()) > 0
    assert reasons["affinity"] == in_flight[home]
    full = {index: Load(HEAD_START if index == home else 0) for index in IDLE}
    assert choose(request, full)[1] == "spilled"
    assert choose(request, {**full, home: Load(HEAD_START - 1)}) == (home, "affinity")


def test_conversations_with_one_system_prompt_stay_together_when_they_spill() -> None:
    system = long_text(1, PREFIXES[0])
    home, _ = choose(chat(system), IDLE)
    full = {index: Load(HEAD_START if index == home else 0) for index in IDLE}
    places = set()
    for number in range(30):
        opening = system + long_text(100 + number, PREFIXES[1] - PREFIXES[0])
        turns = {choose(chat(opening + b"?" * turn), full) for turn in (1, 50, 500)}
        assert len(turns) == 1
        places.add(turns.pop()[0])
    assert places == set(IDLE) - {home} or len(places) >= 2


def test_speech_avoids_an_engine_whose_listeners_run_out_of_audio() -> None:
    loads = {0: Load(2, LITTLE_SLACK / 2), 1: Load(5, 2.0), 2: Load(6)}
    assert choose(speech("s"), loads) == (1, "load")
    assert choose(chat(b"short"), loads) == (0, "load")
    assert choose(speech("s"), {**loads, 1: Load(7, 2.0), 2: Load(8)}) == (0, "load")
    assert choose(speech("s"), {0: Load(1, 0.0), 1: Load(2, 0.1)}) == (0, "load")


@pytest.mark.parametrize("seed", [slow("1"), "2"])
def test_all_processes_choose_alike(seed: str) -> None:
    """Python's own hashes differ from process to process."""
    code = "from service.api.engines.engines import ranked; print(ranked(b'key', range(8)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={"PYTHONHASHSEED": seed}
    )
    assert done.stdout.strip() == str(ranked(b"key", range(8)))
