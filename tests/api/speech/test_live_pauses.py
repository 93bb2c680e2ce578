"""Pauses, SSML, lexicons and captions of texts that are still being written, over the WebSocket and in answers."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
from websockets.asyncio.client import connect

from service.api.speech import live_text
from service.api.spoken_text.normaliser import TextNormaliser
from tests.support.fake_talker import PATCH, RATE, FakeTalker, talking_catalog
from tests.support.inline_link import InlineLink
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import GENEROUS, wait

TEXT = "[pause:250ms]In 1999. [pause:1.5s](It) cost **$5**.\n\nSee nginx!  [pause:0.1s]"
SPOKEN = ["In nineteen ninety-nine.", "(It) cost five dollars.", "See engine x!"]
PAUSES = [0.25, 1.5, 0.0]
BEHIND = 0.1
SEGMENT = PATCH / RATE


@pytest.fixture(scope="module")
def talker() -> FakeTalker:
    return FakeTalker()


@pytest.fixture(scope="module")
def server(talker: FakeTalker) -> Iterator[RunningServer]:
    flags: dict[str, Any] = {"fixed_voices": "off", "max_speech_chars": 400}
    with running_server(talking_catalog(), lambda config: InlineLink(config, talker.serve), **flags) as server:
        yield server


Received = list[Any]


async def utterance(server: RunningServer, *chunks: str, **config: Any) -> Received:
    """What a session answers to one text; bytes as they are."""
    received: Received = []
    async with connect(server.url.replace("http", "ws") + "/v1/audio/speech/stream", max_size=None) as socket:
        config = {"type": "session.config", "response_format": "pcm", "split_granularity": "sentence", **config}
        await socket.send(json.dumps(config))
        for chunk in chunks:
            await socket.send(json.dumps({"type": "input.text", "text": chunk}))
        await socket.send(json.dumps({"type": "input.done"}))
        while not received or isinstance(received[-1], bytes) or received[-1]["type"] != "session.done":
            message = await asyncio.wait_for(socket.recv(), GENEROUS)
            received.append(message if isinstance(message, bytes) else json.loads(message))
    return received


def files(received: Received) -> list[np.ndarray]:
    """The samples of each audio.start."""
    found: list[bytearray] = []
    for message in received:
        if isinstance(message, bytes):
            found[-1] += message
        elif message["type"] == "audio.start":
            found.append(bytearray())
    return [np.frombuffer(bytes(data), "<i2") for data in found]


def of_type(received: Received, kind: str) -> list[dict[str, Any]]:
    return [message for message in received if isinstance(message, dict) and message["type"] == kind]


async def test_a_pause_is_silence_in_front_of_the_next_segment(server: RunningServer) -> None:
    received = await utterance(server, *TEXT, lexicon={"nginx": "engine x"})
    starts = of_type(received, "audio.start")
    assert [start["sentence_text"] for start in starts] == [*SPOKEN, ""], "the silence behind the last has no text"
    audio = files(received)
    for samples, pause in zip(audio, PAUSES, strict=False):
        silent = round(pause * RATE)
        assert len(samples) == silent + PATCH
        assert not samples[:silent].any() and samples[silent:].all()
    assert len(audio[3]) == round(BEHIND * RATE) and not audio[3].any()
    assert [done["total_bytes"] for done in of_type(received, "audio.done")] == [2 * len(samples) for samples in audio]
    assert received[-1] == {"type": "session.done", "total_sentences": 4, "finish_reason": "stop"}
    assert not of_type(received, "audio.segment"), "captions are not asked for"


async def test_captions_say_when_each_segment_is_heard(server: RunningServer) -> None:
    asked: dict[str, Any] = {"timestamp_granularities": ["segment", "word"], "speed": 2.0}
    received = await utterance(server, *TEXT, lexicon={"nginx": "engine x"}, **asked)
    segments = of_type(received, "audio.segment")
    half = SEGMENT / 2
    starts = [0.25, 1.75 + half, 1.75 + 2 * half]
    assert [segment["start"] for segment in segments] == pytest.approx(starts, abs=1 / RATE)
    assert [segment["end"] for segment in segments] == pytest.approx([start + half for start in starts], abs=1 / RATE)
    assert [start["sentence_text"] for start in of_type(received, "audio.start")] == [*SPOKEN, ""]
    assert [segment["text"] for segment in segments] == SPOKEN
    words = [[word["word"] for word in segment["words"]] for segment in segments]
    assert words == [spoken.split() for spoken in SPOKEN]
    kinds = [message["type"] for message in received if isinstance(message, dict)]
    assert kinds[:3] == ["audio.start", "audio.done", "audio.segment"]


async def test_a_long_message_is_not_read_in_the_event_loop(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sixty thousand characters of a large one take seconds."""
    threads: dict[int, set[str]] = {}
    feed = TextNormaliser.feed

    def noted(self: TextNormaliser, text: str, *, final: bool = False) -> str:
        threads.setdefault(len(text), set()).add(threading.current_thread().name)
        return feed(self, text, final=final)

    monkeypatch.setattr(TextNormaliser, "feed", noted)
    monkeypatch.setattr(live_text, "SMALL_TEXT", 100)
    short, long = "It is 5 o'clock now.", "It is 6 o'clock now. " * 10
    await utterance(server, short, long)
    (loop,) = {name for length, names in threads.items() if length < 50 for name in names if length == len(short)}
    assert loop not in set().union(*(names for length, names in threads.items() if length > 100))


