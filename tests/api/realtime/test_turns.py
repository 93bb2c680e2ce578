"""Audio that clients send: the buffer, transcripts, and turns that the server detects, which begin and end answers. The
fake recogniser says how long a turn is; the fake model repeats it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from typing import Any

import av
import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect

from service.api.engines.engine_client import EngineClient
from service.api.realtime import listening
from service.media.audio_formats import G711_RATE
from tests.api.realtime.conftest import Event, add, kinds, message, refused, said, tell, up_to
from tests.media.samples import tone
from tests.media.test_voice_activity import recording
from tests.support.fake_hearing import hearing_catalog
from tests.support.refusals import cases
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import GENEROUS, wait

BUFFER = "input_audio_buffer"
STARTED, STOPPED = f"{BUFFER}.speech_started", f"{BUFFER}.speech_stopped"
BEGIN, LENGTH = 0.22, 4.6
"""Seconds at which the recording's speech begins, and that it lasts."""


def silence(seconds: float) -> np.ndarray:
    return np.zeros(int(24_000 * seconds), np.float32)


SPEECH = recording("speech", 24_000)
TURN = np.concatenate([silence(0.5), SPEECH, silence(0.7)])


def pcm(samples: np.ndarray) -> bytes:
    return (samples * 32_767).astype("<i2").tobytes()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(hearing_catalog()) as running:
        yield running
        running.wait_idle()


@pytest.fixture
async def talk(server: RunningServer) -> AsyncIterator[ClientConnection]:
    async with dial(server, "model=tiny") as socket:
        created = await said(socket)
        assert created["session"]["audio"]["input"]["turn_detection"] == {
            "type": "server_vad",
            "threshold": 0.5,
            "prefix_padding_ms": 300,
            "silence_duration_ms": 500,
            "create_response": True,
            "interrupt_response": True,
        }
        yield socket


async def append(socket: ClientConnection, data: bytes, chunk: int | None = 2400) -> None:
    """chunk: bytes of each event; None: one event."""
    for start in range(0, len(data), chunk or len(data)):
        piece = data[start : start + (chunk or len(data))]
        await tell(socket, f"{BUFFER}.append", audio=base64.b64encode(piece).decode())


def spoken(events: list[Event]) -> str:
    (part,) = events[-1]["response"]["output"][0]["content"]
    text: str = part["text"]
    return text


def one(events: list[Event], kind: str) -> Event:
    (event,) = [event for event in events if event["type"] == kind]
    return event


@pytest.mark.parametrize("chunk", [2401, None])
@pytest.mark.parametrize("told", [False, True])
async def test_a_turn_is_found_written_down_and_answered(talk: ClientConnection, told: bool, chunk: int | None) -> None:
    """In chunks of odd length, too, and in one event."""
    if told:
        await configure(talk, "realtime", transcription={"model": "whisper-1"})
    await append(talk, pcm(TURN), chunk)
    events = await up_to(talk, "response.done")
    assert kinds(events)[: 8 if told else 6] == [
        *(STARTED, STOPPED, f"{BUFFER}.committed", "conversation.item.added", "conversation.item.done"),
        *((f"{HEARD}.delta", f"{HEARD}.completed") if told else ()),
        "response.created",
    ]
    start, end = events[0]["audio_start_ms"], events[1]["audio_end_ms"]
    assert start == pytest.approx(1000 * (0.5 + BEGIN) - 300, abs=100)
    assert end == pytest.approx(1000 * (0.5 + BEGIN + LENGTH) + 500, abs=250)
    assert spoken(events) == f"{(end - start) / 1000:.2f} s."
    assert len({event["item_id"] for event in events[:3]} | {events[3]["item"]["id"]}) == 1
    await add(talk, "Nothing is left of it.")


async def test_who_commits_detects_nothing(talk: ClientConnection) -> None:
    for off in (None, False):
        updated = await configure(talk, "realtime", turn_detection=off)
        assert updated["session"]["audio"]["input"]["turn_detection"] is None and "unsupported" not in updated
        await append(talk, pcm(TURN))
        await tell(talk, f"{BUFFER}.commit")
        assert kinds(await up_to(talk, "conversation.item.done"))[0] == f"{BUFFER}.committed"
        await tell(talk, "response.create")
        assert spoken(await up_to(talk, "response.done")) == f"{len(TURN) / 24_000:.2f} s.", "the model repeats it"
    await configure(talk, "realtime", turn_detection={"type": "server_vad"})
    await append(talk, pcm(TURN))
    start = one(await up_to(talk, "response.done"), STARTED)["audio_start_ms"]
    assert start == pytest.approx(1000 * (2 * len(TURN) / 24_000 + 0.5 + BEGIN) - 300, abs=100), "of the whole session"


