"""The WebSocket: text in as it is written, speech out."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
import websockets
from websockets.asyncio.client import ClientConnection, connect

from service.api.speech.live_text import LiveText
from service.hub import EMBEDDED
from service.hub.catalog import load_catalog
from service.link.config import Channel, EngineConfig
from service.link.engine_link import InlineLink
from service.settings.settings import load_settings
from tests.api.speech.test_speech import clip, data_url
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import GENEROUS, until

TEXT = "One two three. Four five, six seven! Is it eight? Nine."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    flags: dict[str, Any] = {
        "model": (str(EMBEDDED / "voxcpm2"),),
        "voices_dir": tmp_path_factory.mktemp("voices"),
        "max_running": 4,
        "decode_buckets": (1, 4),
        "max_speech_chars": 500,
        "fixed_voices": False,
    }
    with running_server(load_catalog(load_settings(flags)), InlineLink, **flags) as running:
        yield running


def session(server: RunningServer) -> connect:
    url = server.url.replace("http", "ws") + "/v1/audio/speech/stream"
    return connect(url, max_size=None, open_timeout=GENEROUS)


async def tell(socket: ClientConnection, kind: str, **fields: Any) -> None:
    await socket.send(json.dumps({"type": kind, **fields}))


async def heard(socket: ClientConnection, last: str = "session.done") -> list[Any]:
    """Messages up to the one of that type; bytes as they are."""
    received: list[Any] = []
    while True:
        message = await asyncio.wait_for(socket.recv(), GENEROUS)
        received.append(message if isinstance(message, bytes) else json.loads(message))
        if not isinstance(message, bytes) and received[-1]["type"] in (last, "error"):
            return received


def ended(segments: int) -> dict[str, Any]:
    """The last message of an utterance that max_len has cut short."""
    return {"type": "session.done", "total_sentences": segments, "finish_reason": "length" if segments else "stop"}


def config(**fields: Any) -> dict[str, Any]:
    return {"response_format": "pcm", "seed": 5, "max_len": 3, **fields}


@pytest.fixture(scope="module")
def whole(server: RunningServer) -> bytes:
    return post(server, TEXT)


def post(server: RunningServer, text: str) -> bytes:
    """The text in one request, cut at the borders that a session cuts at."""
    body = config(input=text, split_granularity="clause")
    answer = httpx.post(f"{server.url}/v1/audio/speech", json=body, timeout=2 * GENEROUS)
    assert answer.status_code == 200, answer.text
    return answer.content


@pytest.mark.parametrize("piece", [1, 7, 1000])
async def test_text_in_pieces_sounds_as_one_post_of_the_whole(server: RunningServer, whole: bytes, piece: int) -> None:
    async with session(server) as socket:
        await tell(socket, "session.config", **config())
        for start in range(0, len(TEXT), piece):
            await tell(socket, "input.text", text=TEXT[start : start + piece])
        await tell(socket, "input.done")
        received = await heard(socket)
    audio = b"".join(message for message in received if isinstance(message, bytes))
    assert len(audio) == len(whole)
    difference = np.frombuffer(audio, "<i2").astype(int) - np.frombuffer(whole, "<i2")
    assert np.abs(difference).max() <= 8
    events = [message for message in received if not isinstance(message, bytes)]
    starts = [event for event in events if event["type"] == "audio.start"]
    dones = [event for event in events if event["type"] == "audio.done"]
    assert " ".join(event["sentence_text"] for event in starts) == TEXT
    assert [event["sentence_index"] for event in starts] == [event["sentence_index"] for event in dones]
    assert events[-1] == ended(len(starts))
    assert sum(event["total_bytes"] for event in dones) == len(audio)


async def test_markup_in_pieces_is_taken_out_as_from_the_whole(server: RunningServer) -> None:
    text = "Look:\n- **one** thing, [this one, here](http://x.y/z)\n- two\n"
    text += "```py\nf(1, 2)\ng(3)\n```\n# So\nThat `is, it`. Yes."
    async with session(server) as socket:
        await tell(socket, "session.config", **config(max_len=1))
        for start in range(0, len(text), 3):
            await tell(socket, "input.text", text=text[start : start + 3])
        await tell(socket, "input.done")
        received = await heard(socket)
    audio = b"".join(message for message in received if isinstance(message, bytes))
    spoken = [message["sentence_text"] for message in received if type(message) is dict and "sentence_text" in message]
    assert " ".join(spoken) == "Look: one thing, this one, here two So That is, it. Yes."
    assert len(audio) == len(spoken) * 2 * 7680 and len(spoken) > 2


async def test_a_description_in_front_holds_for_the_whole_text(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "(A calm, old man.) One two three four, five six seven eight. Nine."
    processor = server.context.catalog.models[0].speech_processor
    wanted = [
        tuple(processor.tokenize(f"(A calm, old man.){piece}"))
        for piece in (" One two three four,", "five six seven eight.", "Nine.")
    ]
    engine, asked = server.context.engine, []
    submit, send = engine.submit, engine.send
    monkeypatch.setattr(engine, "submit", lambda request: (asked.append(request), submit(request))[1])
    monkeypatch.setattr(engine, "send", lambda command: (asked.append(command), send(command)))
    post(server, text)
    assert [segment.text_ids for segment in asked.pop().segments] == wanted
    async with session(server) as socket:
        await tell(socket, "session.config", **config())
        for start in range(0, len(text), 5):
            await tell(socket, "input.text", text=text[start : start + 5])
        await tell(socket, "input.done")
        received = await heard(socket)
    assert [segment.text_ids for command in asked for segment in command.segments] == wanted
    starts = [message["sentence_text"] for message in received if type(message) is dict and "sentence_text" in message]
    assert " ".join(starts) == text


async def test_a_clause_is_spoken_before_the_text_ends(server: RunningServer) -> None:
    async with session(server) as socket:
        await tell(socket, "session.config", **config())
        await tell(socket, "input.text", text="One two three. And")
        received = await heard(socket, "audio.done")
        assert received[0]["sentence_text"] == "One two three."
        assert any(isinstance(message, bytes) for message in received)
        await tell(socket, "input.text", text=" so on.")
        await tell(socket, "input.done")
        assert (await heard(socket))[0]["sentence_text"] == "And so on."


async def test_a_text_is_interrupted_by_the_next_configuration(server: RunningServer) -> None:
    async with session(server) as socket:
        await tell(socket, "session.config", **config())
        await tell(socket, "input.text", text="One two three. And")
        await heard(socket, "audio.done")
        await tell(socket, "session.config", **config())
        await tell(socket, "input.text", text="Four.")
        await tell(socket, "input.done")
        received = [message for message in await heard(socket) if type(message) is dict]
    assert [message.get("sentence_text") for message in received if message["type"] == "audio.start"] == ["Four."]
    assert [message for message in received if message["type"] == "session.done"] == [ended(1)]


async def test_each_segment_is_a_file_and_the_connection_stays(server: RunningServer) -> None:
    async with session(server) as socket:
        await tell(socket, "session.config", **config(response_format="wav", sample_rate=24000))
        for _ in range(2):
            await tell(socket, "input.text", text="Hello there. Good bye.")
            await tell(socket, "input.done")
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
        with pytest.raises(websockets.ConnectionClosedOK):
            await asyncio.wait_for(socket.recv(), GENEROUS)


async def test_the_line_of_a_connection_has_the_seconds_of_all_its_texts(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with session(server) as socket:
            await tell(socket, "session.config", **config(max_len=2))
            for text in ("One. Two.", "Three."):
                await tell(socket, "input.text", text=text)
                await tell(socket, "input.done")
                await heard(socket)
            connection = socket.response.headers["x-request-id"]  # That of another test may be logged meanwhile.

        def found() -> list[dict[str, Any]]:
            lines = [vars(line) for line in caplog.records if line.name == "reprise.access"]
            return [line for line in lines if line["request_id"] == connection]

        await until(lambda: bool(found()), what="the connection is logged")
    assert found()[0]["audio_seconds"] == 0.96 and found()[0]["truncated"]


async def test_every_text_is_closed(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was spoken, one without text, and one that is interrupted."""
    begun, closed = list[LiveText](), set[LiveText]()
    begin, close = LiveText.__init__, LiveText.close

    def spy_on_begin(self: LiveText, *args: Any, **fields: Any) -> None:
        begun.append(self)
        begin(self, *args, **fields)

    async def spy_on_close(self: LiveText) -> None:
        closed.add(self)
        await close(self)

    monkeypatch.setattr(LiveText, "__init__", spy_on_begin)
    monkeypatch.setattr(LiveText, "close", spy_on_close)
    async with session(server) as socket:
        await tell(socket, "session.config", **config())
        for text, segments in ("Hello.", 1), ("", 0):
            await tell(socket, "input.text", text=text)
            await tell(socket, "input.done")
            assert (await heard(socket))[-1] == ended(segments)
        assert closed == set(begun) and len(begun) == 2
        await tell(socket, "input.text", text="Hello there. And")
        await tell(socket, "session.close")
        with pytest.raises(websockets.ConnectionClosedOK):
            await heard(socket)
    assert closed == set(begun) and len(begun) == 3


