"""The Realtime protocol over an engine without models, as openai-python speaks it: events, conversation, limits."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from itertools import product
from typing import Any

import httpx
import numpy as np
import pytest
import websockets
from openai import AsyncOpenAI
from websockets import Subprotocol
from websockets.asyncio.client import ClientConnection, connect

from service.api import sockets
from service.api.context import LARGE_BODY, ServerContext
from service.api.http.errors import ApiError
from service.api.http.json_body import MAX_SIGNS
from service.api.realtime import websocket
from service.api.realtime.websocket import Session
from service.media.messages import AudioLimits
from tests.api.realtime.conftest import (
    MAX_ITEMS,
    Conversing,
    Event,
    add,
    answer,
    joined,
    kinds,
    message,
    picture,
    refused,
    refused_later,
    said,
    tell,
    up_to,
)
from tests.media.test_audio_out import by_av
from tests.support.fake_engine import ENDLESS, MUTE, PATCH
from tests.support.refusals import cases as refused_cases
from tests.support.servers import running_server
from tests.support.tool_samples import TOOLS, call_text
from tests.support.waiting import GENEROUS, until

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "1"}
BEGUN = ["response.created", "response.output_item.added", "conversation.item.added", "response.content_part.added"]
ENDED = ["response.content_part.done", "conversation.item.done", "response.output_item.done", "response.done"]
pytestmark = pytest.mark.usefixtures("nothing_is_left")


async def test_a_written_answer(conversing: Conversing, socket: ClientConnection) -> None:
    asked = await add(socket, "Say this.")
    events = await answer(socket, output_modalities=["text"], metadata={"topic": "tests"})
    assert kinds(events) == [*BEGUN, "response.output_text.delta", "response.output_text.done", *ENDED]
    assert joined(events, "response.output_text.delta") == "Say this."
    done = events[-1]["response"]
    assert done["status"] == "completed" and done["metadata"] == {"topic": "tests"}
    assert done["output"][0]["content"] == [{"type": "output_text", "text": "Say this."}]
    assert done["usage"]["output_tokens"] == 9 and done["usage"]["input_tokens"] == 9
    assert done["usage"]["total_tokens"] == 18
    added = next(event for event in events if event["type"] == "conversation.item.added")
    assert added["previous_item_id"] == asked and added["item"]["status"] == "in_progress"
    assert len({event["event_id"] for event in events}) == len(events)


async def test_a_spoken_answer(conversing: Conversing, socket: ClientConnection) -> None:
    await add(socket, "One, two and three is it. Four five six.")
    events = await answer(socket)
    whole = kinds([event for event in events if not event["type"].endswith("delta")])
    assert whole == [*BEGUN, "response.output_audio.done", "response.output_audio_transcript.done", *ENDED]
    text = "One, two and three is it. Four five six."
    assert joined(events, "response.output_audio_transcript.delta") == text
    sound = [base64.b64decode(e["delta"]) for e in events if e["type"] == "response.output_audio.delta"]
    assert len(sound) > 1 and all(len(piece) % 2 == 0 for piece in sound)
    assert len(b"".join(sound)) == 2 * PATCH and np.abs(np.frombuffer(b"".join(sound), "<i2")).max() > 1000
    done = events[-1]["response"]
    assert done["output"][0]["content"] == [{"type": "output_audio", "transcript": text}]
    assert done["usage"]["output_token_details"] == {"text_tokens": 40, "audio_tokens": 2}
    assert conversing.talker.requests[-1].live
    conversing.talker.runaways = 1
    cut = (await answer(socket, input=[message(text)]))[-1]["response"]
    assert cut["status"] == "incomplete" and cut["output"][0]["status"] == "incomplete"
    assert cut["status_details"] == {"type": "incomplete", "reason": "max_output_tokens"}
    assert cut["output"][0]["content"][0]["transcript"] == text


async def test_letters_that_the_voice_cannot_speak_are_named(socket: ClientConnection) -> None:
    for text, unspoken in (("Hello 世界, 世 5.", {"unspoken": "世界"}), ("Hello 5.", {})):
        await add(socket, text)
        (done,) = [event for event in await answer(socket) if event["type"] == "response.output_audio.done"]
        assert {key: value for key, value in done.items() if key == "unspoken"} == unspoken


async def test_the_model_sees_of_a_spoken_answer_what_was_played(
    conversing: Conversing, socket: ClientConnection
) -> None:
    await add(socket, "One, two and three is it. Four five six.")
    spoken = (await answer(socket))[-1]["response"]["output"][0]["id"]
    # Two segments of 0.1 s each: the first is played, and a half of the second.
    truncation = {"item_id": spoken, "content_index": 0, "audio_end_ms": 155}
    await tell(socket, "conversation.item.truncate", **truncation)
    event = await said(socket)
    assert {**truncation, "type": "conversation.item.truncated"}.items() <= event.items()
    await tell(socket, "conversation.item.retrieve", item_id=spoken)
    assert (await said(socket))["item"]["content"][0]["transcript"] == "One, two and three is it. Four"
    await add(socket, "Go on.")
    await answer(socket, output_modalities=["text"])
    assert conversing.seen[-1][1:] == [("assistant", "One, two and three is it. Four"), ("user", "Go on.")]
    error = await refused(socket, "conversation.item.truncate", **{**truncation, "audio_end_ms": 156})
    assert error["param"] == "audio_end_ms" and "155 ms" in error["message"]
    await tell(socket, "conversation.item.truncate", **{**truncation, "audio_end_ms": 0})
    await up_to(socket, "conversation.item.truncated")
    await answer(socket, output_modalities=["text"])
    assert [role for role, _ in conversing.seen[-1]] == ["user", "user", "assistant"]


async def test_an_answer_that_is_cancelled_is_kept_as_far_as_it_went(
    conversing: Conversing, socket: ClientConnection
) -> None:
    await add(socket, f"!endless This is the beginning, {ENDLESS}. ")
    await tell(socket, "response.create")
    await up_to(socket, "response.output_audio.delta")
    error = await refused_later(socket, "response.create")
    assert error["code"] == "conversation_already_has_active_response"
    await tell(socket, "response.cancel")
    events = await up_to(socket, "response.done")
    assert not conversing.server.context.engine.in_flight
    done = events[-1]["response"]
    assert done["status"] == "cancelled"
    assert done["status_details"] == {"type": "cancelled", "reason": "client_cancelled"}
    item = done["output"][0]
    assert item["status"] == "incomplete"
    await tell(socket, "conversation.item.truncate", item_id=item["id"], content_index=0, audio_end_ms=95)
    await up_to(socket, "conversation.item.truncated")
    await add(socket, "Go on.")
    await answer(socket, output_modalities=["text"])
    # What has been played of the first segment, "!endless This is the beginning,", which lasts 0.1 s.
    assert conversing.seen[-1][1] == ("assistant", "!endless This is the")


async def test_an_event_that_waits_for_a_slow_client_is_not_lost_by_a_cancel(
    conversing: Conversing, socket: ClientConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, cancelled = threading.Event(), threading.Event()
    cancel, send = Session._cancel, websocket.send

    async def slow(context: Any, to: Any, event: Any, size: int) -> None:
        if event.__struct_config__.tag == "response.output_text.delta" and not waits.is_set():
            waits.set()
            await asyncio.to_thread(cancelled.wait, GENEROUS)
        await send(context, to, event, size)

    async def cancelling(self: Session, response_id: str | None) -> None:
        cancelled.set()
        await cancel(self, response_id)

    monkeypatch.setattr(websocket, "send", slow)
    monkeypatch.setattr(Session, "_cancel", cancelling)
    await add(socket, "!endless answer")
    await tell(socket, "response.create", response={"output_modalities": ["text"]})
    await asyncio.to_thread(waits.wait, GENEROUS)
    await tell(socket, "response.cancel")
    events = await up_to(socket, "response.done")
    assert kinds(events)[:4] == BEGUN
    (whole,) = [event["text"] for event in events if event["type"] == "response.output_text.done"]
    assert joined(events, "response.output_text.delta") == whole


async def test_pictures_are_seen_and_checked_when_they_come(conversing: Conversing, socket: ClientConnection) -> None:
    content = [{"type": "input_text", "text": "What is it?"}, picture()]
    await tell(socket, "conversation.item.create", item={"type": "message", "role": "user", "content": content})
    added = await up_to(socket, "conversation.item.done")
    assert added[0]["item"]["content"] == content
    usage = (await answer(socket, output_modalities=["text"]))[-1]["response"]["usage"]
    assert usage["input_token_details"]["image_tokens"] == 4
    assert usage["input_token_details"]["text_tokens"] == len("What is it?")
    for part in (
        picture(2),
        {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
        {"type": "input_image", "image_url": "https://example.com/a.png"},
        {"type": "input_image"},
    ):
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}, part]}
        error = await refused(socket, "conversation.item.create", item=item)
        assert error["param"] == "item.content[1].image_url", error
        assert error["type"] == "invalid_request_error"


async def test_items_are_put_in_order_and_deleted(conversing: Conversing, socket: ClientConnection) -> None:
    for text, fields in (("b", {}), ("d", {}), ("a", {"previous_item_id": "root"}), ("c", {"previous_item_id": "b"})):
        await tell(socket, "conversation.item.create", item=message(text, id=text), **fields)
        await up_to(socket, "conversation.item.done")
    await tell(socket, "conversation.item.create", item=message("Fine.", "assistant", id="e"))
    assert [event["previous_item_id"] for event in await up_to(socket, "conversation.item.done")] == ["d", "d"]
    await tell(socket, "conversation.item.delete", item_id="d")
    assert (await said(socket))["item_id"] == "d"
    await answer(socket, output_modalities=["text"], instructions="Be brief.")
    written = [("user", "a"), ("user", "b"), ("user", "c"), ("assistant", "Fine.")]
    assert conversing.seen[-1] == [("system", "Be brief."), *written]
    assert (await refused(socket, "conversation.item.create", item=message("x", id="a")))["param"] == "item.id"
    for kind, param, fields in (
        ("create", "previous_item_id", {"item": message("x")}),
        ("retrieve", "item_id", {}),
        ("delete", "item_id", {}),
        ("truncate", "item_id", {"content_index": 0, "audio_end_ms": 1}),
    ):
        error = await refused(socket, f"conversation.item.{kind}", **{param: "d"}, **fields)
        assert (error["code"], error["param"]) == ("item_not_found", param)
    error = await refused(socket, "conversation.item.truncate", item_id="a", content_index=0, audio_end_ms=1)
    assert "only an answer that was spoken" in error["message"]


async def test_a_session_keeps_what_is_set_and_a_response_what_it_sets(
    conversing: Conversing, socket: ClientConnection
) -> None:
    output = {"voice": "alloy", "speed": 1.5}
    session = {"type": "realtime", "instructions": "Sing.", "max_output_tokens": 4, "audio": {"output": output}}
    await tell(socket, "session.update", session=session)
    shown = (await said(socket))["session"]
    assert shown["instructions"] == "Sing." and shown["max_output_tokens"] == 4
    assert shown["output_modalities"] == ["audio"] and shown["model"] == "tiny"
    assert shown["audio"]["output"] == {**output, "format": {"type": "audio/pcm", "rate": 24000}}
    await tell(socket, "session.update", session={"type": "realtime", "audio": {"output": {"speed": 2}}})
    assert (await said(socket))["session"]["audio"]["output"]["voice"] == "alloy"
    await add(socket, "It is long enough.")
    events = await answer(socket, modalities=["text"])
    assert events[-1]["response"]["status"] == "incomplete"
    assert events[-1]["response"]["status_details"] == {"type": "incomplete", "reason": "max_output_tokens"}
    assert conversing.seen[-1][0] == ("system", "Sing.")
    sound = joined(await answer(socket, max_output_tokens="inf", instructions="Say."), "response.output_audio.delta")
    assert len(base64.b64decode(sound)) == pytest.approx(PATCH / 2, abs=400)  # at double speed
    assert conversing.seen[-1][0] == ("system", "Say.")
    await tell(socket, "session.update", session={"instructions": ""})
    assert (await said(socket))["session"]["max_output_tokens"] == 4
    await answer(socket, output_modalities=["text"])
    assert conversing.seen[-1][0][0] == "user"


async def test_an_answer_calls_tools_and_the_next_one_sees_their_results(
    conversing: Conversing, socket: ClientConnection
) -> None:
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    await tell(socket, "session.update", session={"tools": tools, "output_modalities": ["text"]})
    assert [tool["name"] for tool in (await said(socket))["session"]["tools"]] == [tool["name"] for tool in tools]
    asked = f"I will look.\n\n{call_text('get_weather', city='Rome')}\n{call_text('add', a=2, b=40)}"
    await add(socket, asked)
    events = await answer(socket)
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2]
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "function_call"]
    assert output[0]["content"][0]["text"] == "I will look."
    told = [(call["name"], json.loads(call["arguments"])) for call in output[1:]]
    assert told == [("get_weather", {"city": "Rome"}), ("add", {"a": 2, "b": 40})]
    for call in output[1:]:
        deltas = [event["delta"] for event in events if event.get("call_id") == call["call_id"] and "delta" in event]
        assert "".join(deltas) == call["arguments"] and len(deltas) > 3
        assert call["status"] == "completed" and call["call_id"].startswith("call_")
    assert kinds([event for event in events if event.get("output_index") == 2]) == [
        "response.output_item.added",
        *(f"response.function_call_arguments.{what}" for what in ("delta", "done")),
        "response.output_item.done",
    ]
    error = await refused(socket, "response.create")
    assert error["param"] == "conversation", "calls have no results yet"
    for call, result in zip(output[:0:-1], ("42", "Sunny."), strict=True):  # in another order
        item = {"type": "function_call_output", "call_id": call["call_id"], "output": result}
        await tell(socket, "conversation.item.create", item=item)
        await up_to(socket, "conversation.item.done")
    assert (await answer(socket))[-1]["response"]["status"] == "completed"
    calls = 'I will look.get_weather({"city": "Rome"})add({"a": 2, "b": 40})'
    assert conversing.seen[-1] == [("user", asked), ("assistant", calls), ("tool", "Sunny."), ("tool", "42")]


async def test_a_response_beside_the_conversation(conversing: Conversing, socket: ClientConnection) -> None:
    first = await add(socket, "One.")
    await add(socket, "Two.")
    given = [{"type": "item_reference", "id": first}, message("Three.")]
    events = await answer(socket, conversation="none", input=given, output_modalities=["text"])
    assert events[-1]["response"]["conversation_id"] is None
    assert not [event for event in events if event["type"].startswith("conversation.")]
    assert conversing.seen[-1] == [("user", "One."), ("user", "Three.")]
    await answer(socket, output_modalities=["text"], prompt=None, reasoning=None)
    assert conversing.seen[-1] == [("user", "One."), ("user", "Two.")]


async def test_what_needs_ears_is_refused_and_a_microphone_once(socket: ClientConnection) -> None:
    ears = [f"input_audio_buffer.{what}" for what in ("append", "commit", "clear")]
    for kind in (*ears, "output_audio_buffer.clear", "transcription_session.update"):
        error = await refused(socket, kind, audio="AAAA")
        assert error["code"] == "unsupported_event" and kind in error["message"]
        assert ("no speech recognition" in error["message"]) == (kind in ears)
    for _ in range(30):
        await tell(socket, "input_audio_buffer.append", audio="AAAA")
    await add(socket, "One.")
    assert "error" not in kinds(await answer(socket, output_modalities=["text"]))


async def closing(socket: ClientConnection) -> tuple[int, str]:
    """(code, reason) with which the server closes."""
    with pytest.raises(websockets.ConnectionClosed) as closed:
        await asyncio.wait_for(socket.recv(), GENEROUS)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code, closed.value.rcvd.reason


async def test_a_bad_event_is_reported_and_the_session_goes_on(socket: ClientConnection) -> None:
    for case in refused_cases("events"):
        await socket.send(json.dumps({"event_id": "mine", **case["event"]}))
        error = (await said(socket))["error"]
        assert error["param"] == case["param"] and error["event_id"] == "mine", error
        assert error["type"] == "invalid_request_error" and error["message"]
    await tell(socket, "session.update", session={})
    assert (await said(socket))["session"]["tools"] == []
    await add(socket, "It goes on.")
    assert (await answer(socket, output_modalities=["text"]))[-1]["response"]["status"] == "completed"


async def test_fields_of_openai_that_say_nothing_are_taken(socket: ClientConnection) -> None:
    hearing = {"turn_detection": False, "transcription": None, "format": {"type": "audio/pcm", "rate": 24000}}
    empty = {"prompt": {}, "tracing": {}, "reasoning": {}, "include": [], "audio": {"input": hearing}}
    for mark in ("", "\ufeff"):  # a byte order mark
        await socket.send(mark + json.dumps({"type": "session.update", "session": {**empty, "expires_at": None}}))
        updated = await said(socket)
        assert updated["type"] == "session.updated" and "unsupported" not in updated


async def test_the_supported_part_of_an_update_takes_effect(socket: ClientConnection) -> None:
    """Clients take an error event for the end, or go on without all that stood beside the field."""
    hearing = {
        "turn_detection": {"type": "semantic_vad", "eagerness": "auto"},
        "transcription": {"model": "gpt-4o-mini-transcribe"},
        "noise_reduction": {"type": "near_field"},
        "format": {"type": "audio/pcmu"},
    }
    session = {
        "type": "realtime",
        "instructions": "Be short.",
        "audio": {"input": hearing, "output": {"voice": "marin", "speed": 1.5, "tempo": 2}},
        "tools": [
            {"type": "mcp", "server_label": "x", "server_url": "https://example.org"},
            {"type": "function", "name": "f", "parameters": []},
        ],
        "tracing": "auto",
        "prompt": {"id": "x"},
        "include": ["item.input_audio_transcription.logprobs"],
        "reasoning": {"effort": "low"},
        "turn_detection": {"type": "server_vad"},
        "x" * 999: 1,
    }
    await tell(socket, "session.update", session=session)
    updated = await said(socket)
    fields = {field["param"]: field["message"] for field in updated["unsupported"]}
    heard = ("turn_detection", "transcription", "noise_reduction")
    assert set(fields) == {
        *(f"session.audio.input.{name}" for name in heard),
        *(f"session.{name}" for name in ("tracing", "prompt", "include", "reasoning", "turn_detection", "x" * 100)),
        "session.audio.output.tempo",
        "session.tools[0]",
    }
    assert all(message.startswith(f"{param}: ") for param, message in fields.items())
    shown = updated["session"]
    assert shown["instructions"] == "Be short." and [tool["name"] for tool in shown["tools"]] == ["f"]
    assert shown["audio"]["output"]["voice"] == "marin" and shown["audio"]["output"]["speed"] == 1.5
    await add(socket, "An empty list of parameters is one of PHP's.")
    assert (await answer(socket))[-1]["response"]["status"] == "completed"
    assert shown["audio"]["input"] == {"format": {"type": "audio/pcm", "rate": 24000}} | dict.fromkeys(heard[:2])


@pytest.mark.parametrize(("kind", "name"), [("audio/pcmu", "ulaw"), ("audio/pcma", "alaw")])
async def test_sound_for_telephones(socket: ClientConnection, kind: str, name: str) -> None:
    session = {"audio": {"output": {"format": {"type": kind}}}}
    await tell(socket, "session.update", session=session)
    assert (await said(socket))["session"]["audio"]["output"]["format"] == {"type": kind, "rate": 8000}
    await add(socket, "Call me.")
    events = await answer(socket)
    deltas = [base64.b64decode(event["delta"]) for event in events if event["type"] == "response.output_audio.delta"]
    samples, _ = by_av(b"".join(deltas), name, 8000)
    assert len(samples) == pytest.approx(PATCH / 6, abs=50), "one byte a sample, 8000 a second"
    assert np.median(samples) == pytest.approx(0.25, rel=0.04), "the tone of the fake talker"
    spoken = next(event["item"]["id"] for event in events if event["type"] == "response.output_item.added")
    late = {"item_id": spoken, "content_index": 0, "audio_end_ms": PATCH // 48 + 10}
    assert "the item has 100 ms of audio" in (await refused(socket, "conversation.item.truncate", **late))["message"]


@pytest.mark.usefixtures("whole_prompts")
async def test_the_oldest_turns_are_left_out_where_truncation_is_auto(
    conversing: Conversing, socket: ClientConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token is a character. The KV cache holds fewer than the model's context of 4096."""
    monkeypatch.setattr(ServerContext, "max_model_len", lambda context, model: 3000)
    session = {"output_modalities": ["text"], "instructions": "Be short.", "max_output_tokens": 8}
    await tell(socket, "session.update", session=session)
    assert (await said(socket))["session"]["truncation"] == "disabled"
    for name in "abcd":
        await add(socket, name + "x" * 950)
    error = await refused(socket, "response.create")
    assert error["code"] == "context_length_exceeded" and error["param"] == "conversation"
    await tell(socket, "session.update", session={"truncation": "auto"})
    assert (await said(socket))["session"]["truncation"] == "auto"
    assert (await answer(socket))[-1]["response"]["status"] in ("completed", "incomplete")
    seen = conversing.seen[-1]
    assert seen[0] == ("system", "Be short.") and [text[0] for _, text in seen[1:]] == ["b", "c", "d"]
    # Without a length there is to be room for a longer answer than one token.
    await tell(socket, "session.update", session={"max_output_tokens": "inf"})
    await said(socket)
    await add(socket, "e" + "x" * 950, id="e")
    await answer(socket)
    assert [text[0] for role, text in conversing.seen[-1] if role == "user"] == ["d", "e"]
    await tell(socket, "conversation.item.retrieve", item_id="e")
    assert (await said(socket))["item"]["id"] == "e", "items stay in the conversation"
    long = {"conversation": "none", "input": [message("Short."), message("x" * 5000)]}
    assert (await refused(socket, "response.create", response=long))["code"] == "context_length_exceeded"


