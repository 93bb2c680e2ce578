"""Voices: kept on disk, used by name, gone when deleted; names that are the same; references of built-in voices."""

from __future__ import annotations

import errno
import os
import threading
import unicodedata
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save

from service import voices
from service.api.speech.speaker import DEFAULT_VOICE, OPENAI_VOICES, encode, encoder_of
from service.link.messages import EncodeReference, ReferenceEncoded
from service.voices import (
    CACHED_REFERENCES,
    FOLDER,
    LONGEST_NAME,
    UNFINISHED,
    LruCache,
    VoiceStore,
    VoiceStoreError,
    is_name,
    load_named,
    name_key,
    save_named,
)
from tests.api.speech.conftest import clip
from tests.support.fake_engine import ENDLESS, FakeEngine
from tests.support.fake_talker import talking_catalog
from tests.support.rows import rows
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import GENEROUS, wait

ENCODED = {"encoder": "e", "consent": "c", "seconds": 1.0}


@pytest.fixture(scope="module")
def directory(speaking: RunningServer) -> Path:
    folder = speaking.context.settings.voices_dir
    assert folder is not None
    return folder


def upload(http: httpx.Client, sample: bytes | None = None, **fields: str | None) -> httpx.Response:
    form = {"name": "Anna", "consent": "true", **fields}
    files = {"audio_sample": ("../../anna.wav", clip() if sample is None else sample, "audio/wav")}
    return http.post("/v1/audio/voices", data={k: v for k, v in form.items() if v is not None}, files=files)


def speak(http: httpx.Client, voice: object, **fields: Any) -> httpx.Response:
    body = {"input": "Hello.", "voice": voice, "response_format": "pcm", "seed": 1, "max_len": 3, **fields}
    return http.post("/v1/audio/speech", json=body)


def test_a_voice_from_upload_to_deletion(http: httpx.Client, directory: Path) -> None:
    created = upload(http, ref_text="A tone.", speaker_description="a tone")
    assert created.status_code == 200, created.text
    voice = created.json()
    assert voice["object"] == "audio.voice" and voice["name"] == "Anna" and voice["consent"] == "true"
    assert voice["seconds"] == pytest.approx(0.6, abs=0.01)
    assert [path.name for path in directory.iterdir()] == [f"{voice['id']}.safetensors"]

    listed = http.get("/v1/audio/voices").json()
    assert {"default", "alloy", voice["id"]} <= {entry["id"] for entry in listed["voices"]}
    assert http.get(f"/v1/audio/voices/{voice['id']}").json() == voice

    by_id, by_name, as_object = speak(http, voice["id"]), speak(http, "anna"), speak(http, {"id": voice["id"]})
    assert by_id.status_code == 200, by_id.text
    assert by_id.content == by_name.content == as_object.content != speak(http, "default").content
    styled = speak(http, voice["id"], instructions="Calm")
    assert styled.status_code == 200 and styled.content != by_id.content

    error = upload(http).json()["error"]
    assert error["code"] == "voice_exists" and error["param"] == "name" and error["message"].startswith("name: ")
    assert http.delete(f"/v1/audio/voices/{voice['id']}").json()["deleted"] is True
    assert http.delete(f"/v1/audio/voices/{voice['id']}").status_code == 404
    assert speak(http, "anna").status_code == 404
    assert not list(directory.iterdir())


def test_there_is_a_limit_and_letters_may_be_decomposed(http: httpx.Client) -> None:
    made = [upload(http, name=name).json() for name in ("Voice 1", "Voice 2", "Jose\u0301")]
    assert made[2]["name"] == "José" and http.get("/v1/audio/voices/Jose%CC%81").json()["id"] == made[2]["id"]
    full = upload(http, name="One more")
    assert (full.status_code, full.json()["error"]["code"]) == (409, "too_many_voices")
    for name in ("Voice 1", made[1]["id"], "José"):
        assert http.delete(f"/v1/audio/voices/{name}").status_code == 200