async def test_done_without_text(server: RunningServer) -> None:
    async with session(server) as socket:
        await tell(socket, "input.done")
        assert await heard(socket) == [ended(0)]
        await tell(socket, "input.text", text=" ... ")
        await tell(socket, "input.done")
        assert await heard(socket) == [ended(0)]


@pytest.mark.parametrize(
    "message, param",
    [
        ("no json", None),
        ("[]", None),
        ('{"type": "nonsense"}', "type"),
        ('{"type": "session.config", "speed": 9}', "speed"),
        ('{"type": "session.config", "response_format": "ogg"}', "response_format"),
        ('{"type": "session.config", "inference_timesteps": 5}', "inference_timesteps"),
        ('{"type": "session.config", "voice": "nobody"}', "voice"),
        ('{"type": "input.text"}', "text"),
        ('{"type": "input.text", "text": "' + "x" * 501 + '"}', "text"),
        ('{"type": "input.text", "text": "<|audio_start|> said. So"}', "text"),
        (json.dumps({"type": "session.config", "instructions": "x y " * 1000}), "instructions"),
    ],
)
async def test_what_does_not_fit_is_said_and_the_session_goes_on(
    server: RunningServer, message: str, param: str | None
) -> None:
    async with session(server) as socket:
        await tell(socket, "session.config", **config())
        await socket.send(message)
        error = (await heard(socket))[-1]
        assert error["type"] == "error" and error["message"] and error["param"] == param
        await tell(socket, "session.config", **config())
        await tell(socket, "input.text", text="Hello.")
        await tell(socket, "input.done")
        assert (await heard(socket))[-1] == ended(1)


