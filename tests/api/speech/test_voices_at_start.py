"""Built-in voices are made while a server has nothing else to do, so that the first listener does not wait for one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from service.api.http.errors import ApiError
from service.api.request_stream import EngineError
from service.api.speech import voices_at_start
from service.api.speech.speaker import DEFAULT_VOICE, OPENAI_VOICES
from service.api.speech.voices_at_start import make_voices
from service.catalog import load_catalog
from service.hub import EMBEDDED
from service.link.engine_link import InlineLink
from service.named_voice_store import FOLDER
from service.settings import load_settings
from tests.support.fake_talker import FakeTalker, talking_catalog
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import GENEROUS, wait


@pytest.fixture
def making(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """(model, name, description) of the voices that are asked for at start."""
    made: list[tuple[str, str, str]] = []

    async def named_reference(context: Any, model: Any, name: str, description: str) -> np.ndarray:
        made.append((model.name, name, description))
        return np.zeros((1, 1, 1), np.float32)

    monkeypatch.setattr(voices_at_start, "named_reference", named_reference)
    return made


def talking(**flags: Any) -> Any:
    return running_server(talking_catalog(2), lambda config: InlineLink(config, FakeTalker().serve), **flags)


def counted(server: RunningServer) -> int:
    lines = httpx.get(f"{server.url}/metrics", timeout=GENEROUS).text.splitlines()
    found = [line for line in lines if line.startswith("reprise_built_in_voices_made_total{")]
    return sum(int(float(line.split()[-1])) for line in found)


@pytest.fixture
def both() -> list[str]:
    return ["talker", "talker-1"]


def test_all_are_made_for_each_speech_model_the_default_first(making: list[Any], both: list[str]) -> None:
    voices = [(DEFAULT_VOICE, ""), *OPENAI_VOICES.items()]
    with talking(voices_at_start="all"):
        wait(lambda: len(making) == 2 * len(voices), GENEROUS, "all voices are made")
    assert making == [(model, name, description) for name, description in voices for model in both]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"voices_at_start": "default"}, 2),
        ({"voices_at_start": "none"}, 0),
        ({"voices_at_start": "all", "fixed_voices": False}, 0),
    ],
)
def test_which_are_made_is_a_setting(making: list[Any], flags: dict[str, Any], expected: int) -> None:
    with talking(**flags) as server:
        asyncio.run_coroutine_threadsafe(make_voices(server.context), server.loop).result(GENEROUS)
        # Those of the server's own start, and these.
        wait(lambda: len(making) == 2 * expected, GENEROUS, "the voices are made")
    assert {name for _, name, _ in making} == ({DEFAULT_VOICE} if expected else set())


def test_requests_come_first(making: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with talking(voices_at_start="none") as server:
        monkeypatch.setattr(voices_at_start, "names", lambda context: (DEFAULT_VOICE,))
        looked = iter(range(10**9))
        sleep = asyncio.sleep

        async def counted_sleep(seconds: float) -> None:
            next(looked)
            await sleep(0)

        monkeypatch.setattr(voices_at_start.asyncio, "sleep", counted_sleep)
        ticket = server.context.admission.ticket("speech")
        ticket.grow(1)
        task = asyncio.run_coroutine_threadsafe(make_voices(server.context), server.loop)
        wait(lambda: next(looked) > 3, GENEROUS, "it has looked several times")
        assert not making
        ticket.release()
        task.result(GENEROUS)
        assert len(making) == 2


@pytest.mark.parametrize("error", [ApiError(500, "no take"), EngineError(503, "engine_unavailable", "it ended")])
def test_what_cannot_be_made_is_left_to_requests_and_the_others_are_made(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, making: list[Any]
) -> None:
    made = voices_at_start.named_reference

    async def fails_at_first(context: Any, model: Any, name: str, description: str) -> np.ndarray:
        if name == DEFAULT_VOICE:
            raise error
        return await made(context, model, name, description)

    monkeypatch.setattr(voices_at_start, "named_reference", fails_at_first)
    with talking(voices_at_start="all"):
        wait(lambda: len(making) == 2 * len(OPENAI_VOICES), GENEROUS, "the others are made")
    for model in ("talker", "talker-1"):
        assert f"the built-in voice default of {model} is made when it is asked for: {error}" in caplog.text


@pytest.mark.parametrize("kinds", [("speech",), ("chat",), ()])
def test_nothing_is_said_of_voices_if_the_engine_did_not_start(
    kinds: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """The start says what failed, in a last line."""
    asked: list[str] = []

    async def wait_ready() -> None:
        asked.append("ready")
        raise EngineError(503, "engine_failed", "The engine could not be started: no weights.")

    catalog = SimpleNamespace(of_kind=lambda kind: [one for one in kinds if one == kind])
    context: Any = SimpleNamespace(engine=SimpleNamespace(wait_ready=wait_ready), catalog=catalog)
    asyncio.run(make_voices(context))
    assert not caplog.text and bool(asked) == ("speech" in kinds)


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[RunningServer]:
    flags = {"model": (str(EMBEDDED / "voxcpm2"),), "voices_dir": tmp_path, "max_running": 4, "decode_buckets": (1, 4)}
    flags |= {"voices_at_start": "default"}
    with running_server(load_catalog(load_settings(flags)), InlineLink, **flags) as server:
        yield server


def test_the_first_listener_does_not_wait_for_a_voice(embedded: RunningServer, tmp_path: Path) -> None:
    wait(lambda: counted(embedded) == 1, 2 * GENEROUS, "the voice is made")
    wait(lambda: len([*(tmp_path / FOLDER).glob("*.safetensors")]) == 1, GENEROUS, "it is kept")
    body = {"input": "Hello.", "response_format": "pcm", "max_len": 1}
    answer = httpx.post(f"{embedded.url}/v1/audio/speech", json=body, timeout=2 * GENEROUS)
    assert answer.status_code == 200 and counted(embedded) == 1