BUILT_IN = "this is the name of a built-in voice."
BAD: list[tuple[str, str, Any]] = [
    ("name", "this field is required.", None),
    *(("name", "", name) for name in ("../../etc", "x" * 65)),
    *(("name", BUILT_IN, name) for name in ("alloy", "ſage", "verſe", "ＮＯＶＡ", "DEFAULT")),
    ("name", "", "ＶOICE_" + "0a" * 12),  # what a deleted voice may have been called by
    *(("consent", "", consent) for consent in (None, "false")),
    *(("ref_text", "", text) for text in ("x" * 5000, "<|audio_start|>")),
    ("ref_text", "", "聲" * 4096),  # leaves no position to speak in
    *(("audio_sample", "", sample) for sample in (b"not audio", b"", clip(61), clip()[:30])),
]


def test_what_does_not_fit_is_named(http: httpx.Client, directory: Path) -> None:
    for param, says, value in BAD:
        answer = upload(http, sample=value) if param == "audio_sample" else upload(http, **{param: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        assert answer.json()["error"]["message"].startswith(f"{param}: {says}")
    for described, message in (
        ({"name": "A", "speaker_description": "()"}, "speaker_description: "),
        ({"name": "A", "speaker_description": "A man", "ref_text": "It says."}, "ref_text: "),
        ({"name": "A", "speaker_description": "A man", "seed": "x"}, "seed: "),
        ({"name": "A"}, "audio_sample: "),
        ({"name": "Long", "speaker_description": "a calm voice " * 315}, "speaker_description: "),
        ({"name": "A", "speaker_description": "low", "audio_sample": "UklGRg=="}, "audio_sample: must be a file."),
        ({"name": "A", "ref_text": "x" * 4097}, "ref_text: too long: 4097 characters given, at most 4096 allowed."),
    ):
        answer = http.post("/v1/audio/voices", files={name: (None, text) for name, text in described.items()})
        assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(message)
    for kind, body in (
        ("application/json", b"{}"),
        ("multipart/form-data; boundary=x", b"--x\r\ngarbage"),
        (f"multipart/form-data; boundary={'x' * 300}", b"--x"),
        ("multipart/form-data", b"--x"),
    ):
        assert http.post("/v1/audio/voices", headers={"content-type": kind}, content=body).status_code == 400, body
    many = {f"field {i}": "x" for i in range(40)}
    assert http.post("/v1/audio/voices", data=many, files={"audio_sample": b"x"}).status_code == 400
    assert not list(directory.iterdir())


def test_a_name_of_megabytes_is_not_folded(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sign is eighteen letters once it is normalised: six megabytes would hold the event loop for seconds."""
    lengths, fold = [0], unicodedata.normalize
    monkeypatch.setattr(unicodedata, "normalize", lambda form, text: (lengths.append(len(text)), fold(form, text))[1])
    for length in (65, 200_000):
        answer = speak(http, "\ufdfa" * length)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "voice_not_found")
    assert max(lengths) <= LONGEST_NAME * 18


def test_a_voice_deleted_while_it_is_read_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = VoiceStore(tmp_path, 3), VoiceStore(tmp_path, 3)
    voice, second = (store.add(name=n, **ENCODED, latents=patches(1)) for n in "ab")
    load = voices.load_file

    def overtaken(path: Path) -> dict[str, np.ndarray]:
        tensors: dict[str, np.ndarray] = load(path)
        store.delete(voice.id)
        return tensors

    with monkeypatch.context() as patch:
        patch.setattr(voices, "load_file", overtaken)
        assert "reference" in store.latents(voice)
    assert store.cached(voice) is None
    store.latents(second)
    other.delete(second.id)
    assert store.find(second.id) is None and store.cached(second) is None


def test_a_form_that_is_cut_or_not_utf8_is_refused(http: httpx.Client, directory: Path) -> None:
    """The rest of a form whose file was cut would describe another voice."""

    def part(name: str, value: bytes) -> bytes:
        return f'--x\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n'.encode() + value + b"\r\n"

    described = part("speaker_description", b"a calm voice")
    for body, message in (
        *((part("name", b"Cut") + described + cut, "The form is not complete") for cut in (b"", b"--x")),
        (described + part('name"; filename="a', bytes(2 << 20))[:-2], "The form is not complete"),
        (part("name", "Jürgen".encode("latin-1")) + described + b"--x--", "name: the text is not UTF-8."),
    ):
        headers = {"content-type": "multipart/form-data; boundary=x"}
        answer = http.post("/v1/audio/voices", headers=headers, content=body)
        assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(message), answer.text
    assert not list(directory.iterdir())


def test_a_full_disk_leaves_nothing(http: httpx.Client, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        path.write_bytes(data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("service.voices._write", full)
    answer = upload(http, name="Too much")
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "insufficient_storage")
    assert str(directory) not in answer.text
    assert not list(directory.iterdir())
    monkeypatch.undo()
    id_ = upload(http, name="Too much").json()["id"]
    assert http.delete(f"/v1/audio/voices/{id_}").status_code == 200


def patches(count: int) -> dict[str, np.ndarray]:
    return {"reference": np.arange(count * 4, dtype=np.float32).reshape(count, 2, 2)}


@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "delete", "restart"]), st.integers(0, 3), st.booleans()), max_size=12
    )
)
def test_the_store_is_what_was_put_into_it(tmp_path_factory: pytest.TempPathFactory, steps: list) -> None:  # type: ignore[type-arg]
    """By two servers that share its directory."""
    directory = tmp_path_factory.mktemp("store")
    stores, kept = [VoiceStore(directory, 3) for _ in range(2)], {}
    for action, number, other in steps:
        name, store = f"voice {number}", stores[other]
        if action == "add":
            try:
                voice = store.add(name=name, **ENCODED, latents=patches(number + 1))
                kept[name] = voice
            except VoiceStoreError as error:
                assert error.reason == ("exists" if name in kept else "full")
        elif action == "delete" and name in kept:
            deleted = kept.pop(name).id
            store.delete(deleted)
            with pytest.raises(VoiceStoreError, match="deleted"):
                stores[not other].delete(deleted)
        elif action == "restart":
            stores[other] = VoiceStore(directory, 3)
        for store in stores:
            assert {voice.name for voice in store.voices()} == set(kept)
            for voice in kept.values():
                assert store.find(voice.id) == voice == store.find(voice.name.upper())
                count = int(voice.name.split()[1]) + 1
                np.testing.assert_array_equal(store.latents(voice)["reference"], patches(count)["reference"])


def test_one_of_two_uploads_of_a_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stands between its look at the names and its rename until the second waits for it, or is done."""
    stores = [VoiceStore(tmp_path / "voices", 5) for _ in range(2)]
    looked, second_is_there = threading.Event(), threading.Event()
    flock, check = voices.fcntl.flock, stores[0].check_room

    def add(store: VoiceStore) -> voices.Voice:
        return store.add(name="Ada", **ENCODED, latents=patches(1))

    def held(name: str, owner: str) -> None:
        check(name, owner)
        looked.set()
        assert second_is_there.wait(GENEROUS)

    def told(descriptor: int, operation: int) -> None:
        if looked.is_set():
            second_is_there.set()
        flock(descriptor, operation)

    monkeypatch.setattr(stores[0], "check_room", held)
    monkeypatch.setattr(voices.fcntl, "flock", told)
    with ThreadPoolExecutor(2) as servers:
        first = servers.submit(add, stores[0])
        assert looked.wait(GENEROUS)
        second = servers.submit(add, stores[1])
        second.add_done_callback(lambda _: second_is_there.set())
        assert first.result().name == "Ada"
        with pytest.raises(VoiceStoreError, match="exists"):
            second.result()


def test_an_unreadable_directory_leaves_known_voices(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory, away = tmp_path / "voices", tmp_path / "away"
    store = VoiceStore(directory, 5)
    spoken, unread = (store.add(name=name, **ENCODED, latents=patches(1)) for name in ("spoken", "unread"))
    store.latents(spoken)
    directory.rename(away)
    directory.touch()
    assert store.voices() == sorted([spoken, unread], key=lambda voice: (voice.created_at, voice.id))
    assert store.find("spoken") == spoken and store.find("other") is None
    assert store.latents(spoken)
    for attempt in (
        lambda: store.latents(unread),
        lambda: store.delete(unread.id),
        lambda: store.add(name="new", **ENCODED, latents=patches(1)),
    ):
        with pytest.raises(VoiceStoreError) as caught:
            attempt()
        assert caught.value.reason == "disk"
    assert caplog.text.count("the directory of voices cannot be read") == 1
    directory.unlink()
    away.rename(directory)
    assert store.latents(unread)
    store.delete(unread.id)
    assert store.voices() == [spoken]


def test_lookups_do_not_wait_for_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ups are made in the event loop; a slow disk must not hold it up."""
    store = VoiceStore(tmp_path / "voices", 5)
    kept = store.add(name="Kept", **ENCODED, latents=patches(1))
    writing, go_on = threading.Event(), threading.Event()
    write = voices._write

    def slowly(path: Path, data: bytes) -> None:
        writing.set()
        assert go_on.wait(2 * GENEROUS)
        write(path, data)

    monkeypatch.setattr(voices, "_write", slowly)
    with ThreadPoolExecutor(2) as threads:
        adding = threads.submit(lambda: store.add(name="Slow", **ENCODED, latents=patches(1)))
        assert writing.wait(GENEROUS)
        finding = threads.submit(store.find, "kept")
        try:
            assert finding.result(GENEROUS) == kept
            assert store.voices() == [kept]
        finally:
            go_on.set()
        assert adding.result(GENEROUS) == store.find("slow")


def unfinished(folder: Path) -> Path:
    """A file that is being written, beside one that was abandoned."""
    abandoned, under_way = (folder / f"{UNFINISHED}{number}" for number in (1, 4))
    abandoned.touch()
    os.utime(abandoned, times=(0, 0))
    under_way.touch()
    return under_way


def test_what_is_damaged_or_unfinished_is_left_out(tmp_path: Path) -> None:
    store = VoiceStore(tmp_path, 10)
    good, bad = (store.add(name=n, **ENCODED, latents=patches(1)) for n in ("good", "bad"))
    whole = (tmp_path / f"{good.id}.safetensors").read_bytes()
    (tmp_path / f"{bad.id}.safetensors").write_bytes(whole.replace(good.id.encode(), bad.id.encode())[:-1])
    under_way = unfinished(tmp_path)
    for number, data in enumerate([b"", b"nonsense", whole[:20], whole, save(patches(1)), save({}, {"voice": "{"})]):
        (tmp_path / f"voice_{number:024x}.safetensors").write_bytes(data)
    again = VoiceStore(tmp_path, 10)
    assert {voice.id for voice in again.voices()} == {good.id, bad.id}
    assert list(tmp_path.glob(f"{UNFINISHED}*")) == [under_way]
    with pytest.raises(VoiceStoreError):
        again.latents(bad)


DAMAGES: list[tuple[Callable[[np.ndarray], np.ndarray], str]] = [
    (lambda latents: latents.astype(np.float64), "are float64, not float32"),
    (lambda latents: latents[:0], "have the shape [0, "),
    (lambda latents: latents[0], "have the shape [4, "),
    (lambda latents: latents * np.float32(np.nan), "hold values beyond 1000, or NaN"),
    (lambda latents: latents + np.float32(3e38), "hold values beyond 1000, or NaN"),
    (lambda latents: latents[:, :, :6].copy(), "kept for another checkpoint"),
]


def test_a_voice_of_another_model_or_a_damaged_file_is_refused_by_name(
    speaking: RunningServer, http: httpx.Client, directory: Path
) -> None:
    store = speaking.context.voices
    voice = store.add(name="Other", **{**ENCODED, "encoder": "someone/else@1"}, latents=patches(2))
    answer = speak(http, "Other")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "voice_of_other_model")
    store.delete(voice.id)
    damaged = [(lambda latents, change=change: save({"reference": change(latents)}), said) for change, said in DAMAGES]
    for write, said in [*damaged, (lambda latents: b"{", "cannot be read")]:
        id_ = upload(http, name="Broken").json()["id"]
        file = directory / f"{id_}.safetensors"
        file.write_bytes(write(load_file(file)["reference"]))
        answer = speak(http, "Broken")
        error = answer.json()["error"]
        assert answer.status_code == 400 and said in error["message"], answer.text
        assert "upload" in error["message"] and error["param"] == "voice"
        assert http.delete(f"/v1/audio/voices/{id_}").status_code == 200


def test_keys_that_are_separate_have_their_own_voices(tmp_path: Path) -> None:
    """And no cached prompts."""
    shared = VoiceStore(tmp_path, 9).add(name="Old", **ENCODED, latents=patches(1))
    with endless(tmp_path, api_key=("a", "b"), separate_keys=True) as (server, talker):
        a, b = (
            httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=2 * GENEROUS)
            for key in "ab"
        )

        def names(client: httpx.Client) -> set[str]:
            found = client.get("/v1/audio/voices").json()["voices"]
            return {voice["name"] for voice in found if voice["type"] == "uploaded"}

        salts = set()
        for client in (a, b, a):
            said = {"model": "tiny", "messages": [{"role": "user", "content": "!endless"}], "stream": True}
            with client.stream("POST", "/v1/chat/completions", json=said):
                salts |= {chat.request.prompt.cache_salt for chat in talker.chats.values()}
            wait(lambda: not talker.chats, what="the answer is given up")
        assert len(salts) == 2
        mine = upload(a, name="Ann").json()["id"]
        assert names(a) == {"Old", "Ann"} and names(b) == {"Old"}
        for name in ("Ann", mine):
            assert b.get(f"/v1/audio/voices/{name}").status_code == 404
            assert b.delete(f"/v1/audio/voices/{name}").status_code == 404
            assert speak(b, name).status_code == 404 and speak(a, name).status_code == 200
        other = upload(b, name="ann").json()["id"]
        assert upload(b, name="Ann").status_code == 409 and upload(a, name="old").status_code == 409
        assert b.delete("/v1/audio/voices/Ann").json()["id"] == other
        assert b.delete("/v1/audio/voices/Old").json()["id"] == shared.id, "what nobody owns is everyone's"
        assert names(a) == {"Ann"} and names(b) == set()
    assert {voice.name for voice in VoiceStore(tmp_path, 9).voices()} == {"Ann"}, "without separation all are seen"


@contextmanager
def endless(directory: Path, **flags: Any) -> Iterator[tuple[RunningServer, FakeEngine]]:
    """A server that speaks some descriptions of voices for ever."""
    talker = FakeEngine()
    flags |= {"voices_dir": directory, "fixed_voices": "off"}
    with running_server(talking_catalog(), engine=talker.serve, **flags) as server:
        yield server, talker
        wait(lambda: talker.idle, what="the engine has nothing to do")


def test_an_upload_ends_with_its_client_and_with_its_time(tmp_path: Path) -> None:
    """Or uploads would go on to be decoded, one after another, when nobody waits for them any more."""
    form = {"name": (None, "Anna"), "speaker_description": (None, f"A voice {ENDLESS}")}
    with endless(tmp_path) as (server, _):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/audio/voices", files=form, timeout=httpx.Timeout(GENEROUS, read=0.5))
        server.wait_idle()
        assert not server.context.voices.voices()
    with endless(tmp_path, request_timeout=0.3) as (server, _):
        answer = httpx.post(f"{server.url}/v1/audio/voices", files=form, timeout=GENEROUS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")


def test_names_and_their_keys() -> None:
    """Rows: keys of names in disguise; names; and what is none, since marks would make another name of one."""
    keys, names, none = rows(__file__, "names.jsonl")
    for name, key in keys.items():
        assert name_key(name) == key == name_key(key)
    assert all(name_key(name) == name for name in (DEFAULT_VOICE, *OPENAI_VOICES))
    assert [name for name in names if not is_name(unicodedata.normalize("NFC", name))] == []
    assert [name for name in (*none, "ह" + "\u0941" * 64) if is_name(name)] == []


def test_built_in_voices_are_found_first_and_keep_their_names(tmp_path: Path) -> None:
    """Also before a voice that was kept when "ſage" was a name like any other."""
    catalog, talker = talking_catalog(), FakeEngine()
    latents = {"reference": np.ones((3, 4, 2), np.float32)}
    for name in ("ſage", "Anna"):
        VoiceStore(tmp_path, 9).add(
            name=name, encoder=encoder_of(catalog.models[1]), consent="true", seconds=1.0, latents=latents
        )
    flags: dict[str, Any] = {"voices_dir": tmp_path, "fixed_voices": "off"}
    with running_server(catalog, engine=talker.serve, **flags) as server:
        for voice, cloned in (("sage", False), ("SAGE", False), ("ſage", False), ("anna", True)):
            body = {"input": "Hello.", "voice": voice, "response_format": "pcm"}
            assert httpx.post(f"{server.url}/v1/audio/speech", json=body).status_code == 200
            assert (talker.requests[-1].reference is not None) == cloned, voice


def test_named_references_are_kept_once_and_replaced_when_damaged(tmp_path: Path) -> None:
    """What a killed server has left unfinished is deleted."""

    def reference(value: float) -> np.ndarray:
        return np.full((3, 4, 2), value, np.float32)

    folder = tmp_path / FOLDER
    folder.mkdir()
    kept, under_way = folder / "key.safetensors", unfinished(folder)
    for value in (1, 2):
        save_named(tmp_path, "key", reference(value))
        np.testing.assert_array_equal(load_named(tmp_path, "key"), reference(1))
    assert sorted(folder.iterdir()) == sorted([under_way, kept])
    kept.write_bytes(b"damaged")
    assert load_named(tmp_path, "key") is None
    save_named(tmp_path, "key", reference(2))
    np.testing.assert_array_equal(load_named(tmp_path, "key"), reference(2))
    save_named(under_way, "key", reference(1))  # a folder that is none
    assert load_named(under_way, "key") is None


async def test_kept_are_those_of_one_model_and_one_side_of_padding() -> None:
    asked: list[EncodeReference] = []

    async def submit(request: EncodeReference) -> AsyncGenerator[ReferenceEncoded]:
        """Patches hold the number of their request."""
        asked.append(request)
        yield ReferenceEncoded(request.request_id, np.full((1, 1, 1), len(asked), np.float32))

    context: Any = SimpleNamespace(engine=SimpleNamespace(submit=submit), references=LruCache(CACHED_REFERENCES))
    wave = np.zeros(8, np.float32)
    cases = [(model, pad) for model in "ab" for pad in ("right", "left")]
    for _ in range(2):
        for number, (name, pad) in enumerate(cases, 1):
            model: Any = SimpleNamespace(name=name)
            assert (await encode(context, model, wave, pad)).item() == number
    assert [(request.model, request.pad) for request in asked] == cases
