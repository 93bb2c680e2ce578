"""Built-in voices keep their names, however somebody else's is written."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from service.api.speech.speaker import DEFAULT_VOICE, OPENAI_VOICES, encoder_of
from service.processes.server import create_server
from service.settings.reading import SettingsError
from service.settings.settings import load_settings
from service.voices import VoiceStore, VoiceStoreError, is_name, name_key
from tests.support.fake_talker import FakeTalker, talking_catalog
from tests.support.inline_link import InlineLink
from tests.support.servers import running_server

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


def test_letters_may_have_signs() -> None:
    for name in ("हिन्दी आवाज़", "เสียงของฉัน", "தமிழ்", "José", "ẹ́kọ", "日本", "a_b"):
        assert is_name(unicodedata.normalize("NFC", name)), name


def test_marks_do_not_make_another_name_of_one() -> None:
    signs = ("nova\ufe0f", "日\ufe0f", "no\u034fva", "nova\u0336", "\u0301a", "ह" + "\u0941" * 64, "a\u200db", "")
    assert not any(map(is_name, signs))


def test_keys_of_names() -> None:
    for name, key in DISGUISES.items():
        assert name_key(name) == key == name_key(key)
    for name in (DEFAULT_VOICE, *OPENAI_VOICES):
        assert name_key(name) == name


def test_names_that_are_the_same_are_kept_once(tmp_path: Path) -> None:
    store = VoiceStore(tmp_path, 9)
    voice = store.add(name="Straße", encoder="e", consent="true", seconds=1.0, latents={"reference": np.ones(3)})
    assert store.find("STRASSE") == store.find("ｓｔｒａße") == voice
    with pytest.raises(VoiceStoreError, match="exists"):
        store.check_room("strasſe")


def test_a_directory_that_is_none_is_named_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "voices"):
        with pytest.raises(SettingsError, match=r"voices_dir: .*file.* cannot be used \(Not a directory\)"):
            create_server(load_settings({"voices_dir": str(folder)}), talking_catalog())


def test_built_in_voices_are_found_first_and_keep_their_names(tmp_path: Path) -> None:
    """Also before a voice that was kept when "ſage" was a name like any other."""
    catalog, talker = talking_catalog(), FakeTalker()
    latents = {"reference": np.ones((3, 4, 2), np.float32)}
    for name in ("ſage", "Anna"):
        VoiceStore(tmp_path, 9).add(
            name=name, encoder=encoder_of(catalog.models[1]), consent="true", seconds=1.0, latents=latents
        )
    flags: dict[str, Any] = {"voices_dir": tmp_path, "fixed_voices": "off"}
    with running_server(catalog, lambda config: InlineLink(config, talker.serve), **flags) as server:
        for voice, cloned in (("sage", False), ("SAGE", False), ("ſage", False), ("anna", True)):
            body = {"input": "Hello.", "voice": voice, "response_format": "pcm"}
            assert httpx.post(f"{server.url}/v1/audio/speech", json=body).status_code == 200
            assert (talker.requests[-1].reference is not None) == cloned, voice
        for name in ("ſage", "verſe", "ＮＯＶＡ", "DEFAULT"):
            form = {"name": name, "consent": "true"}
            refused = httpx.post(f"{server.url}/v1/audio/voices", data=form, files={"audio_sample": b"x"})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "name"
            assert refused.json()["error"]["message"] == "name: this is the name of a built-in voice."
