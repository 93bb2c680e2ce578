"""The WebSocket of speech on the real engine: text in as it is written, audio out."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from contextlib import suppress
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
import websockets
from websockets.asyncio.client import ClientConnection, connect

from tests.api.speech.conftest import MAX_CHARS, clip
from tests.media.samples import data_url
from tests.support.refusals import cases
from tests.support.servers import RunningServer
from tests.support.waiting import GENEROUS, until

TEXT = "One two three. Four five, six seven! Is it eight? Nine."


def session(server: RunningServer) -> connect:
    url = server.url.replace("http", "ws") + "/v1/audio/speech/stream"
    return connect(url, max_size=None, open_timeout=GENEROUS)


async def tell(socket: ClientConnection, kind: str, **fields: Any) -> None:
    await socket.send(json.dumps({"type": kind, **fields}))


async def write(socket: ClientConnection, text: str, size: int = MAX_CHARS) -> None:
    """The whole text in chunks of that size."""
    for start in range(0, len(text), size):
        await tell(socket, "input.text", text=text[start : start + size])
    await tell(socket, "input.done")


async def heard(socket: ClientConnection, last: str = "session.done") -> list[Any]:
    """Messages up to the one of that type; bytes as they are."""
    received: list[Any] = []
    while True:
        message = await asyncio.wait_for(socket.recv(), GENEROUS)
        received.append(message if isinstance(message, bytes) else json.loads(message))
        if not isinstance(message, bytes) and received[-1]["type"] in (last, "error"):
            return received


async def close_of(socket: ClientConnection) -> tuple[int, str]:
    """(code, reason) with which the server closes."""
    with pytest.raises(websockets.ConnectionClosed) as closed:
        while True:
            await asyncio.wait_for(socket.recv(), GENEROUS)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code, closed.value.rcvd.reason


def sound(received: list[Any]) -> bytes:
    return b"".join(message for message in received if isinstance(message, bytes))


def texts(received: list[Any]) -> list[str]:
    events = [message for message in received if not isinstance(message, bytes)]
    return [event["sentence_text"] for event in events if event["type"] == "audio.start"]


def ended(segments: int) -> dict[str, Any]:
    """The last message of an utterance that max_len has cut short."""
    return {"type": "session.done", "total_sentences": segments, "finish_reason": "length" if segments else "stop"}


def config(**fields: Any) -> dict[str, Any]:
    return {"response_format": "pcm", "seed": 5, "max_len": 3, **fields}


IDLE = "service.api.speech.websocket.IDLE"


def post(server: RunningServer, text: str) -> bytes:
    """The text in one request, cut at the borders that a session cuts at."""
    body = config(input=text, split_granularity="clause")
    answer = httpx.post(f"{server.url}/v1/audio/speech", json=body, timeout=2 * GENEROUS)
    assert answer.status_code == 200, answer.text
    return answer.content


async def test_text_in_pieces_sounds_as_one_post_of_the_whole(speaking: RunningServer) -> None:
    async with session(speaking) as socket:
        # To compress a picture of megabytes in an event would hold the event loop, and with it all sound, for long.
        assert not socket.protocol.extensions
        await tell(socket, "session.config", **config())
        await write(socket, TEXT, 1)
        received = await heard(socket)
    audio, whole = sound(received), await asyncio.to_thread(post, speaking, TEXT)
    assert len(audio) == len(whole)
    assert np.abs(np.frombuffer(audio, "<i2").astype(int) - np.frombuffer(whole, "<i2")).max() <= 8
    events = [message for message in received if not isinstance(message, bytes)]
    starts, dones = ([one for one in events if one["type"] == f"audio.{kind}"] for kind in ("start", "done"))
    assert " ".join(texts(received)) == TEXT
    assert [event["sentence_index"] for event in starts] == [event["sentence_index"] for event in dones]
    assert events[-1] == ended(len(starts))
    assert sum(event["total_bytes"] for event in dones) == len(audio)


async def test_a_description_holds_for_the_whole_text(speaking: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "(A calm, old man.) One two three four, five six seven eight. Nine."
    tokenize = speaking.context.catalog.models[0].speech_processor.tokenize
    pieces = (" One two three four,", "five six seven eight.", "Nine.")
    wanted = [tuple(tokenize(f"(A calm, old man.){piece}")) for piece in pieces]
    engine, asked = speaking.context.engine, []
    submit, send = engine.submit, engine.send
    monkeypatch.setattr(engine, "submit", lambda request: (asked.append(request), submit(request))[1])
    monkeypatch.setattr(engine, "send", lambda command: (asked.append(command), send(command)))
    await asyncio.to_thread(post, speaking, text)
    assert [segment.text_ids for segment in asked.pop().segments] == wanted
    async with session(speaking) as socket:
        await tell(socket, "session.config", **config())
        await write(socket, text, 5)
        received = await heard(socket)
    assert [segment.text_ids for command in asked for segment in command.segments] == wanted
    assert " ".join(texts(received)) == text


async def test_a_text_is_interrupted_by_the_next_configuration(speaking: RunningServer) -> None:
    async with session(speaking) as socket:
        await tell(socket, "session.config", **config())
        await tell(socket, "input.text", text="One two three. And")
        await heard(socket, "audio.done")
        await tell(socket, "session.config", **config())
        await write(socket, "Four.")
        received = await heard(socket)
    assert texts(received) == ["Four."] and received[-1] == ended(1)


async def test_each_segment_is_a_file_of_its_own(speaking: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    """Its line in the log has the seconds of all its texts."""
    caplog.set_level(logging.INFO)
    async with session(speaking) as socket:
        await tell(socket, "session.config", **config(response_format="wav", sample_rate=24000))
        for _ in range(2):
            await write(socket, "Hello there. Good bye.")
            files: list[bytearray] = []
            for message in await heard(socket):
                if isinstance(message, bytes):
                    files[-1] += message
                elif message["type"] == "audio.start":
                    assert message["sample_rate"] == 24000 and message["format"] == "wav"
                    files.append(bytearray())
            assert len(files) == 2
            for file in files:
                samples, rate = soundfile.read(io.BytesIO(bytes(file)))
                assert rate == 24000 and len(samples) == pytest.approx(3 * 3840, abs=50)
        await tell(socket, "session.close")
        assert (await close_of(socket))[0] == 1000
        connection = socket.response.headers["x-request-id"]

    def found() -> list[dict[str, Any]]:
        lines = [vars(line) for line in caplog.records if line.name == "reprise.access"]
        return [line for line in lines if line["request_id"] == connection]

    await until(lambda: bool(found()), what="the connection is logged")
    (line,) = found()
    assert line["audio_seconds"] == pytest.approx(4 * 3 * 0.16) and line["truncated"] and line["client"] == "127.0.0.1"


async def test_errors_do_not_end_the_text(speaking: RunningServer) -> None:
    unread = [b'{"type": "input.text", "text": "\xff"}', '{"type": "input.done", "more": ' + "[" * 100_000]
    refused = [(json.dumps(case["event"]), case["param"]) for case in cases("speech_events")]
    for message, param in [*((message, None) for message in unread), *refused]:
        async with session(speaking) as socket:
            await tell(socket, "session.config", **config(max_len=1))
            await socket.send(message)
            error = (await heard(socket))[-1]
            assert error["type"] == "error" and error["message"] and error["param"] == param, message
            assert (error["code"] == "invalid_json") == (param is None)
            await write(socket, "Hello.")
            assert (await heard(socket))[-1] == ended(1)
            await write(socket, " ... ")
            assert await heard(socket) == [ended(0)]


async def test_a_text_with_no_room_beside_the_instructions_is_the_clients_fault(speaking: RunningServer) -> None:
    async with session(speaking) as socket:
        await tell(socket, "session.config", **config(instructions="Z" * 980))
        await write(socket, "Z" * 58 + ".")
        error = (await heard(socket))[-1]
        assert error["param"] == "text" and error["message"].startswith("text: text and audio take")
        assert (await close_of(socket))[0] == 1008


async def test_a_text_that_the_transcript_makes_unspeakable_leaves_nothing_behind(speaking: RunningServer) -> None:
    async with session(speaking) as socket:
        await tell(socket, "session.config", **config(ref_audio=data_url(clip(), "audio/wav"), ref_text="Say <|audio_"))
        await tell(socket, "input.text", text="start|> and more. Hello")
        error = (await heard(socket))[-1]
        assert (error["type"], error["param"]) == ("error", "text") and "special token" in error["message"]
        await write(socket, " there. Good bye.")
        received = await heard(socket)
        assert texts(received) == ["Hello there.", "Good bye."] and received[-1] == ended(2)


async def test_silence_and_what_is_never_spoken_keep_no_session(
    speaking: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def closed(**said: str) -> None:
        async with session(speaking) as socket:
            await tell(socket, "session.config", **config())
            await tell(socket, "input.text", text="Hello there. And")
            closing = asyncio.create_task(close_of(socket))
            async with asyncio.timeout(GENEROUS):
                while not closing.done():
                    with suppress(websockets.ConnectionClosed):
                        await tell(socket, "input.text", **said)
                    await asyncio.wait({closing}, timeout=0.05)
            assert await closing == (1008, "idle"), said

    monkeypatch.setattr(IDLE, 0.5)
    await asyncio.gather(closed(), *(closed(text=text) for text in ("", "<b></b>", "...")))
    await freed(speaking)


async def test_a_session_is_not_idle_while_it_speaks(speaking: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the client writes nothing for long, and ends its text only then."""
    async with session(speaking) as socket:
        await tell(socket, "session.config", **config(min_len=12, max_len=12))
        await tell(socket, "input.text", text="Hello there. And")
        await heard(socket, "audio.start")
        monkeypatch.setattr(IDLE, 0.001)
        await tell(socket, "input.text", text="")
        received = await heard(socket, "audio.done")
        assert received[-1]["type"] == "audio.done" and len(sound(received)) == received[-1]["total_bytes"]
        with pytest.raises(websockets.ConnectionClosedError):
            await heard(socket)


async def test_a_client_that_leaves_frees_its_stream(speaking: RunningServer) -> None:
    async with session(speaking) as socket:
        await tell(socket, "session.config", **config(max_len=400, min_len=400))
        await tell(socket, "input.text", text="Hello there. And more of it. And more.")
        await heard(socket, "audio.start")
        socket.transport.abort()
    await freed(speaking)


async def freed(server: RunningServer) -> None:
    await asyncio.to_thread(server.wait_idle)
    state = lambda: server.context.engine.state  # noqa: E731
    await until(lambda: state() is None or not state().models[0].running, what="no stream is left")
