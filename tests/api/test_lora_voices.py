"""Adapters as voices through the real server and the embedded voice: listed, chosen for each request, each its own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from service.api.speech.voices import lora_voices
from service.cli.main import app
from service.hub import EMBEDDED
from service.hub.catalog import load_catalog
from service.settings.reading import SettingsError
from service.settings.settings import load_settings
from tests.support.lora import random_adapter, write_adapter
from tests.support.processes import ServerProcess, served
from tests.support.waiting import GENEROUS

CHECKPOINT = EMBEDDED / "voxcpm2"
MODEL = "reprise/voxcpm2"
ONE_LAYER = ("lm_to_dit_proj",)
SPEECH = {"model": MODEL, "input": "Hello there.", "response_format": "pcm", "sample_rate": 48_000}
SPEECH |= {"seed": 5, "max_len": 6, "min_len": 6}

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("Anna", "bela 2")):
        write_adapter(folder / name, random_adapter(CHECKPOINT, 8, seed), 8, 8.0)
    home = str(tmp_path_factory.mktemp("home"))
    with served("--lora-voices", str(folder), "--max-frames", "16", HOME=home) as running:
        yield running


def speak(server: ServerProcess, **fields: object) -> np.ndarray:
    answer = httpx.post(f"{server.url}/v1/audio/speech", json=SPEECH | fields, timeout=600)
    assert answer.status_code == 200, answer.text
    return np.frombuffer(answer.content, dtype=np.int16) / 32768


@pytest.mark.slow
def test_adapters_are_listed_and_every_voice_is_there_by_its_id(server: ServerProcess) -> None:
    path = f"{server.url}/v1/audio/voices"
    listed = httpx.get(path, timeout=GENEROUS).json()["data"]
    assert [voice for voice in listed if voice["type"] == "lora"] == [
        {"id": name, "name": name, "object": "audio.voice", "type": "lora", "model": MODEL}
        for name in ("Anna", "bela 2")
    ]
    for voice in listed:
        assert httpx.get(f"{path}/{voice['id'].upper()}", timeout=GENEROUS).json() == voice
        assert httpx.delete(f"{path}/{voice['id']}", timeout=GENEROUS).status_code == 404  # none is uploaded


@pytest.mark.slow
def test_each_voice_sounds_as_itself_and_names_are_known_or_taken(server: ServerProcess) -> None:
    sounds = {voice: speak(server, voice=voice) for voice in ("Anna", "anna", "bela 2", "default")}
    assert len(sounds["Anna"]) == 6 * 7680
    np.testing.assert_allclose(sounds["anna"], sounds["Anna"], atol=1e-3)
    assert all(np.abs(sounds["Anna"] - sounds[other]).max() > 0.01 for other in ("bela 2", "default"))
    unknown = httpx.post(f"{server.url}/v1/audio/speech", json=SPEECH | {"voice": "cora"}, timeout=GENEROUS)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "voice_not_found")
    form = {"name": (None, "ANNA"), "speaker_description": (None, "A calm voice")}
    taken = httpx.post(f"{server.url}/v1/audio/voices", files=form, timeout=GENEROUS)
    assert (taken.status_code, taken.json()["error"]["param"]) == (400, "name")


def test_folders_that_cannot_be_voices_are_refused(tmp_path: Path) -> None:
    for number, (names, said) in enumerate(
        [
            (("Nova",), "'Nova': this is the name of a built-in voice"),
            (("anna", "Anna"), "the same name as 'Anna'"),
            (("voice_0123456789abcdef01234567",), "must not have the form of a voice's id"),
            (("a/b",), "a has no lora_config.json"),
            (("-x",), "'-x': must be 1 to 64 letters"),
        ]
    ):
        for name in names:
            write_adapter(tmp_path / f"{number}" / name, random_adapter(CHECKPOINT, 4, 0, ONE_LAYER), 4, 4.0)
        settings = load_settings({"lora_voices": tmp_path / f"{number}", "model": (str(CHECKPOINT),)})
        with pytest.raises(SettingsError, match=said):
            lora_voices(settings, load_catalog(settings))
    settings = load_settings({"lora_voices": tmp_path, "model": (str(EMBEDDED / "qwen2_vl"),)})
    with pytest.raises(SettingsError, match="adapters are of one speech model, and 0 are hosted"):
        lora_voices(settings, load_catalog(settings))


@pytest.mark.slow
def test_a_bad_adapter_ends_a_dry_run_with_its_name(tmp_path: Path) -> None:
    """It loads models as the engine does."""
    write_adapter(tmp_path / "bad", random_adapter(CHECKPOINT, 4, 0, ONE_LAYER), 4, 4.0)
    config = tmp_path / "bad" / "lora_config.json"
    config.write_text(json.dumps({"lora_config": {"r": 5, "alpha": 5}}))
    flags = ("--model", str(CHECKPOINT), "--lora-voices", str(tmp_path))
    said = r"bad/lora_weights.safetensors: lm_to_dit_proj.lora_A has shape"
    done = CliRunner().invoke(app, ["serve", "--dry-run", "--gpu-memory", "24G", *flags], env={"COLUMNS": "400"})
    assert done.exit_code == 2 and re.search(said, done.stderr), done.output
