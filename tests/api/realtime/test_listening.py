"""Audio that clients send: the buffer, transcripts, sessions that only transcribe, answers to what was said."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterator
from typing import Any

import av
import numpy as np
import pytest
from openai import AsyncOpenAI
from websockets.asyncio.client import ClientConnection, connect

from service.api.engines.engine_client import EngineClient
from service.api.realtime import listening
from service.media.audio_formats import G711_RATE
from tests.api.realtime.conftest import Event, kinds, refused, said, tell, up_to
from tests.media.samples import tone
from tests.support.fake_hearing import hearing_catalog
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import GENEROUS

SECOND = (tone(440, 24_000) * 32_767).astype("<i2")
HEARD = "conversation.item.input_audio_transcription"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(hearing_catalog()) as running:
        yield running
        running.wait_idle()


def dial(server: RunningServer, query: str) -> connect:
    url = server.url.replace("http", "ws") + f"/v1/realtime?{query}"
    return connect(url, max_size=None, open_timeout=GENEROUS)


@pytest.fixture
async def scribe(server: RunningServer) -> AsyncIterator[ClientConnection]:
    """A session that only transcribes."""
    async with dial(server, "intent=transcription") as socket:
        created = await said(socket)
        assert (created["session"]["type"], created["session"]["model"]) == ("transcription", "ears")
        yield socket


async def configure(socket: ClientConnection, kind: str = "transcription", **heard: Any) -> Event:
    await tell(socket, "session.update", session={"type": kind, "audio": {"input": heard}})
    return (await up_to(socket, "session.updated"))[-1]


async def speak(socket: ClientConnection, data: bytes, *, pieces: int = 10) -> list[Event]:
    """The events that answer audio which comes in pieces."""
    size = -(-len(data) // pieces)
    for start in range(0, len(data), size):
        await tell(socket, "input_audio_buffer.append", audio=base64.b64encode(data[start : start + size]).decode())
    await tell(socket, "input_audio_buffer.commit")
    return await up_to(socket, f"{HEARD}.completed")


async def test_a_session_of_transcripts(scribe: ClientConnection) -> None:
    options = {"model": "gpt-4o-transcribe", "language": "de", "prompt": "Anna", "delay": "low"}
    updated = await configure(scribe, transcription=options, turn_detection=None)
    assert updated["session"]["audio"]["input"]["transcription"] == options and "unsupported" not in updated
    first, second = [await speak(scribe, SECOND.tobytes()) for _ in range(2)]
    assert kinds(first) == [
        *("input_audio_buffer.committed", "conversation.item.added", "conversation.item.done"),
        *(f"{HEARD}.delta", f"{HEARD}.completed"),
    ]
    done = first[-1]
    assert done["transcript"] == "Anna: 1.00 s." == "".join(event.get("delta", "") for event in first)
    assert (done["content_index"], done["languages"], done["usage"]["type"]) == (0, [{"code": "de"}], "tokens")
    assert {event["item"]["id"] for event in first if "item" in event} == {done["item_id"]} == {first[0]["item_id"]}
    assert first[1]["item"]["content"] == [{"type": "input_audio"}]
    assert (first[0]["previous_item_id"], second[0]["previous_item_id"]) == (None, done["item_id"])
    assert (await refused(scribe, "response.create"))["code"] == "unsupported_event"


async def test_null_ends_the_telling_of_transcripts(server: RunningServer, scribe: ClientConnection) -> None:
    """But not in a session that has nothing else."""
    async with dial(server, "model=tiny") as talk:
        for socket, kind, told in ((talk, "realtime", False), (scribe, "transcription", True)):
            await configure(socket, kind, transcription={"language": "de"})
            kept = await configure(socket, kind, turn_detection=None)
            assert kept["session"]["audio"]["input"]["transcription"] == {"language": "de"}
            ended = await configure(socket, kind, transcription=None)
            assert ended["session"]["audio"]["input"]["transcription"] is None
            await tell(socket, "input_audio_buffer.append", audio=base64.b64encode(SECOND.tobytes()).decode())
            await tell(socket, "input_audio_buffer.commit")
            if told:
                events = await up_to(socket, f"{HEARD}.completed")
                assert events[-1]["languages"] != [{"code": "de"}], "the hint is gone, too"
            else:
                await tell(socket, "response.create", response={"output_modalities": ["text"]})
                assert f"{HEARD}.completed" not in kinds(await up_to(socket, "response.done"))


async def test_live_pieces_are_told_from_turns(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What may be a turn is none, nor is what is said in a conversation."""
    told, submit = list[bool](), EngineClient.submit
    monkeypatch.setattr(EngineClient, "submit", lambda *of: (told.append(of[1].live), submit(*of))[1])
    async with dial(server, "intent=transcription") as live, dial(server, "model=tiny") as talk:
        await configure(talk, "realtime", transcription={})
        for socket, seconds in ((live, 1), (live, 3), (talk, 1)):
            heard = await speak(socket, np.tile(SECOND, seconds).tobytes())
            assert heard[-1]["transcript"] == f"{seconds:.2f} s."
    assert told == [True, False, False]


