"""Spoken answers over an engine without models: what is said, how it is sent, what is refused, what is left behind."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from openai import APIError, BadRequestError, InternalServerError, OpenAI

from service.api.chat.schema import MAX_TRANSCRIPT, id_of
from tests.support.fake_engine import ENDLESS, MUTE, PATCH, FakeEngine
from tests.support.fake_talker import talking_catalog
from tests.support.refusals import assert_refused
from tests.support.servers import RunningServer, running_server
from tests.support.tool_samples import TOOLS, call_text
from tests.support.waiting import GENEROUS, wait

SPOKEN: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"voice": "default", "format": "pcm16"}}
ROME, SUM = call_text("get_weather", city="Rome"), call_text("add", a=2, b=40)
CALLS = [("get_weather", {"city": "Rome"}), ("add", {"a": 2, "b": 40})]
TICK_BYTES = PATCH  # 0.1 s at 24 kHz, 16 bits


class Talking:
    def __init__(self, server: RunningServer, talker: FakeEngine) -> None:
        self.server = server
        self.talker = talker
        self.client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=GENEROUS)

    def ask(self, text: str, **fields: Any) -> Any:
        messages = [{"role": "user", "content": text}]
        return self.client.chat.completions.create(model="tiny", messages=messages, **{**SPOKEN, **fields})

    def said(self) -> list[str]:
        """Segments of the newest answer."""
        return self.talker.texts[self.talker.requests[-1].request_id]


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talking]:
    talker = FakeEngine()

    flags: Any = {"voices_dir": tmp_path_factory.mktemp("voices"), "max_n": 4, "max_speech_chars": 400}
    with running_server(talking_catalog(), engine=talker.serve, fixed_voices="off", **flags) as server:
        yield Talking(server, talker)


@pytest.fixture(autouse=True)
def nothing_is_left(talking: Talking) -> Iterator[None]:
    yield
    talking.server.wait_idle()
    wait(lambda: talking.talker.idle, what="the engine has nothing to do")


def samples(data: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(data, validate=True), "<i2")


def called(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


def audio_of(chunks: list[Any]) -> list[Any]:
    return [choice.delta.audio for chunk in chunks for choice in chunk.choices if choice.delta.audio]


def transcript(chunks: list[Any]) -> str:
    return "".join(entry.transcript or "" for entry in audio_of(chunks))


def test_an_answer_is_text_and_audio(talking: Talking) -> None:
    answer = talking.ask("One, two and three is it. Four five six.")
    message, usage = answer.choices[0].message, answer.usage
    assert message.content is None and message.audio.id.startswith("audio_")
    assert message.audio.transcript == "One, two and three is it. Four five six."
    assert talking.said() == ["One, two and three is it.", "Four five six."]
    assert len(samples(message.audio.data)) * 2 == 2 * TICK_BYTES
    assert usage.completion_tokens_details.audio_tokens == 2
    assert usage.completion_tokens == 40 + 2
    assert not talking.talker.requests[-1].live


def test_a_stream_has_transcript_and_audio_that_clients_put_together(talking: Talking) -> None:
    text = "Here I am for you, to say it. And this, too."
    chunks = list(talking.ask(text, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    audio = audio_of(chunks)
    assert [entry.id for entry in audio if entry.id] == [audio[-1].id]
    assert transcript(chunks) == text
    pieces = [entry.data for entry in audio if entry.data]
    assert len(pieces) > 1
    assert len(samples("".join(pieces))) == sum(len(samples(piece)) for piece in pieces) == 3 * PATCH // 2
    assert audio[-1].expires_at
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens_details.audio_tokens == 3
    assert talking.talker.requests[-1].live


def test_an_answer_can_be_sent_back_by_its_id(talking: Talking) -> None:
    whole = talking.ask("The first answer.").choices[0].message.audio
    streamed = audio_of(list(talking.ask("It came in a stream.", stream=True)))[-1]
    for audio, text in ((whole, whole.transcript), (streamed, "It came in a stream.")):
        assert audio.expires_at > time.time() + 3000
        for empty in ({}, {"content": None}, {"content": ""}):
            messages: Any = [{"role": "assistant", "audio": {"id": audio.id}, **empty}]
            answer = talking.client.chat.completions.create(model="tiny", messages=messages)
            assert answer.choices[0].message.content == text


def test_an_answer_without_its_transcript_is_refused(talking: Talking) -> None:
    ids = ("audio_0", "", "é", id_of("cut off")[:-3], id_of("x" * (MAX_TRANSCRIPT + 1)))
    nothing = ({}, {"id": None, "transcript": None})
    for audio, field in [*(({"id": id}, "id") for id in ids), *((audio, "transcript") for audio in nothing)]:
        messages: Any = [{"role": "assistant", "audio": audio}]
        with pytest.raises(BadRequestError, match="transcript") as refused:
            talking.client.chat.completions.create(model="tiny", messages=messages, **SPOKEN)
        assert refused.value.param == f"messages[0].audio.{field}"


def test_ids_are_read_no_further_than_the_context_goes(talking: Talking) -> None:
    messages: Any = [{"role": "assistant", "audio": {"id": id_of("x" * MAX_TRANSCRIPT)}}] * 50
    with pytest.raises(BadRequestError, match=f"{MAX_TRANSCRIPT} characters given") as refused:
        talking.client.chat.completions.create(model="tiny", messages=messages)
    assert refused.value.code == "context_length_exceeded"


def test_a_text_before_calls_is_said_and_the_calls_are_not(talking: Talking) -> None:
    answer = talking.ask(f"I look it up {ROME}\n{SUM}", tools=TOOLS).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    assert called(answer.message) == CALLS
    assert answer.message.audio.transcript == "I look it up" and answer.message.audio.finish_reason == "stop"
    assert talking.said() == ["I look it up"]
    assert len(samples(answer.message.audio.data)) == PATCH // 2


def test_a_turn_of_calls_alone_has_no_audio(talking: Talking) -> None:
    before = len(talking.talker.requests)
    answer = talking.ask(f"{ROME}\n{SUM}", tools=TOOLS, tool_choice="required")
    message = answer.choices[0].message
    assert (message.content, message.audio) == (None, None) and called(message) == CALLS
    assert answer.usage.completion_tokens_details.audio_tokens == 0
    chunks = list(talking.ask(f"{ROME}\n{SUM}", tools=TOOLS, stream=True))
    assert all(choice.delta.audio is None for chunk in chunks for choice in chunk.choices)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert len(talking.talker.requests) == before


def test_speech_that_ends_at_its_cap_says_so(talking: Talking) -> None:
    """The speech's own end, and the text's."""
    talking.talker.runaways = 1
    (whole,) = talking.ask("This is said. And this.").choices
    talking.talker.runaways = 1
    chunks = list(talking.ask("This is said. And this.", stream=True))
    for audio, choice in ((whole.message.audio, whole), (audio_of(chunks)[-1], chunks[-1].choices[0])):
        assert (audio.finish_reason, choice.finish_reason) == ("length", "stop")


def test_what_is_written_and_what_of_it_is_said(talking: Talking) -> None:
    """No markup, no letters that the voice does not know, nothing behind a stop string, no reasoning."""
    markup = "It is **very** `big`:\n\n```py\nf(x)\n```\n\n- See [the page](http://x.y/z)."
    unknown = "This is one. Now ж ж ж is two. And three."
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    for text, fields, written, said in (
        (markup, {}, markup, "It is very big: See the page."),
        (unknown, {}, unknown, "This is one. And three."),
        ("Say this much. STOP and not this.", {"stop": "STOP"}, "Say this much. ", "Say this much."),
        ("Aloud.", {"extra_body": thinking}, "Aloud.", "Aloud."),
    ):
        (choice,) = talking.ask(text, **fields).choices
        assert (choice.message.audio.transcript, choice.finish_reason) == (written, "stop")
        assert " ".join(talking.said()) == said
    assert choice.message.reasoning_content == "hm"
    silent = talking.ask("***").choices[0].message.audio
    assert silent.transcript == "***" and silent.data == ""


def test_a_long_answer_ends_where_the_audio_may(talking: Talking) -> None:
    text = "0123456 89. " * 50
    chunks = list(talking.ask(text, stream=True))
    assert transcript(chunks) == text[:400]
    assert chunks[-1].choices[0].finish_reason == "length"
    whole = talking.ask(text).choices[0]
    assert (whole.message.audio.transcript, whole.finish_reason) == (text[:400], "length")


def test_text_and_voice_fail_together(talking: Talking) -> None:
    for stream, error in ((True, APIError), (False, InternalServerError)):
        with pytest.raises(error, match="the voice failed"):
            list(talking.ask(f"!endless Begin it, then {MUTE} it goes. And on.", stream=stream))
        with pytest.raises(APIError):
            list(talking.ask("!fail", stream=stream))


def test_leaving_frees_text_and_voice(talking: Talking) -> None:
    """The first sound comes while the text is being written."""
    body = {"model": "tiny", "stream": True, **SPOKEN}
    body["messages"] = [{"role": "user", "content": f"!endless This is the beginning, {ENDLESS}. "}]
    with httpx.stream("POST", f"{talking.server.url}/v1/chat/completions", json=body, timeout=GENEROUS) as answer:
        lines = (line for line in answer.iter_lines() if '"data"' in line)
        next(lines)
        assert talking.talker.chats and talking.talker.speeches
    # nothing_is_left: both end without the end of the answer, which has none


def test_what_does_not_fit_is_refused_by_name(talking: Talking) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], **SPOKEN}
    assert_refused(f"{talking.server.url}/v1/chat/completions", "spoken", **asked)


def test_the_speech_model_is_chosen_by_setting_or_request(tmp_path: Any) -> None:
    talker = FakeEngine()
    flags: dict[str, Any] = {"voices_dir": tmp_path, "fixed_voices": "off"}

    def speaker(server: RunningServer, **audio: Any) -> str:
        """The model that speaks."""
        Talking(server, talker).ask("Say it.", audio={"format": "pcm16", **audio})
        return talker.requests[-1].model

    with running_server(talking_catalog(2), engine=talker.serve, **flags) as server:
        with pytest.raises(BadRequestError) as refused:
            speaker(server)
        assert refused.value.param == "audio.model" and speaker(server, model="talker-1") == "talker-1"
    flags["spoken_answer_model"] = "talker-1"
    with running_server(talking_catalog(2), engine=talker.serve, **flags) as server:
        assert (speaker(server), speaker(server, model="talker")) == ("talker-1", "talker")


def test_without_a_speech_model_nothing_is_spoken(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="no speech model is served"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], **SPOKEN)