async def test_an_utterance_goes_on_without_what_is_too_long(server: RunningServer) -> None:
    async with session(server) as socket:
        await tell(socket, "session.config", **config())
        await tell(socket, "input.text", text="x" * 501)
        assert "at most 500 allowed" in (await heard(socket))[-1]["message"]
        await tell(socket, "input.text", text="Hello.")
        await tell(socket, "input.done")
        assert (await heard(socket))[-1] == ended(1)


async def test_a_text_with_no_room_beside_the_instructions_is_the_clients_fault(server: RunningServer) -> None:
    async with session(server) as socket:
        await tell(socket, "session.config", **config(instructions="x y " * 220))
        await tell(socket, "input.text", text="Z" * 390 + ".")
        await tell(socket, "input.done")
        error = (await heard(socket))[-1]
        assert error["param"] == "text" and error["message"].startswith("text: text and audio take")
        with pytest.raises(websockets.ConnectionClosed) as closed:
            await socket.recv()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008


async def test_a_text_that_the_transcript_makes_unspeakable_leaves_nothing_behind(server: RunningServer) -> None:
    async with session(server) as socket:
        await tell(socket, "session.config", **config(ref_audio=data_url(clip()), ref_text="Say <|audio_"))
        await tell(socket, "input.text", text="start|> and more. Hello")
        error = (await heard(socket))[-1]
        assert (error["type"], error["param"]) == ("error", "text") and "special token" in error["message"]
        await tell(socket, "input.text", text=" there. Good bye.")
        await tell(socket, "input.done")
        received = await heard(socket)
        texts = [
            message["sentence_text"] for message in received if type(message) is dict and "sentence_text" in message
        ]
        assert texts == ["Hello there.", "Good bye."]
        assert received[-1] == ended(2)