def test_plain_http_is_told_that_this_is_a_websocket(conversing: Conversing) -> None:
    for method, path in product(("GET", "POST"), ("/v1/realtime?model=tiny", "/v1/audio/speech/stream")):
        response = httpx.request(method, conversing.server.url + path, timeout=GENEROUS)
        assert response.status_code == 426 and response.headers["upgrade"] == "websocket"
        error = response.json()["error"]
        assert error["code"] == "upgrade_required" and "WebSocket" in error["message"]


async def test_a_response_that_cannot_begin_is_an_error(conversing: Conversing, socket: ClientConnection) -> None:
    await add(socket, "Say it.")
    count = 'realtime_responses_total{model="tiny",status="refused"}'
    for case in refused_cases("live_responses"):
        before = conversing.server.metric(count)
        error = await refused(socket, "response.create", response=case["response"])
        assert error["param"] == case["param"] and error["message"].startswith(f"{case['param']}: ")
        assert "role tool" not in error["message"] and "messages" not in error["message"]
        assert conversing.server.metric(count) == before + 1
    assert (await answer(socket))[-1]["response"]["status"] == "completed"


async def test_a_call_or_an_output_that_stands_alone_is_named(socket: ClientConnection) -> None:
    """In the words of the protocol, which has no messages of a role tool, and by its place where it is referred to."""
    error = await refused(socket, "response.create", response={"input": [message("x"), OUTPUT]})
    assert "this function_call_output has the call_id c, which no function_call before it has" in error["message"]
    output = {**OUTPUT, "call_id": "<b>"}
    error = await refused(socket, "response.create", response={"input": [output]})
    assert "has the call_id, which" in error["message"], "what is no plain id is not repeated"
    await tell(socket, "conversation.item.create", item={**CALL, "call_id": "call_7"})
    await up_to(socket, "conversation.item.done")
    error = await refused(socket, "response.create")
    assert error["param"] == "conversation" and "with the call_id call_7, must be followed by" in error["message"]
    for item in (CALL, {**OUTPUT, "id": "alone"}):
        await tell(socket, "conversation.item.create", item=item)
        await up_to(socket, "conversation.item.done")
    given = [message("x"), {"type": "item_reference", "id": "alone"}]
    error = await refused(socket, "response.create", response={"input": given})
    assert error["param"] == "response.input[1]" and "call_id c" in error["message"]