@pytest.mark.parametrize("law", ["ulaw", "alaw"])
async def test_telephones(scribe: ClientConnection, law: str) -> None:
    """Bytes are heard at the levels that FFmpeg gives them."""
    context = av.codec.CodecContext.create({"ulaw": "pcm_mulaw", "alaw": "pcm_alaw"}[law], "r")
    context.sample_rate, context.layout = G711_RATE, "mono"
    levels = np.concatenate([frame.to_ndarray()[0] for frame in context.decode(av.Packet(bytes(range(256))))])
    assert (listening.g711_levels(law) == levels).all()
    format = {"type": {"ulaw": "audio/pcmu", "alaw": "audio/pcma"}[law]}
    updated = await configure(scribe, format=format)
    assert updated["session"]["audio"]["input"]["format"] == {**format, "rate": 8000}
    call = np.abs(levels[:, None] - tone(440, 8_000) * 32_767).argmin(0).astype(np.uint8).tobytes()
    assert (await speak(scribe, call))[-1]["transcript"] == "1.00 s."


async def test_the_buffer(scribe: ClientConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await refused(scribe, "input_audio_buffer.commit"))["code"] == "input_audio_buffer_commit_empty"
    assert (await refused(scribe, "input_audio_buffer.append", audio="%"))["param"] == "audio"
    audio = base64.b64encode(SECOND.tobytes()).decode()
    await tell(scribe, "input_audio_buffer.append", audio=audio)
    await tell(scribe, "input_audio_buffer.clear")
    assert kinds(await up_to(scribe, "input_audio_buffer.cleared")) == ["input_audio_buffer.cleared"]
    assert (await refused(scribe, "input_audio_buffer.commit"))["code"] == "input_audio_buffer_commit_empty"
    monkeypatch.setattr(listening, "MAX_SECONDS", 1)
    await tell(scribe, "input_audio_buffer.append", audio=audio)
    assert (await refused(scribe, "input_audio_buffer.append", audio=audio))["code"] == "input_audio_buffer_full"
    await tell(scribe, "input_audio_buffer.clear")
    await up_to(scribe, "input_audio_buffer.cleared")
    await tell(scribe, "input_audio_buffer.append", audio=base64.b64encode(bytes(20)).decode())
    await tell(scribe, "input_audio_buffer.commit")
    failed = (await up_to(scribe, f"{HEARD}.failed"))[-1]
    assert "too short" in failed["error"]["message"] and failed["error"]["type"] == "invalid_request_error"
    await tell(scribe, "input_audio_buffer.append", audio=base64.b64encode(bytes(1)).decode())
    half = await refused(scribe, "input_audio_buffer.commit")
    assert half["code"] == "input_audio_buffer_commit_empty", "half a sample"
    await tell(scribe, "input_audio_buffer.clear")
    assert (await speak(scribe, SECOND.tobytes()))[-1]["transcript"] == "1.00 s."


async def test_audio_counts_until_it_is_written_down(
    server: RunningServer, scribe: ClientConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending, pieces_of = list[int](), listening.pieces_of

    async def spied(*given: Any) -> Any:
        pending.append(server.context.admission.pending_bytes)
        return await pieces_of(*given)

    monkeypatch.setattr(listening, "pieces_of", spied)
    await speak(scribe, SECOND.tobytes())
    assert pending[0] >= SECOND.nbytes


@pytest.mark.parametrize(
    ("heard", "param"),
    [
        ({"transcription": {"language": "tlh"}}, "session.audio.input.transcription.language"),
        ({"transcription": {"prompt": 1}}, "session.audio.input.transcription.prompt"),
        ({"format": {"type": "audio/pcm", "rate": 8000}}, "session.audio.input.format.rate"),
        ({"format": {"type": "audio/opus"}}, "session.audio.input.format.type"),
    ],
)
async def test_what_does_not_fit_is_named(scribe: ClientConnection, heard: dict[str, Any], param: str) -> None:
    session = {"type": "transcription", "audio": {"input": heard}}
    assert (await refused(scribe, "session.update", session=session))["param"] == param


@pytest.mark.parametrize("told", [False, True])
async def test_a_conversation_answers_what_was_said(server: RunningServer, told: bool) -> None:
    async with dial(server, "model=tiny") as socket:
        assert (await said(socket))["session"]["type"] == "realtime"
        if told:
            await configure(socket, "realtime", transcription={"model": "whisper-1"})
        audio = base64.b64encode(SECOND.tobytes()).decode()
        await tell(socket, "input_audio_buffer.append", audio=audio)
        await tell(socket, "input_audio_buffer.commit")
        await tell(socket, "response.create", response={"output_modalities": ["text"]})
        events = await up_to(socket, "response.done")
        assert (f"{HEARD}.completed" in kinds(events)) == told
        (part,) = events[-1]["response"]["output"][0]["content"]
        assert part["text"] == "1.00 s."  # the fake model repeats what the user has said
        item = next(event["item_id"] for event in events if event["type"] == "input_audio_buffer.committed")
        await tell(socket, "conversation.item.retrieve", item_id=item)
        (retrieved,) = await up_to(socket, "conversation.item.retrieved")
        assert retrieved["item"]["content"] == [{"type": "input_audio", "transcript": "1.00 s."}]
        session = {"type": "transcription"}
        assert (await refused(socket, "session.update", session=session))["param"] == "session.type"


async def test_the_client_of_openai(server: RunningServer) -> None:
    async with (
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
        client.realtime.connect(model="ears", extra_query={"intent": "transcription"}) as connection,
    ):
        heard: Any = {"transcription": {"model": "ears"}, "format": {"type": "audio/pcm", "rate": 24_000}}
        await connection.session.update(session={"type": "transcription", "audio": {"input": heard}})
        await connection.input_audio_buffer.append(audio=base64.b64encode(SECOND.tobytes()).decode())
        await connection.input_audio_buffer.commit()
        async for event in connection:
            assert event.type != "error", event
            if event.type == f"{HEARD}.completed":
                assert event.transcript == "1.00 s."
                break