async def test_silence_ends_the_session_and_frees_its_stream(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief = server.context.settings.model_copy(update={"speech_idle": 1.0})
    monkeypatch.setattr(server.context, "settings", brief)
    async with session(server) as socket:
        with pytest.raises(websockets.ConnectionClosedError) as closed:
            await tell(socket, "session.config", **config())
            await tell(socket, "input.text", text="Hello there. And")
            while True:
                await asyncio.wait_for(socket.recv(), GENEROUS)
        assert closed.value.rcvd is not None and (closed.value.rcvd.code, closed.value.rcvd.reason) == (1008, "idle")
    await freed(server)


@pytest.mark.parametrize("text", ["", " ", "<b></b>", "...", None], ids=["empty", "space", "markup", "dots", "invalid"])
async def test_what_is_never_spoken_keeps_no_session(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    brief = server.context.settings.model_copy(update={"speech_idle": 1.0})
    monkeypatch.setattr(server.context, "settings", brief)
    async with session(server) as socket:

        async def closed() -> websockets.Close | None:
            with pytest.raises(websockets.ConnectionClosedError) as closed:
                while True:
                    await socket.recv()
            return closed.value.rcvd

        await tell(socket, "session.config", **config())
        await tell(socket, "input.text", text="Hello there. And")
        listening = asyncio.create_task(closed())
        async with asyncio.timeout(GENEROUS):
            while not listening.done():
                with suppress(websockets.ConnectionClosed):
                    await tell(socket, "input.text", **({} if text is None else {"text": text}))
                await asyncio.wait({listening}, timeout=0.05)
        close = await listening
        assert close is not None and (close.code, close.reason) == (1008, "idle")
    await freed(server)


async def test_a_session_is_not_idle_while_it_speaks(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the client writes nothing for long, and ends its text only then."""
    async with session(server) as socket:
        await tell(socket, "session.config", **config(min_len=60, max_len=60))
        await tell(socket, "input.text", text="Hello there. And")
        await heard(socket, "audio.start")
        brief = server.context.settings.model_copy(update={"speech_idle": 0.001})
        monkeypatch.setattr(server.context, "settings", brief)
        await tell(socket, "input.text", text="")
        received = await heard(socket, "audio.done")
        assert received[-1]["type"] == "audio.done"
        assert sum(len(part) for part in received if isinstance(part, bytes)) == received[-1]["total_bytes"]
        with pytest.raises(websockets.ConnectionClosedError):
            await heard(socket)


async def test_an_idle_session_takes_no_slot_from_others(server: RunningServer) -> None:
    """As many as there are slots, and more of them: each goes on when it has text again."""
    async with AsyncExitStack() as stack:
        sockets = [await stack.enter_async_context(session(server)) for _ in range(6)]
        for socket in sockets:
            await tell(socket, "session.config", **config())
            await tell(socket, "input.text", text="Hello there. And")
            assert (await heard(socket, "audio.done"))[-1]["type"] == "audio.done"
        assert len(await asyncio.to_thread(post, server, "Yes.")) > 0
        for socket in sockets:
            await tell(socket, "input.text", text=" that is all.")
            await tell(socket, "input.done")
        for socket in sockets:
            assert (await heard(socket))[-1] == ended(2)
    await freed(server)


async def test_a_client_that_leaves_frees_its_stream(server: RunningServer) -> None:
    async with session(server) as socket:
        await tell(socket, "session.config", **config(max_len=400, min_len=400))
        await tell(socket, "input.text", text="Hello there. And more of it. And more.")
        await heard(socket, "audio.start")
        socket.transport.abort()
    await freed(server)


async def freed(server: RunningServer) -> None:
    engine = server.context.engine

    def nothing_left() -> bool:
        running = engine.state is None or engine.state.models[0].running
        return not (running or engine.in_flight or server.context.admission.in_flight)

    await until(nothing_left, what="no stream is left")


async def test_keys_are_asked_for(tmp_path: Path) -> None:
    def never_ready(config: EngineConfig, channel: Channel) -> None:
        channel.receive(None)

    flags = {"model": (str(EMBEDDED / "voxcpm2"),), "voices_dir": tmp_path, "api_key": ("secret",), "max_running": 1}
    catalog = load_catalog(load_settings(flags))
    with running_server(catalog, lambda config: InlineLink(config, never_ready), wait=False, **flags) as running:
        with pytest.raises(websockets.InvalidStatus):
            async with session(running):
                pass
        url = running.url.replace("http", "ws") + "/v1/audio/speech/stream"
        async with connect(url, additional_headers={"Authorization": "Bearer secret"}) as socket:
            first = json.loads(await asyncio.wait_for(socket.recv(), GENEROUS))
            assert first["type"] == "error" and first["code"] == "engine_unavailable"


@pytest.mark.parametrize(
    "raw", [b'{"type": "input.text", "text": "\xff"}', '{"type": "input.done", "more": ' + "[" * 100_000]
)
async def test_what_is_no_json_is_reported_and_the_session_goes_on(server: RunningServer, raw: str | bytes) -> None:
    async with session(server) as socket:
        await socket.send(raw)
        (error,) = await heard(socket)
        assert error["type"] == "error" and error["code"] == "invalid_json"
        await tell(socket, "input.done")
        assert (await heard(socket))[-1]["type"] == "session.done"


async def test_messages_are_not_compressed(server: RunningServer) -> None:
    """A picture of megabytes in an event would hold the event loop, and with it all sound, for half a second."""
    async with session(server) as socket:
        assert not socket.protocol.extensions