@pytest.mark.parametrize("text", ["!fail", f"!endless Begin it, then {MUTE} it goes. And on."])
async def test_a_response_that_fails_ends_with_the_reason(socket: ClientConnection, text: str) -> None:
    await add(socket, text)
    done = (await answer(socket))[-1]["response"]
    assert done["status"] == "failed"
    assert done["status_details"]["error"]["code"] == "fake_failure"
    await add(socket, "Again.")
    assert (await answer(socket))[-1]["response"]["status"] == "completed"


async def test_a_conversation_has_limits_and_a_deleted_item_makes_room(
    conversing: Conversing, socket: ClientConnection
) -> None:
    async def create(content: list[Event]) -> Event:
        item = {"type": "message", "role": "user", "content": content}
        await tell(socket, "conversation.item.create", item=item)
        event = await said(socket)
        if event["type"] != "error":
            await said(socket)
        return event

    error = (await create([picture()] * 3))["error"]
    assert error["code"] == "conversation_full" and "images" in error["message"] and "at most 2" in error["message"]
    text = {"type": "input_text", "text": "x"}
    assert "parts" in (await create([text] * 13))["error"]["message"]
    admission = conversing.server.context.admission
    large = {"type": "input_text", "text": "x" * 250_000}
    kept = (await create([large]))["item"]["id"]
    assert admission.pending_bytes > 250_000
    assert "bytes" in (await create([large]))["error"]["message"]
    await tell(socket, "conversation.item.delete", item_id=kept)
    await up_to(socket, "conversation.item.deleted")
    assert admission.pending_bytes == 0
    ids = [(await create([text]))["item"]["id"] for _ in range(MAX_ITEMS)]
    assert f"at most {MAX_ITEMS} allowed" in (await create([text]))["error"]["message"]
    assert (await refused(socket, "response.create"))["code"] == "conversation_full"
    await tell(socket, "conversation.item.delete", item_id=ids[0])
    await up_to(socket, "conversation.item.deleted")
    assert (await answer(socket, output_modalities=["text"]))[-1]["response"]["status"] == "completed"


