"""Built-in voices are made while a server has nothing else to do, so that the first listener does not wait for one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from service.api.engines.request_stream import EngineError
from service.api.http.errors import ApiError
from service.api.speech import voices as voices_at_start
from service.api.speech.speaker import DEFAULT_VOICE, OPENAI_VOICES
from service.api.speech.voices import make_voices
from service.hub import EMBEDDED
from service.hub.catalog import load_catalog
from service.link.messages import Pause
from service.settings.settings import load_settings
from service.voices import FOLDER
from tests.support import miniature
from tests.support.fake_talker import FakeTalker, talking_catalog
from tests.support.inline_link import InlineLink
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import GENEROUS, wait


@pytest.fixture
def making(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """(model, name, description) of the voices that are asked for at start."""
    made: list[tuple[str, str, str]] = []

    async def named_reference(context: Any, model: Any, name: str, description: str, *, wanted: bool) -> np.ndarray:
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


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"fixed_voices": "at_start"}, [(DEFAULT_VOICE, ""), *OPENAI_VOICES.items()]),
        ({"fixed_voices": "at_use"}, []),
        ({"fixed_voices": "off"}, []),
    ],
)
def test_which_are_made_for_each_speech_model_is_a_setting(
    making: list[Any], flags: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    wanted = [(model, name, description) for name, description in expected for model in ("talker", "talker-1")]
    with talking(**flags) as server:
        asyncio.run_coroutine_threadsafe(make_voices(server.context), server.loop).result(GENEROUS)
        # Those of the server's own start, and these.
        wait(lambda: len(making) == 2 * len(wanted), GENEROUS, "the voices are made")
    assert sorted(making) == sorted(2 * wanted)


@pytest.mark.parametrize("error", [ApiError(500, "no take"), EngineError(503, "engine_unavailable", "it ended")])
def test_what_cannot_be_made_is_left_to_requests_and_the_others_are_made(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, making: list[Any]
) -> None:
    made = voices_at_start.named_reference

    async def fails_at_first(context: Any, model: Any, name: str, description: str, *, wanted: bool) -> np.ndarray:
        if name == DEFAULT_VOICE:
            raise error
        return await made(context, model, name, description, wanted=wanted)

    monkeypatch.setattr(voices_at_start, "named_reference", fails_at_first)
    with talking(fixed_voices="at_start"):
        wait(lambda: len(making) == 2 * len(OPENAI_VOICES), GENEROUS, "the others are made")
    for model in ("talker", "talker-1"):
        assert f"the built-in voice default of {model} is made when it is asked for: {error}" in caplog.text


def speaking(checkpoint: Path, voices: Path) -> Any:
    flags = {"model": (str(checkpoint),), "voices_dir": voices, "max_running": 4}
    return running_server(load_catalog(load_settings(flags)), InlineLink, **flags)


def say(server: RunningServer, voice: str) -> httpx.Response:
    body = {"input": "One.", "voice": voice, "response_format": "pcm", "max_len": 1}
    return httpx.post(f"{server.url}/v1/audio/speech", json=body, timeout=2 * GENEROUS)


@pytest.mark.slow
def test_the_embedded_voices_come_with_the_package(tmp_path: Path) -> None:
    """If the weights are new: python -m training.voice.built_in_voices models/embedded/voxcpm2"""
    with speaking(EMBEDDED / "voxcpm2", tmp_path) as server:
        for voice in (DEFAULT_VOICE, *OPENAI_VOICES):
            assert say(server, voice).status_code == 200
        assert counted(server) == 0 and not (tmp_path / FOLDER).exists()


def test_a_voice_that_is_being_made_pauses_for_requests_unless_they_want_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with speaking(miniature.talker(), tmp_path) as server:
        monkeypatch.setattr(voices_at_start, "names", lambda context: (DEFAULT_VOICE, "alloy"))
        engine, paused, send = server.context.engine, list[bool](), server.context.engine.send

        def sent(command: Any, *others: Any) -> None:
            if isinstance(command, Pause):
                paused.append(command.paused)
            send(command, *others)

        monkeypatch.setattr(engine, "send", sent)
        asyncio.run_coroutine_threadsafe(make_voices(server.context), server.loop)

        def left() -> int:
            return int(httpx.get(f"{server.url}/ready").json()["background"]["voices_left"])

        ticket = server.context.admission.ticket("chat")
        wait(lambda: ("voxcpm2", DEFAULT_VOICE) in server.context.named_voices, GENEROUS, "the making began")
        ticket.grow(1)
        wait(lambda: paused == [True], GENEROUS, "it pauses")
        assert left() == 2 and counted(server) == 0
        ticket.release()
        wait(lambda: paused[:2] == [True, False], GENEROUS, "it goes on")
        wait(lambda: counted(server) == 1, GENEROUS, "it is made")
        ticket.grow(1)
        assert say(server, "alloy").status_code == 200 and counted(server) == 2
        ticket.release()
        wait(lambda: left() == 0, GENEROUS, "nothing is left")
