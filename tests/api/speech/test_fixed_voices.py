"""Built-in voices are the same in every request and after a restart; described ones are kept."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from service.api.speech.speaker import DEFAULT_VOICE, OPENAI_VOICES
from service.hub import EMBEDDED
from service.hub.catalog import load_catalog
from service.link.engine_link import ENTRY
from service.link.messages import SpeechRequest
from service.settings.settings import load_settings
from service.voices import FOLDER
from tests.support.miniature import talker
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import GENEROUS


class Heard:
    """A server, and the speech requests that its engine gets."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.requests: list[SpeechRequest] = []
        self.http = httpx.Client(base_url=server.url, timeout=2 * GENEROUS)
        engine = server.context.engine
        submit = engine.submit

        def listen(request: Any) -> Any:
            if isinstance(request, SpeechRequest):
                self.requests.append(request)
            return submit(request)

        engine.submit = listen  # type: ignore[method-assign]

    def speak(self, voice: str | None, **fields: Any) -> SpeechRequest:
        """The engine's request for one text in that voice."""
        body = {"input": "Hello.", "voice": voice, "response_format": "pcm", "max_len": 1, **fields}
        answer = self.http.post("/v1/audio/speech", json=body)
        assert answer.status_code == 200, answer.text
        return self.requests[-1]

    @property
    def made(self) -> int:
        """Takes of voices so far."""
        return sum(request.request_id.startswith("voice-") for request in self.requests)


@contextmanager
def hearing(directory: Path, **more: Any) -> Iterator[Heard]:
    flags = {"model": (str(talker()),), "voices_dir": directory, "max_running": 4}
    flags |= more
    with running_server(load_catalog(load_settings(flags)), engine=ENTRY, **flags) as server:
        yield Heard(server)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("voices")


@pytest.fixture(scope="module")
def heard(directory: Path) -> Iterator[Heard]:
    with hearing(directory) as heard:
        yield heard


def same(one: SpeechRequest, other: SpeechRequest) -> bool:
    assert one.reference is not None and other.reference is not None
    return np.array_equal(one.reference, other.reference)


def test_a_name_is_one_voice_whatever_the_seed(heard: Heard) -> None:
    nova = heard.speak("nova", seed=1)
    made = heard.made
    assert made >= 1 and nova.reference is not None and len(nova.reference) > 1
    assert same(nova, heard.speak("NOVA", seed=2)) and heard.made == made
    assert not same(nova, heard.speak("onyx"))
    default = heard.speak(None)
    assert not same(nova, default) and same(default, heard.speak("default"))


def test_instructions_keep_a_named_voice_and_describe_an_unnamed_one(heard: Heard) -> None:
    whispered = heard.speak("nova", instructions="Whisper")
    assert same(whispered, heard.speak("nova"))
    assert whispered.segments[0].text_ids != heard.speak("nova").segments[0].text_ids
    assert heard.speak(None, instructions="An old man").reference is None


@pytest.mark.slow
def test_it_is_the_same_after_a_restart_and_not_made_again(heard: Heard, directory: Path) -> None:
    before = heard.speak("nova")
    with hearing(directory) as again:
        assert same(before, again.speak("nova")) and again.made == 0
    for file in (directory / FOLDER).iterdir():
        file.write_bytes(b"damaged")
    with hearing(directory) as again:
        assert same(before, again.speak("nova")) and again.made >= 1, "the fixed seed makes it once more"


@pytest.mark.slow
def test_other_weights_in_a_folder_of_the_same_name_have_a_voice_of_their_own(
    heard: Heard, directory: Path, tmp_path: Path
) -> None:
    before = heard.speak("nova")
    copied = shutil.copytree(talker(), tmp_path / "voxcpm2")
    with hearing(directory, model=(str(copied),)) as again:
        assert same(before, again.speak("nova")) and again.made == 0
    other = shutil.copytree(talker(), tmp_path / "other" / "voxcpm2")
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in weights.items()}, other / "model.safetensors")
    with hearing(directory, model=(str(other),)) as again:
        assert not same(before, again.speak("nova")) and again.made >= 1


def test_requests_at_once_wait_for_one_making(heard: Heard) -> None:
    made = heard.made
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda seed: heard.speak("sage", seed=seed), range(4)))
    sage = [request for request in heard.requests if request.reference is not None][-4:]
    assert all(same(sage[0], other) for other in sage)
    assert 1 <= heard.made - made <= 3  # attempts of one making


def test_they_may_be_drawn_anew(tmp_path: Path) -> None:
    with hearing(tmp_path, fixed_voices="off") as heard:
        assert heard.speak("nova").reference is None
    assert not list(tmp_path.iterdir())


def test_a_described_voice_is_kept(heard: Heard) -> None:
    form = {"name": "Old Tom", "speaker_description": "An old man, (hoarse)", "seed": "7"}
    created = heard.http.post("/v1/audio/voices", files={name: (None, value) for name, value in form.items()})
    assert created.status_code == 200, created.text
    voice = created.json()
    assert voice["seconds"] > 0.3 and voice["description"] == form["speaker_description"] and "consent" not in voice
    assert same(heard.speak("old tom", seed=1), heard.speak(voice["id"], seed=2))
    assert heard.http.delete(f"/v1/audio/voices/{voice['id']}").status_code == 200


@pytest.mark.slow
def test_the_embedded_voices_come_with_the_package(tmp_path: Path) -> None:
    """If the weights are new: python -m training.voice.built_in_voices models/embedded/voxcpm2"""
    with hearing(tmp_path, model=(str(EMBEDDED / "voxcpm2"),)) as heard:
        for voice in (DEFAULT_VOICE, *OPENAI_VOICES):
            heard.speak(voice)
        assert heard.made == 0 and not (tmp_path / FOLDER).exists()