async def test_a_response_answers_no_more_items_than_a_conversation_has_and_each_once(
    conversing: Conversing, socket: ClientConnection
) -> None:
    """It is refused before anything is made of them: the first would hold the server for seconds. Items that are
    answered count as pending bytes."""
    for given, what in (
        ([CALL] * 50_000, "items"),
        ([{"type": "item_reference", "id": "unknown"}] * (MAX_ITEMS + 1), "items"),
        ([message("x") | {"content": [{"type": "input_text", "text": "x"}] * 7}] * 2, "content parts"),
    ):
        error = await refused(socket, "response.create", response={"input": given})
        assert (error["param"], error["code"]) == ("response.input", "conversation_full")
        assert f"too many {what}" in error["message"]
    reference = {"type": "item_reference", "id": await add(socket, "One.")}
    error = await refused(socket, "response.create", response={"input": [reference, message("Two."), reference]})
    assert error["param"] == "response.input" and "once" in error["message"]
    given = [message("x" * 2000), message("!endless answer")]
    admission, response = conversing.server.context.admission, {"output_modalities": ["text"], "conversation": "none"}
    before = admission.pending_bytes
    await tell(socket, "response.create", response=response | {"input": given})
    await up_to(socket, "response.output_text.delta")
    assert admission.pending_bytes >= before + 2000
    await tell(socket, "response.cancel")
    assert (await up_to(socket, "response.done"))[-1]["response"]["status"] == "cancelled"
    assert admission.pending_bytes == before


