"""The routes over an engine that answers with the prompt's own bytes: everything but the model."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from typing import Any

import httpx
import pytest
from openai import APIError, BadRequestError, OpenAI
from PIL import Image

from models.interfaces.media import MediaItem, TokenizedChat
from service.api.chat.prompt import SMALL_PROMPT
from service.hub.catalog import Catalog
from tests.support import fake_engine
from tests.support.fake_chat import FakeProcessor, fake_catalog
from tests.support.refusals import frame_list, picture
from tests.support.servers import RunningServer, running_server
from tests.support.sse import sse_events
from tests.support.waiting import GENEROUS, until, wait

USER = {"role": "user", "content": "hello"}


def ask(client: OpenAI, text: Any, **fields: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": text}], **fields)


def test_an_answer_with_usage(client: OpenAI) -> None:
    answer = ask(client, "hello wörld")
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == "tiny"
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hello wörld", "stop")
    assert choice.logprobs is None and choice.message.refusal is None
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (12, 12, 24)
    assert usage.prompt_tokens_details.cached_tokens == 1


def test_an_answer_says_how_it_was_computed(client: OpenAI) -> None:
    alone = {"total": 4, "replayed": 3, "batch_size": 1.0, "encoded_media": 0}
    assert ask(client, "abc").steps == alone
    assert ask(client, "abc", n=2).steps == {**alone, "total": 8, "replayed": 6}
    *others, last = ask(client, "abc", stream=True, stream_options={"include_usage": True})
    assert last.steps == alone and not any("steps" in chunk.model_extra for chunk in others)


def test_a_stream_has_the_shape_that_clients_expect(client: OpenAI) -> None:
    chunks = list(ask(client, "wörd", stream=True))
    assert len({chunk.id for chunk in chunks}) == 1 and len({chunk.created for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "wörd"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_ends_with_usage_when_asked(client: OpenAI) -> None:
    chunks = list(ask(client, "abc", stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 3
    assert all(chunk.usage is None for chunk in chunks[:-1])
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [chunk.usage.completion_tokens for chunk in ask(client, "abc", stream=True, stream_options=options)]
    assert counts == sorted(counts) and counts[-1] == 3


def test_the_raw_stream_ends_with_done(server: RunningServer) -> None:
    url, body = f"{server.url}/v1/chat/completions", {"model": "tiny", "messages": [USER], "stream": True}
    with_usage = httpx.post(url, json={**body, "stream_options": {"include_usage": True}})
    assert '"usage":null' in sse_events(with_usage.text)[0]
    response = httpx.post(url, json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.text.endswith("\n\ndata: [DONE]\n\n")
    assert "usage" not in json.loads(sse_events(response.text)[0].removeprefix("data: "))


def test_several_answers(client: OpenAI) -> None:
    answer = ask(client, "abcd", n=3)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(n, "abcd") for n in range(3)]
    assert answer.usage.completion_tokens == 12
    texts = {0: "", 1: ""}
    for chunk in ask(client, "abcd", n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: "abcd", 1: "abcd"}


def test_a_refusal_of_an_assistant_is_what_it_said(client: OpenAI) -> None:
    part: dict[str, Any] = {"refusal": "No."}
    for said in ({"content": None, **part}, {"content": [{"type": "refusal", **part}]}, {"content": [part]}):
        messages: Any = [{"role": "user", "content": "Pick a lock."}, {"role": "assistant", **said}]
        answer = client.chat.completions.create(model="tiny", messages=messages)
        assert answer.choices[0].message.content == "No."


def test_stop_strings_and_lengths_cut_the_answer(client: OpenAI) -> None:
    chunks = list(ask(client, "one two three", stop=["zz", "two"], stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert (text, chunks[-1].choices[0].finish_reason) == ("one ", "stop")
    answer = ask(client, "one two three", stop=["zz", "two"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one ", "stop")
    assert answer.usage.completion_tokens == 7
    for field in ("max_tokens", "max_completion_tokens"):
        (choice,) = ask(client, "abcdef", **{field: 4}).choices
        assert (choice.message.content, choice.finish_reason) == ("abcd", "length")


def test_logprobs_come_with_bytes_and_alternatives(client: OpenAI) -> None:
    answer = ask(client, "aé", logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert [(entry.token, entry.bytes) for entry in entries] == [("a", [97]), ("\ufffd", [195]), ("\ufffd", [169])]
    assert [top.logprob for top in entries[0].top_logprobs] == [-0.5, -1.5]
    chunks = list(ask(client, "ab", logprobs=True, stream=True))
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert [entry.token for entry in streamed] == ["a", "b"] and streamed[0].top_logprobs == []


def test_reasoning_goes_to_its_own_field(client: OpenAI) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    whole = ask(client, "42", extra_body=thinking)
    assert whole.usage.completion_tokens_details.reasoning_tokens > 0
    deltas = [chunk.choices[0].delta for chunk in ask(client, "42", stream=True, extra_body=thinking)]
    for name, text in (("reasoning_content", "hm"), ("reasoning", "hm"), ("content", "42")):
        assert "".join(getattr(delta, name, None) or "" for delta in deltas) == text
        assert getattr(whole.choices[0].message, name) == text


def test_pictures_and_frame_lists(client: OpenAI) -> None:
    parts = [
        {"type": "text", "text": "look: "},
        {"type": "image_url", "image_url": {"url": picture(), "detail": "low"}},
        {"image_url": picture(color="blue")},
        {"type": "video_url", "video_url": {"url": frame_list(5), "max_frames": 3}},
    ]
    answer = ask(client, parts)
    assert answer.choices[0].message.content == "look: "
    details = answer.usage.prompt_tokens_details
    assert (details.text_tokens, details.image_tokens, details.video_tokens) == (6, 8, 4)


@pytest.mark.parametrize(("pictures", "frames"), [(0, 10), (1, 5)])
def test_fewer_frames_are_taken_of_a_video_of_many_pixels(pictures: int, frames: int) -> None:
    """Frames have 16 x 12 pixels; ten fit the request's bound, five into half of it."""
    with (
        running_server(max_request_pixels=10 * 16 * 12) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        video = {"type": "video_url", "video_url": {"url": frame_list(20)}}
        ask(client, [video, *[{"type": "image_url", "image_url": {"url": picture()}}] * pictures])
        assert server.metric("request_video_frames_sum") == frames


def test_unknown_fields_and_neutral_values_change_nothing(client: OpenAI) -> None:
    """Nor does an alias: the answer has the first name."""
    extra = {"safety_identifier": "x", "tools": [], "response_format": {"type": "text"}, "n": None}
    answer = ask(client, "same", user="me", extra_body=extra | {"model": "tiny-alias"})
    assert (answer.choices[0].message.content, answer.model) == ("same", "tiny")


def test_a_stream_that_fails_says_so(client: OpenAI) -> None:
    with pytest.raises(APIError, match="failed by request"):
        list(ask(client, "!fail", stream=True))


async def test_a_client_that_leaves_ends_the_work(server: RunningServer) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "!endless"}], "max_tokens": 4000}
    left = 'client_disconnects_total{endpoint="chat"}'
    before = server.metric(left)  # other files' tests share the server
    async with httpx.AsyncClient(base_url=server.url, timeout=GENEROUS) as http:
        for stream in (True, False):
            task = asyncio.create_task(http.post("/v1/chat/completions", json={**body, "stream": stream}))
            await until(lambda: server.context.engine.in_flight == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: server.context.engine.in_flight == 0)
            await until(lambda: server.context.admission.in_flight == 0)
    await asyncio.to_thread(wait, lambda: server.metric(left) >= before + 2, what="both are counted")