async def test_a_turn_may_be_committed_or_cleared_while_somebody_speaks(talk: ClientConnection) -> None:
    half = pcm(TURN[: 3 * 24_000])
    await append(talk, half)
    await tell(talk, f"{BUFFER}.commit")
    events = await up_to(talk, "conversation.item.done")
    assert kinds(events)[:2] == [STARTED, f"{BUFFER}.committed"] and events[0]["item_id"] == events[1]["item_id"]
    await append(talk, half)
    await tell(talk, f"{BUFFER}.clear")
    assert kinds(await up_to(talk, f"{BUFFER}.cleared")) == [STARTED, f"{BUFFER}.cleared"]
    assert (await refused(talk, f"{BUFFER}.commit"))["code"] == "input_audio_buffer_commit_empty"


async def test_fields_of_what_is_heard(talk: ClientConnection) -> None:
    given: dict[str, Any] = {"type": "server_vad", "prefix_padding_ms": 0, "silence_duration_ms": 100}
    given |= {"idle_timeout_ms": 5000, "threshhold": 0.6, "eagerness": None}
    updated = await configure(talk, "realtime", turn_detection={**given, "create_response": False})
    shown = updated["session"]["audio"]["input"]["turn_detection"]
    assert shown["silence_duration_ms"] == 100 and not shown["create_response"] and "idle_timeout_ms" not in shown
    params = [f"session.audio.input.turn_detection.{name}" for name in ("idle_timeout_ms", "threshhold")]
    assert [field["param"] for field in updated["unsupported"]] == params
    await append(talk, pcm(TURN))
    await tell(talk, "conversation.item.retrieve", item_id="nobody")
    events = await up_to(talk, "error")
    turn = [STARTED, STOPPED, f"{BUFFER}.committed", "conversation.item.added", "conversation.item.done"]
    assert kinds(events) == [*turn, *turn, "error"], "the pause after the first sentence is shorter than 500 ms"
    assert events[0]["audio_start_ms"] == pytest.approx(1000 * (0.5 + BEGIN), abs=100)
    updated = await configure(talk, "realtime", turn_detection={"type": "semantic_vad", "eagerness": "low"})
    assert updated["session"]["audio"]["input"]["turn_detection"]["eagerness"] == "low"
    session = {"type": "transcription"}
    assert (await refused(talk, "session.update", session=session))["param"] == "session.type"
    for case in cases("heard"):
        session = {"type": "realtime", "audio": {"input": case["input"]}}
        assert (await refused(talk, "session.update", session=session))["param"] == case["param"]


async def test_an_update_that_is_refused_changes_nothing(talk: ClientConnection) -> None:
    before = (await configure(talk, "realtime"))["session"]
    heard = {"turn_detection": None, "format": {"type": "audio/pcmu"}, "transcription": {"model": "ears"}}
    output = {"format": {"type": "audio/pcm", "rate": 1}, "speed": 2}
    session = {"type": "realtime", "instructions": "Sing.", "audio": {"input": heard, "output": output}}
    assert (await refused(talk, "session.update", session=session))["param"] == "session.audio.output.format.rate"
    assert (await configure(talk, "realtime"))["session"] == before
    await append(talk, pcm(TURN))
    events = await up_to(talk, "response.done")
    assert STOPPED in kinds(events) and f"{HEARD}.completed" not in kinds(events)


async def test_a_session_of_transcripts_has_turns_and_no_answers(server: RunningServer) -> None:
    async with dial(server, "intent=transcription") as scribe:
        await said(scribe)
        await append(scribe, pcm(np.concatenate([TURN, TURN])), None)
        first, second = [await up_to(scribe, f"{HEARD}.completed") for _ in range(2)]
        assert one(second, f"{BUFFER}.committed")["previous_item_id"] == first[-1]["item_id"]
        assert [event["type"] for event in first + second].count(STOPPED) == 2
        assert (await refused(scribe, "response.create"))["code"] == "unsupported_event"