async def test_a_full_server_says_so_and_the_session_goes_on(conversing: Conversing, socket: ClientConnection) -> None:
    await add(socket, "One.")
    others = conversing.server.context.admission.ticket("realtime")
    with pytest.raises(ApiError):
        while True:
            others.grow(1)
    with_picture = {"type": "message", "role": "user", "content": [picture()]}
    for kind, fields in (("conversation.item.create", {"item": with_picture}), ("response.create", {})):
        error = await refused(socket, kind, **fields)
        assert (error["code"], error["type"]) == ("overloaded", "overloaded_error") and error["retry_after"] > 0
    others.release()
    assert (await answer(socket, output_modalities=["text"]))[-1]["response"]["status"] == "completed"


async def test_what_is_not_json_ends_the_session(conversing: Conversing) -> None:
    for raw, problem in (
        ("no json", "JSON object"),
        ("[]", "JSON object"),
        (b'{"type": "response.cancel", "unknown": "\xff"}', "UTF-8"),
        ("[" * 100_000, "JSON object"),
        ('{"type": "response.cancel", "unknown": ' + "[" * 500_000, "too deeply"),
    ):
        async with conversing.connect() as socket:
            await said(socket)
            await socket.send(raw)
            error = (await said(socket))["error"]
            assert error["code"] == "invalid_json" and problem in error["message"]
            assert (await closing(socket))[0] == 1007