async def test_silence_is_broken_by_comments(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.api.http.streaming.KEEP_ALIVE_SECONDS", 0.2)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "!silent"}], "stream": True}
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=GENEROUS) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        lines = response.aiter_lines()
        assert [await anext(lines) for _ in range(4)] == [": keep-alive", "", ": keep-alive", ""]


PAGES, PAGE_SIZE = 100, 16
HELD = PAGES * PAGE_SIZE


@pytest.mark.parametrize(("pages", "longest"), [(PAGES, HELD), (fake_engine.PAGES, FakeProcessor.context_length)])
def test_the_longest_sequence_fits_context_and_cache(monkeypatch: pytest.MonkeyPatch, pages: int, longest: int) -> None:
    monkeypatch.setattr(fake_engine, "PAGES", pages)
    with running_server(num_engines=2) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        for card in (client.models.list().data[0], client.models.retrieve("tiny")):
            assert card.to_dict()["max_model_len"] == longest
        # Clients that shorten a conversation look for these words: LangChain for the first, many for the others.
        said = f"prompt is too long: this model's maximum context length is {longest} tokens"
        for length in (longest, 16 * longest + 1):
            with pytest.raises(BadRequestError, match=said) as refused:
                ask(client, "x" * length)
            assert refused.value.code == "context_length_exceeded"
        assert ask(client, "x" * (longest - 20), max_tokens=1).choices
        server.wait_idle()


