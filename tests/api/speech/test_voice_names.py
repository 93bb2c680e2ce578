"""Built-in voices keep their names, however somebody else's is written."""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from service.api.speech.references import encoder_of
from service.api.speech.speaker import DEFAULT_VOICE, OPENAI_VOICES
from service.hub import EMBEDDED
from service.hub.catalog import Catalog, load_catalog
from service.link.config import Channel, EngineConfig
from service.link.engine_link import InlineLink
from service.link.messages import EngineState, Outputs, SpeechDelta, SpeechRequest, Stop
from service.processes.server import create_server
from service.settings.reading import SettingsError
from service.settings.settings import load_settings
from service.voices.names import is_name, name_key
from service.voices.store import VoiceStore, VoiceStoreError
from tests.support.servers import RunningServer, running_server

DISGUISES = {
    "ſage": "sage",  # the long s
    "aſh": "ash",
    "ſhimmer": "shimmer",
    "verſe": "verse",
    "SAGE": "sage",
    "ＮＯＶＡ": "nova",  # full width
    "ﬁle": "file",  # a ligature
    "Default": "default",
    "dеfault": "dеfault",  # a Cyrillic letter is another one
}
spoken: list[SpeechRequest] = []


@pytest.mark.parametrize("name", ["हिन्दी आवाज़", "เสียงของฉัน", "தமிழ்", "José", "ẹ́kọ", "日本", "a_b"])
def test_letters_may_have_signs(name: str) -> None:
    assert is_name(unicodedata.normalize("NFC", name))


@pytest.mark.parametrize(
    "name", ["nova\ufe0f", "日\ufe0f", "no\u034fva", "nova\u0336", "\u0301a", "ह" + "\u0941" * 64, "a\u200db", ""]
)
def test_marks_do_not_make_another_name_of_one(name: str) -> None:
    assert not is_name(name)


def listening(config: EngineConfig, channel: Channel) -> None:
    """An engine that keeps what it is asked to say."""
    channel.send(Outputs(state=EngineState("ready", "", (), 0)))
    while True:
        for command in channel.receive(0.05):
            if isinstance(command, SpeechRequest):
                spoken.append(command)
                audio = np.zeros(960, np.float32)
                said = SpeechDelta(command.request_id, audio, 0, segment_done=True, finished=True)
                channel.send(Outputs(speech=(said,)))
            elif isinstance(command, Stop):
                return


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog(load_settings({"model": (str(EMBEDDED / "voxcpm2"),)}))


@pytest.fixture
def server(catalog: Catalog, tmp_path: Path) -> Iterator[RunningServer]:
    """With a voice on its disk that was kept when "ſage" was a name like any other."""
    encoder = encoder_of(catalog.models[0])
    latents = {"reference": np.ones((3, 4, 64), np.float32)}
    for name in ("ſage", "Anna"):
        VoiceStore(tmp_path, 9).add(name=name, encoder=encoder, consent="true", seconds=1.0, latents=latents)
    flags: dict[str, Any] = {"voices_dir": tmp_path, "fixed_voices": False}
    with running_server(catalog, lambda config: InlineLink(config, listening), **flags) as running:
        yield running


@pytest.mark.parametrize(("name", "key"), DISGUISES.items())
def test_keys_of_names(name: str, key: str) -> None:
    assert name_key(name) == key and name_key(key) == key


def test_built_in_names_are_their_own_keys() -> None:
    assert [name for name in (DEFAULT_VOICE, *OPENAI_VOICES) if name_key(name) != name] == []


def test_names_that_are_the_same_are_kept_once(tmp_path: Path) -> None:
    store = VoiceStore(tmp_path, 9)
    voice = store.add(name="Straße", encoder="e", consent="true", seconds=1.0, latents={"reference": np.ones(3)})
    assert store.find("STRASSE") == store.find("ｓｔｒａße") == voice
    with pytest.raises(VoiceStoreError, match="exists"):
        store.check_room("strasſe")


@pytest.mark.parametrize("below", ["", "voices"])
def test_a_directory_that_is_none_is_named_at_the_start(catalog: Catalog, tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SettingsError, match=r"voices_dir: .*file.* cannot be used \(Not a directory\)"):
        create_server(load_settings({"voices_dir": str(file / below)}), catalog)


def sample() -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(8000, np.float32), 16_000, format="WAV")
    return file.getvalue()


@pytest.mark.parametrize("name", ["ſage", "aſh", "ſhimmer", "verſe", "ＮＯＶＡ", "Sage", "DEFAULT"])
def test_the_name_of_a_built_in_voice_cannot_be_uploaded(server: RunningServer, name: str) -> None:
    form = {"name": name, "consent": "true"}
    refused = httpx.post(f"{server.url}/v1/audio/voices", data=form, files={"audio_sample": ("a.wav", sample())})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "name"
    assert refused.json()["error"]["message"] == "name: this is the name of a built-in voice."


@pytest.mark.parametrize(("voice", "cloned"), [("sage", False), ("SAGE", False), ("ſage", False), ("anna", True)])
def test_built_in_voices_are_found_first(server: RunningServer, voice: str, cloned: bool) -> None:
    spoken.clear()
    body = {"input": "Hello.", "voice": voice, "response_format": "pcm"}
    assert httpx.post(f"{server.url}/v1/audio/speech", json=body).status_code == 200
    assert (spoken[0].reference is not None) == cloned