async def test_an_event_of_too_many_values_is_refused_and_the_session_goes_on(
    conversing: Conversing, socket: ClientConnection
) -> None:
    tools = [{"type": "function", "name": "f", "parameters": {"a": [[]] * MAX_SIGNS}}]
    await tell(socket, "session.update", session={"type": "realtime", "tools": tools})
    assert (await up_to(socket, "error"))[-1]["error"]["code"] == "too_many_values"
    await add(socket, "Still here.")


async def test_a_session_that_cannot_begin_says_why(conversing: Conversing) -> None:
    queries = {"": "model", "model=else": "model", "model=talker": "model", "model=tiny&intent=transcription": "intent"}
    for query, param in queries.items():
        async with conversing.connect(query) as socket:
            assert (await said(socket))["error"]["param"] == param
            assert (await closing(socket))[0] == 1008


@pytest.mark.parametrize("cut", [False, True])
async def test_leaving_in_the_middle_leaves_nothing(conversing: Conversing, cut: bool) -> None:
    server = conversing.server

    def running() -> int:
        return len(asyncio.all_tasks(server.loop))

    await until(lambda: not server.context.open_sockets)
    idle = running()
    async with conversing.connect() as socket:
        await said(socket)
        await add(socket, f"!endless This is the beginning, {ENDLESS}. ")
        await tell(socket, "response.create")
        await up_to(socket, "response.output_audio.delta")
        assert conversing.talker.chats and conversing.talker.speeches and running() > idle
        if cut:
            socket.transport.abort()
    await until(lambda: conversing.talker.idle, what="both models are free")
    await until(lambda: running() <= idle, what="no task is left")
    assert not server.context.engine.in_flight


