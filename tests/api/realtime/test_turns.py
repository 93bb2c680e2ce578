"""Turns that the server detects: their events, their transcripts, the answers that they begin and end. The fake
recogniser says how long a turn is; the fake model repeats it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI
from websockets.asyncio.client import ClientConnection

from service.api.realtime import listening
from service.media.audio_formats import G711_RATE
from tests.api.realtime.conftest import Event, add, kinds, message, refused, said, tell, up_to
from tests.api.realtime.test_listening import HEARD, configure, dial
from tests.media.test_voice_activity import recording
from tests.support.fake_hearing import hearing_catalog
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import wait

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


async def up_to_error(socket: ClientConnection) -> list[Event]:
    events = [await said(socket)]
    while events[-1]["type"] != "error":
        events.append(await said(socket))
    return events


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
        assert spoken(await up_to(talk, "response.done")) == f"{len(TURN) / 24_000:.2f} s."
    updated = await configure(talk, "realtime", turn_detection={"type": "server_vad"})
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


async def test_fields_of_the_detection(talk: ClientConnection) -> None:
    given: dict[str, Any] = {"type": "server_vad", "prefix_padding_ms": 0, "silence_duration_ms": 100}
    given |= {"idle_timeout_ms": 5000, "threshhold": 0.6, "eagerness": None}
    updated = await configure(talk, "realtime", turn_detection={**given, "create_response": False})
    shown = updated["session"]["audio"]["input"]["turn_detection"]
    assert shown["silence_duration_ms"] == 100 and not shown["create_response"] and "idle_timeout_ms" not in shown
    params = [f"session.audio.input.turn_detection.{name}" for name in ("idle_timeout_ms", "threshhold")]
    messages = [f"{params[0]}: must be null.", f"{params[1]}: there is no such field."]
    assert [(field["param"], field["message"]) for field in updated["unsupported"]] == list(
        zip(params, messages, strict=True)
    )
    await append(talk, pcm(TURN))
    await tell(talk, "conversation.item.retrieve", item_id="nobody")
    events = await up_to_error(talk)
    turn = [STARTED, STOPPED, f"{BUFFER}.committed", "conversation.item.added", "conversation.item.done"]
    assert kinds(events) == [*turn, *turn, "error"], "the pause after the first sentence is shorter than 500 ms"
    assert events[0]["audio_start_ms"] == pytest.approx(1000 * (0.5 + BEGIN), abs=100)
    updated = await configure(talk, "realtime", turn_detection={"type": "semantic_vad", "eagerness": "low"})
    assert updated["session"]["audio"]["input"]["turn_detection"]["eagerness"] == "low"
    for problem, field in (
        ({"type": "server_vad", "threshold": 2}, ".threshold"),
        ({"type": "semantic_vad", "eagerness": "very"}, ".eagerness"),
        ({"type": "another"}, ".type"),
        ({}, ".type"),
    ):
        session = {"type": "realtime", "audio": {"input": {"turn_detection": problem}}}
        param = (await refused(talk, "session.update", session=session))["param"]
        assert param == f"session.audio.input.turn_detection{field}"


async def test_an_update_that_is_refused_changes_nothing(talk: ClientConnection) -> None:
    heard = {"turn_detection": None, "format": {"type": "audio/pcmu"}, "transcription": {"model": "ears"}}
    session = {"type": "realtime", "audio": {"input": heard, "output": {"voice": "nobody"}}}
    assert (await refused(talk, "session.update", session=session))["param"] == "session.audio.output.voice"
    await append(talk, pcm(TURN))
    events = await up_to(talk, "response.done")
    assert STOPPED in kinds(events) and f"{HEARD}.completed" not in kinds(events)


async def test_telephones(talk: ClientConnection) -> None:
    await configure(talk, "realtime", format={"type": "audio/pcmu"})
    call = np.concatenate([recording("speech", G711_RATE), np.zeros(8000, np.float32)])
    levels = listening.g711_levels("ulaw") / 32_768
    coded = np.abs(levels[:, None] - call).argmin(0).astype(np.uint8)
    await append(talk, coded.tobytes(), 400)
    events = await up_to(talk, "response.done")
    assert one(events, STARTED)["audio_start_ms"] == pytest.approx(0, abs=100)
    assert one(events, STOPPED)["audio_end_ms"] == pytest.approx(1000 * (BEGIN + LENGTH) + 500, abs=250)


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
        events = await up_to_error(talk)
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

    async def never(*_: Any, live: bool) -> str:
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
        patch.setattr("service.api.chat.prompt.MAX_PARTS", 0)
        await append(talk, pcm(np.concatenate([TURN, TURN])), None)
        for _ in range(2):
            events = await up_to_error(talk)
            assert events[-1]["error"]["code"] == "conversation_full"
            assert kinds(events) == [STARTED, STOPPED, "error"]
    await append(talk, pcm(TURN))
    await up_to(talk, "response.done")


async def test_the_client_of_openai(server: RunningServer) -> None:
    """A conversation with the defaults."""
    async with (
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
        client.realtime.connect(model="tiny") as connection,
    ):
        data = pcm(TURN)
        for start in range(0, len(data), 4800):
            audio = base64.b64encode(data[start : start + 4800]).decode()
            await connection.input_audio_buffer.append(audio=audio)
        start = end = -1
        async for event in connection:
            assert event.type != "error", event
            if event.type == STARTED:
                start = event.audio_start_ms
            elif event.type == STOPPED:
                end = event.audio_end_ms
            elif event.type == "response.output_text.done":
                assert event.text == f"{(end - start) / 1000:.2f} s."
                break