@pytest.mark.parametrize("interrupts", [True, False])
async def test_who_speaks_ends_the_answer(talk: ClientConnection, interrupts: bool) -> None:
    await configure(talk, "realtime", turn_detection={"type": "server_vad", "interrupt_response": interrupts})
    await add(talk, "!endless answer")
    await tell(talk, "response.create")
    await up_to(talk, "response.output_text.delta")
    await append(talk, pcm(TURN))
    if interrupts:
        done = (await up_to(talk, "response.done"))[-1]["response"]
        assert done["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
        assert spoken(await up_to(talk, "response.done")).endswith(" s."), "the turn is answered"
    else:
        events = await up_to(talk, "error")
        assert events[-1]["error"]["code"] == "conversation_already_has_active_response"
        assert "conversation.item.done" in kinds(events) and "response.done" not in kinds(events)
        await tell(talk, "response.cancel")
        await up_to(talk, "response.done")


async def test_an_answer_that_is_not_for_the_conversation_goes_on(talk: ClientConnection) -> None:
    await tell(talk, "response.create", response={"conversation": "none", "input": [message("!endless answer")]})
    await up_to(talk, "response.output_text.delta")
    await append(talk, pcm(TURN[: 3 * 24_000]))
    await up_to(talk, STARTED)
    await tell(talk, "response.cancel")
    done = (await up_to(talk, "response.done"))[-1]["response"]
    assert done["status_details"] == {"type": "cancelled", "reason": "client_cancelled"}


async def test_who_leaves_during_a_turn(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is being written down, or answered, ends."""

    async def never(*_: Any, **__: Any) -> str:
        await asyncio.Event().wait()
        return ""

    monkeypatch.setattr(listening.Ears, "transcribe", never)
    async with dial(server, "model=tiny") as socket:
        await append(socket, pcm(TURN))
        await up_to(socket, "conversation.item.done")
        await tell(socket, "conversation.item.create", item=message("Others are heard meanwhile."))
        await up_to(socket, "conversation.item.done")
        await tell(socket, "response.create")
    wait(lambda: not server.context.open_sockets, what="the socket is closed")
    server.wait_idle()


async def test_who_goes_on_speaking_is_answered_once(talk: ClientConnection) -> None:
    """The next turn begins before the first is written down."""
    await append(talk, pcm(np.concatenate([TURN, TURN[: 5 * 24_000], silence(1)])), None)
    events = await up_to(talk, "response.done")
    ids = [event["item_id"] for event in events if event["type"] == f"{BUFFER}.committed"]
    assert len(ids) == 2 and kinds(events).count("response.created") == 1
    for id in ids:
        await tell(talk, "conversation.item.retrieve", item_id=id)
        (event,) = await up_to(talk, "conversation.item.retrieved")
        assert event["item"]["content"][0]["transcript"]


async def test_a_turn_in_which_nothing_is_said_is_dropped(
    talk: ClientConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
        return np.zeros(len(samples) * wanted // rate, np.float32)

    with monkeypatch.context() as patch:
        patch.setattr(listening, "resample", silent)
        await append(talk, pcm(TURN))
        events = await up_to(talk, "conversation.item.deleted")
    assert events[-1]["item_id"] == one(events, STARTED)["item_id"]
    assert (await refused(talk, "conversation.item.delete", item_id=events[-1]["item_id"]))["code"] == "item_not_found"
    await append(talk, pcm(TURN))
    assert one(await up_to(talk, "response.done"), f"{BUFFER}.committed")["previous_item_id"] is None


async def test_of_silence_little_is_kept(
    server: RunningServer, talk: ClientConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "KEPT_SECONDS", 1)
    monkeypatch.setattr(listening, "MAX_SECONDS", 8)
    for _ in range(4):
        await append(talk, pcm(silence(3)), None)
    await append(talk, pcm(TURN))
    start = one(await up_to(talk, "response.done"), STARTED)["audio_start_ms"]
    assert start == pytest.approx(1000 * (12 + 0.5 + BEGIN) - 300, abs=100)


async def test_a_turn_for_which_there_is_no_room(talk: ClientConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is found all the same."""
    with monkeypatch.context() as patch:
        patch.setattr("service.api.realtime.conversation.MAX_PARTS", 0)
        await append(talk, pcm(np.concatenate([TURN, TURN])), None)
        for _ in range(2):
            events = await up_to(talk, "error")
            assert events[-1]["error"]["code"] == "conversation_full"
            assert kinds(events) == [STARTED, STOPPED, "error"]
    await append(talk, pcm(TURN))
    await up_to(talk, "response.done")


SECOND = pcm(tone(440, 24_000))
HEARD = "conversation.item.input_audio_transcription"


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
    await append(socket, data, -(-len(data) // pieces))
    await tell(socket, f"{BUFFER}.commit")
    return await up_to(socket, f"{HEARD}.completed")


async def test_a_session_of_transcripts(scribe: ClientConnection) -> None:
    options = {"model": "gpt-4o-transcribe", "language": "de", "prompt": "Anna", "delay": "low"}
    updated = await configure(scribe, transcription=options, turn_detection=None)
    assert updated["session"]["audio"]["input"]["transcription"] == options and "unsupported" not in updated
    first, second = [await speak(scribe, SECOND) for _ in range(2)]
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
            if told:
                assert (await speak(socket, SECOND))[-1]["languages"] != [{"code": "de"}], "the hint is gone, too"
            else:
                await append(socket, SECOND)
                await tell(socket, f"{BUFFER}.commit")
                await tell(socket, "response.create", response={"output_modalities": ["text"]})
                assert f"{HEARD}.completed" not in kinds(await up_to(socket, "response.done"))


async def test_live_pieces_are_told_from_turns(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What may be a turn is none, nor is what is said in a conversation."""
    told, submit = list[bool](), EngineClient.submit
    monkeypatch.setattr(EngineClient, "submit", lambda *of: (told.append(of[1].live), submit(*of))[1])
    async with dial(server, "intent=transcription") as live, dial(server, "model=tiny") as talk:
        await configure(talk, "realtime", transcription={})
        for socket, seconds in ((live, 1), (live, 3), (talk, 1)):
            heard = await speak(socket, SECOND * seconds)
            assert heard[-1]["transcript"] == f"{seconds:.2f} s."
    assert told == [True, False, False]


@pytest.mark.parametrize("law", ["ulaw", "alaw"])
async def test_telephones_in_a_session_of_transcripts(scribe: ClientConnection, law: str) -> None:
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
    assert (await refused(scribe, f"{BUFFER}.commit"))["code"] == "input_audio_buffer_commit_empty"
    assert (await refused(scribe, f"{BUFFER}.append", audio="%"))["param"] == "audio"
    await append(scribe, SECOND, None)
    await tell(scribe, f"{BUFFER}.clear")
    assert kinds(await up_to(scribe, f"{BUFFER}.cleared")) == [f"{BUFFER}.cleared"]
    assert (await refused(scribe, f"{BUFFER}.commit"))["code"] == "input_audio_buffer_commit_empty"
    monkeypatch.setattr(listening, "MAX_SECONDS", 1)
    await append(scribe, SECOND, None)
    full = await refused(scribe, f"{BUFFER}.append", audio=base64.b64encode(SECOND).decode())
    assert full["code"] == "input_audio_buffer_full"
    await tell(scribe, f"{BUFFER}.clear")
    await up_to(scribe, f"{BUFFER}.cleared")
    await append(scribe, bytes(20))
    await tell(scribe, f"{BUFFER}.commit")
    failed = (await up_to(scribe, f"{HEARD}.failed"))[-1]
    assert "too short" in failed["error"]["message"] and failed["error"]["type"] == "invalid_request_error"
    await append(scribe, bytes(1))
    assert (await refused(scribe, f"{BUFFER}.commit"))["code"] == "input_audio_buffer_commit_empty", "half a sample"
    await tell(scribe, f"{BUFFER}.clear")
    assert (await speak(scribe, SECOND))[-1]["transcript"] == "1.00 s."


async def test_audio_counts_until_it_is_written_down(
    server: RunningServer, scribe: ClientConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending, pieces_of = list[int](), listening.pieces_of

    async def spied(*given: Any) -> Any:
        pending.append(server.context.admission.pending_bytes)
        return await pieces_of(*given)

    monkeypatch.setattr(listening, "pieces_of", spied)
    await speak(scribe, SECOND)
    assert pending[0] >= len(SECOND)