async def test_a_page_of_another_origin_and_an_event_that_is_too_large_are_refused(conversing: Conversing) -> None:
    with pytest.raises(websockets.InvalidStatus) as refused:
        async with conversing.connect(origin="https://evil.example"):
            pass
    assert refused.value.response.status_code == 403
    assert json.loads(refused.value.response.body or b"")["error"]["code"] == "origin_not_allowed"
    async with conversing.connect() as socket:
        await said(socket)
        # In two frames: all but a byte has been read when the server closes, so no reset overtakes its close frame.
        await socket.send(["x" * AudioLimits.max_bytes, "x"])
        assert (await closing(socket))[0] == 1009


async def test_keys_idleness_and_no_voice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a speech model a session is told at once that nothing is spoken."""
    with running_server(api_key=("secret",)) as server:
        url = server.url.replace("http", "ws") + "/v1/realtime?model=tiny"
        wrong = [Subprotocol("realtime"), Subprotocol("openai-insecure-api-key.other")]
        for protocols in (None, wrong, [Subprotocol("secret")]):
            with pytest.raises(websockets.InvalidStatus):
                async with connect(url, subprotocols=protocols):
                    pass
        browser = [Subprotocol("realtime"), Subprotocol("openai-insecure-api-key.secret")]
        async with connect(url, subprotocols=browser) as socket:
            assert socket.subprotocol == "realtime"
            assert (await said(socket))["type"] == "session.created"
            for modality, unsupported in (("audio", ["session.output_modalities"]), ("text", [])):
                await tell(socket, "session.update", session={"output_modalities": [modality]})
                updated = await said(socket)
                assert [field["param"] for field in updated.get("unsupported", [])] == unsupported
                assert updated["session"]["output_modalities"] == ["text"]
        monkeypatch.setattr("service.api.realtime.websocket.IDLE", 0.2)
        async with connect(url, additional_headers={"Authorization": "Bearer secret"}) as socket:
            assert (await said(socket))["session"]["output_modalities"] == ["text"]
            assert await closing(socket) == (1008, "idle")


async def test_at_a_shutdown_a_response_ends_and_the_session_with_it() -> None:
    with running_server(drain_delay=0) as server:
        async with connect(server.url.replace("http", "ws") + "/v1/realtime?model=tiny") as socket:
            await said(socket)
            await add(socket, "!slow This takes its time.")
            await tell(socket, "response.create")
            await up_to(socket, "response.output_text.delta")
            server.server.drain()
            assert (await up_to(socket, "response.done"))[-1]["response"]["status"] == "completed"
            assert (await closing(socket))[0] == 1001


async def test_openai_python_converses(conversing: Conversing) -> None:
    """With a picture, in text and speech; types are those that the client names."""
    client = AsyncOpenAI(base_url=f"{conversing.server.url}/v1", api_key="none", max_retries=0, timeout=GENEROUS)
    async with client, client.realtime.connect(model="tiny") as connection:
        assert (await connection.recv()).type == "session.created"
        await connection.session.update(session={"type": "realtime", "output_modalities": ["audio"]})
        assert (await connection.recv()).type == "session.updated"
        item: Any = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "So be it."}]}
        await connection.conversation.item.create(item=item)
        await connection.response.create()
        text, sound = "", b""
        async for event in connection:
            if event.type == "response.output_audio_transcript.delta":
                text += event.delta
            elif event.type == "response.output_audio.delta":
                sound += base64.b64decode(event.delta)
            elif event.type == "response.done":
                assert event.response.status == "completed" and event.response.usage is not None
                break
        assert text == "So be it." and len(sound) == PATCH
        await connection.input_audio_buffer.clear(event_id="ears")
        error: Any = await connection.recv()
        assert error.type == "error" and error.error.event_id == "ears" and error.error.code == "unsupported_event"


async def test_a_large_event_is_read_and_shown_outside_the_event_loop(
    conversing: Conversing, socket: ClientConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And keeps its place before a small one that comes while a thread has it."""
    worked: list[tuple[int, bool]] = []
    parse, as_text = websocket.parse, sockets.as_text

    def noted(text: Any) -> Any:
        worked.append((len(text), threading.current_thread().name == "server"))
        return text

    monkeypatch.setattr(websocket, "parse", lambda raw, kind: parse(noted(raw), kind))
    monkeypatch.setattr(sockets, "as_text", lambda shown: noted(as_text(shown)))
    long = "x" * (LARGE_BODY + 1)
    await tell(socket, "conversation.item.create", item=message(long, id="large"))
    await tell(socket, "conversation.item.create", item=message("short", id="small"))
    await tell(socket, "conversation.item.retrieve", item_id="large")
    events = [await said(socket) for _ in range(5)]
    assert [(event["type"].rpartition(".")[2], event["item"]["id"]) for event in events] == [
        *(("added", "large"), ("done", "large")),
        *(("added", "small"), ("done", "small")),
        ("retrieved", "large"),
    ]
    assert {event["item"]["content"][0]["text"] for event in events} == {long, "short"}
    assert [in_loop for size, in_loop in worked if size > LARGE_BODY] == [False] * 5, "read twice, shown three times"
    assert all(in_loop for size, in_loop in worked if size <= LARGE_BODY)