@pytest.mark.slow
async def test_answers_end_as_those_that_reach_their_length() -> None:
    """None names a number of tokens, all would go on for longer than they may."""
    with running_server(request_timeout=6) as server:
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "!endless words"}]}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        async with httpx.AsyncClient(base_url=server.url, timeout=2 * GENEROUS) as http:
            answers = [http.post("/v1/chat/completions", json=asked | more) for more in ({}, {"n": 3}, streamed)]
            whole, several, stream = await asyncio.gather(*answers)
        for choice in (*whole.json()["choices"], *several.json()["choices"]):
            assert choice["finish_reason"] == "length" and choice["message"]["content"].startswith("!endless wo")
        assert whole.json()["usage"]["completion_tokens"] == len(whole.json()["choices"][0]["message"]["content"])
        *events, last, done = (one.removeprefix("data: ") for one in sse_events(stream.text))
        choices = [choice for one in events for choice in json.loads(one)["choices"]]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert {choice["finish_reason"] for choice in choices} == {None, "length"} and done == "[DONE]"
        assert json.loads(last)["usage"]["completion_tokens"] == len(text) > 0
        server.wait_idle()
        text = (await asyncio.to_thread(httpx.get, f"{server.url}/metrics")).text
        assert 'outcome="ok",status="200"} 3.0' in text and 'outcome="timeout"' not in text


class Waiting(FakeProcessor):
    """A picture is not ready before its prompt is tokenized."""

    context_length = 2 * SMALL_PROMPT

    def __init__(self) -> None:
        self.tokenized = threading.Event()

    def image(self, picture: Image.Image, *, detail: str = "auto", source: bytes | None = None) -> MediaItem:
        assert self.tokenized.wait(GENEROUS), "the text waits for the picture"
        return super().image(picture, detail=detail, source=source)

    def apply_chat_template(self, *messages: Any, **options: Any) -> TokenizedChat:
        self.tokenized.set()
        return super().apply_chat_template(*messages, **options)


@pytest.mark.parametrize(("pictures", "characters"), [(1, 5), (2, SMALL_PROMPT + 1)])
def test_text_does_not_wait_for_pictures(pictures: int, characters: int) -> None:
    model = replace(fake_catalog().models[0], load=Waiting)
    parts = [{"type": "image_url", "image_url": {"url": picture()}} for _ in range(pictures)]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": "x" * characters}]}
    with running_server(Catalog([model])) as server:
        body = {"model": "tiny", "messages": [message], "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=2 * GENEROUS)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == characters + 4 * pictures