async def test_what_does_not_fit_is_named_and_the_rest_spoken(server: RunningServer) -> None:
    received = await utterance(server, "One.[pause:20s] Two. ", "Three.")
    assert "at most 10 s" in of_type(received, "error")[0]["message"]
    assert [start["sentence_text"] for start in of_type(received, "audio.start")] == ["One.", "Two.", "Three."]
    received = await utterance(server, "<speak>One.<break/>", "Two.<voice/> Three.</speak>")
    assert "<voice> is not supported" in of_type(received, "error")[0]["message"]
    assert of_type(received, "audio.start")[0]["sentence_text"] == "One."
    assert received[-1]["type"] == "session.done"


async def test_numbers_cannot_make_a_text_endlessly_long(server: RunningServer, talker: FakeTalker) -> None:
    number = "777777777777777. "
    received = await utterance(server, *[number] * 20)
    (error, *_) = of_type(received, "error")
    assert error["param"] == "text" and "more than 800 characters" in error["message"]
    spoken = sum(len(start["sentence_text"]) for start in of_type(received, "audio.start"))
    assert 0 < spoken <= 800 and received[-1]["type"] == "session.done"
    wait(lambda: talker.idle, what="the engine has nothing to do")


def chat(server: RunningServer, text: str, **fields: Any) -> dict[str, Any]:
    """The fake model answers with its prompt."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "modalities": ["text", "audio"],
        "audio": {"format": "wav", "voice": "default", **fields},
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=GENEROUS)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def test_an_answer_has_its_pauses_and_its_lexicon(server: RunningServer, talker: FakeTalker) -> None:
    text = "Hello nginx, dear. [pause:1.5s](so) Bye! [pause:500ms]"
    answer = chat(server, text, lexicon={"nginx": "engine x"})
    audio = answer["choices"][0]["message"]["audio"]
    assert "[pause:1.5s](so)" in audio["transcript"], "it is what the model wrote"
    spoken = talker.texts[talker.requests[-1].request_id]
    assert "pause" not in " ".join(spoken) and "engine x" in " ".join(spoken)
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(audio["data"])), dtype="int16")
    assert len(samples) == len(spoken) * PATCH + 2 * rate
    assert int((samples == 0).sum()) == 2 * rate
    details = answer["usage"]["completion_tokens_details"]
    assert details["audio_tokens"] == len(spoken), "silence is no token"
    assert "unspoken" not in audio
    assert chat(server, "Hello 世界, 世 5.")["choices"][0]["message"]["audio"]["unspoken"] == "世界"


def test_an_answer_whose_numbers_are_too_long_ends_where_the_limit_is(server: RunningServer) -> None:
    answer = chat(server, "777777777777777. " * 20)["choices"][0]
    assert answer["message"]["audio"]["finish_reason"] == "length"
    assert answer["finish_reason"] == "stop", "the text is complete"
