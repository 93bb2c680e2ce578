"""Launches that run out of memory or fail otherwise: they fail their batch and nothing else, in a real engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from service.hub.catalog import load_catalog
from service.link.config import EngineConfig
from service.link.engine_link import EngineLink, ProcessLink
from service.settings.settings import load_settings
from tests.support.failing_engine import HELD, OUT_OF_MEMORY
from tests.support.miniature import talker
from tests.support.processes import ROOT
from tests.support.servers import RunningServer, running_server
from tests.support.victims import chat, image_part, same_sound, speech
from tests.support.waiting import GENEROUS, wait

pytestmark = pytest.mark.slow

MODELS = (str(ROOT / "tests/golden/qwen2_vl"), str(talker()))
TWICE = "2"
"""Launches that run out of memory: a pass and its second try."""


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("faults")
        patch.setenv("REPRISE_TEST_FAULTS", str(directory))
        yield directory


@pytest.fixture(scope="module")
def server(faults: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    def make_link(config: EngineConfig) -> EngineLink:
        config = msgspec.structs.replace(config, decode_buckets=(8,), encoder_buckets=(256,))
        return ProcessLink(config, "tests.support.failing_engine:serve")

    flags = {"max_running": 8, "model": MODELS, "voices_dir": tmp_path_factory.mktemp("voices")}
    catalog = load_catalog(load_settings(flags))
    with running_server(catalog, make_link, **flags) as server:
        yield server


def post(server: RunningServer, path: str, body: dict) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=2 * GENEROUS)


def ask(server: RunningServer, text: str, seed: int = 0, **fields: object) -> httpx.Response:
    return post(server, "/v1/chat/completions", chat(text, image_part(seed=seed), **fields))


def assert_idle(server: RunningServer) -> None:
    server.wait_idle()

    def nothing_held() -> bool:
        state = server.context.engine.state
        return state is not None and not any(m.running + m.waiting + m.pages_used for m in state.models)

    wait(nothing_held, what="slots and pages are given back")


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [("oom", 503, "out_of_memory"), ("host-oom", 503, "out_of_memory"), ("bug", 500, "engine_error")],
)
def test_a_chat_step_that_fails(server: RunningServer, faults: Path, fault: str, status: int, code: str) -> None:
    """A prefill that fails beside a running answer: the answer goes on as if nothing had been."""
    usual = ask(server, "Go on.", tokens=150).json()["choices"][0]["message"]["content"]
    answers: list[httpx.Response] = []
    running = threading.Thread(target=lambda: answers.append(ask(server, "Go on.", tokens=150)))
    hold = faults / "chat-hold"
    hold.write_text("5")
    running.start()
    wait(lambda: hold.read_text() == HELD, what="a step of the answer is held")
    victim = threading.Thread(target=lambda: answers.append(ask(server, "Never seen before " * 9, seed=3)))
    victim.start()
    wait(lambda: server.context.engine.in_flight == 2, what="the victim is in the engine")
    (faults / f"chat-{fault}").write_text("" if fault == "bug" else TWICE)
    hold.unlink()
    running.join(2 * GENEROUS)
    victim.join(2 * GENEROUS)
    # The fault takes the next launch: the victim's prefill, twice, or the decode rows that go before it.
    failed = [answer for answer in answers if answer.status_code != 200]
    well = [answer for answer in answers if answer.status_code == 200]
    assert len(failed) == 1 and len(well) == 1
    assert failed[0].status_code == status and failed[0].json()["error"]["code"] == code
    assert (status == 503) == ("retry-after" in failed[0].headers)
    assert OUT_OF_MEMORY not in failed[0].text
    assert ask(server, "Go on.", tokens=150).json()["choices"][0]["message"]["content"] == usual
    assert_idle(server)


def test_an_encoder_pass_that_fails_is_tried_item_by_item(server: RunningServer, faults: Path) -> None:
    (faults / "encoder-oom").write_text(TWICE)
    both = chat("And these?", image_part(seed=11), image_part(seed=12))
    assert post(server, "/v1/chat/completions", both).status_code == 200
    assert not list(faults.iterdir())
    (faults / "encoder-oom").write_text(TWICE)
    alone = ask(server, "And this?", seed=13)
    assert alone.status_code == 503 and alone.json()["error"]["code"] == "out_of_memory"
    assert_idle(server)


@pytest.mark.parametrize(("fault", "status"), [("oom", 503), ("bug", 500)])
def test_a_speech_prefill_that_fails(server: RunningServer, faults: Path, fault: str, status: int) -> None:
    usual = post(server, "/v1/audio/speech", speech()).content
    (faults / f"speech_prefill-{fault}").write_text(TWICE if fault == "oom" else "")
    failed = post(server, "/v1/audio/speech", speech())
    assert failed.status_code == status and failed.json()["error"]["type"]
    assert same_sound(post(server, "/v1/audio/speech", speech()).content, usual)
    assert_idle(server)


@pytest.mark.parametrize(("fault", "code"), [("oom", "out_of_memory"), ("bug", "engine_error")])
def test_a_speech_step_that_fails(server: RunningServer, faults: Path, fault: str, code: str) -> None:
    """The first audio has gone out before the first decode step: events end with an error, bytes are cut off."""
    usual = post(server, "/v1/audio/speech", speech()).content
    (faults / f"speech-{fault}").touch()
    events = post(server, "/v1/audio/speech", speech(stream_format="sse"))
    audio, *_, error = [json.loads(line[6:]) for line in events.text.splitlines() if line.startswith("data: {")]
    assert events.status_code == 200 and audio["type"] == "speech.audio.delta"
    assert error["error"]["code"] == code and OUT_OF_MEMORY not in events.text
    (faults / f"speech-{fault}").touch()
    with pytest.raises(httpx.RemoteProtocolError):
        post(server, "/v1/audio/speech", speech())
    assert same_sound(post(server, "/v1/audio/speech", speech()).content, usual)
    assert_idle(server)


def test_the_engine_was_never_restarted(server: RunningServer) -> None:
    assert server.context.engine.restarts == 0
