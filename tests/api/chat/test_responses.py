"""Completions and responses: the older and the newer form of a chat."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import APIError, OpenAI
from openai.types.responses import Response
from pydantic import BaseModel

from service.api.chat.responses import Item, Part, ResponsesBody, chat_body, turns_of
from tests.support.refusals import picture
from tests.support.servers import RunningServer
from tests.support.tool_samples import call_text

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def create(client: OpenAI, input: Any, **fields: Any) -> Any:
    return client.responses.create(model="tiny", input=input, **fields)


def test_a_response_has_the_fields_of_the_api(client: OpenAI) -> None:
    answer = create(client, "hello wörld", instructions="Be brief.", metadata={"a": "b"}, store=True, temperature=0.5)
    assert answer.id.startswith("resp_") and answer.object == "response" and answer.model == "tiny"
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert answer.output_text == "hello wörld" and message.content[0].annotations == []
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (12, 12, 24)
    assert answer.usage.input_tokens_details.cached_tokens == 1
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    assert (answer.tools, answer.tool_choice, answer.parallel_tool_calls) == ([], "auto", True)
    assert (answer.store, answer.text.format.type, answer.steps["total"]) == (False, "text", 13)


def test_a_response_begins_with_its_id_and_has_no_empty_extensions(client: OpenAI) -> None:
    extra = {"seed": 7}
    raw = client.responses.with_raw_response.create(model="tiny", input="x", temperature=0, extra_body=extra)
    names = list(json.loads(raw.text))
    assert names[0] == "id" and names.index("output") < names.index("temperature")
    assert {*names} - {*Response.model_fields} == {"seed", "steps", "store"}


def test_a_stream_has_the_events_of_the_api(client: OpenAI) -> None:
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    events = list(create(client, "hey", stream=True, extra_body=thinks))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for kind, last in zip(kinds, ["", *kinds], strict=False) if kind != last] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "completed"),
    ]
    created, completed = events[0].response, events[-1].response
    assert (created.status, created.output, created.usage) == ("in_progress", [], None)
    assert completed.id == created.id and completed.output_text == "hey"
    thought, message = completed.output
    assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "hm", [])
    assert completed.usage.output_tokens_details.reasoning_tokens > 0
    for name, item in (("reasoning_text", thought), ("output_text", message)):
        told = [event for event in events if event.type.startswith(f"response.{name}")]
        assert {(event.item_id, event.content_index) for event in told} == {(item.id, 0)}
        assert "".join(event.delta for event in told[:-1]) == told[-1].text == item.content[0].text


def test_an_answer_that_a_limit_ends_is_incomplete(client: OpenAI) -> None:
    *_, last = create(client, "hello", max_output_tokens=2, stream=True)
    assert last.type == "response.incomplete"
    for answer in (last.response, create(client, "hello", max_output_tokens=2)):
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert answer.output_text == "he" and answer.output[0].status == "incomplete"


def test_calls_go_out_and_come_back(client: OpenAI) -> None:
    """The items of an answer are sent back as they came, with the outputs of its calls."""
    said = "Let me see.\n" + call_text("add", a=1) + "\n" + call_text("add", a=2)
    asked: list[Any] = [{"role": "user", "content": said}]
    answer = create(client, asked, tools=[TOOL])
    message, *calls = answer.output
    assert message.content[0].text == "Let me see."
    told = [(call.type, call.name, json.loads(call.arguments)) for call in calls]
    assert told == [("function_call", "add", {"a": 1}), ("function_call", "add", {"a": 2})]
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": text}
        for call, text in zip(calls, ("one", [{"type": "input_text", "text": "two"}]), strict=True)
    ]
    assert create(client, [*asked, *answer.output, *results], tools=[TOOL]).output_text == "two"

    events = list(create(client, said, tools=[TOOL], stream=True))
    begun = [event.item for event in events if event.type == "response.output_item.added"]
    assert [item.type for item in begun] == ["message", "function_call", "function_call"]
    assert [item.arguments for item in begun[1:]] == ["", ""]
    told = [event for event in events if event.type == "response.function_call_arguments.delta"]
    for item, call in zip(begun[1:], calls, strict=True):
        assert "".join(event.delta for event in told if event.item_id == item.id) == call.arguments
    with client.responses.stream(model="tiny", input=said, tools=[TOOL]) as stream:
        assert [item.type for item in stream.get_final_response().output] == ["message", *["function_call"] * 2]


def test_parse_reads_the_schema_of_a_class(client: OpenAI) -> None:
    class City(BaseModel):
        name: str

    asked: Any = {"model": "tiny", "input": '{"name": "Rome"}', "text_format": City}
    assert client.responses.parse(**asked).output_parsed == City(name="Rome")
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_parsed == City(name="Rome")


def test_log_probabilities_where_they_are_asked_for(client: OpenAI) -> None:
    answer = create(client, "abc", include=["message.output_text.logprobs"], top_logprobs=1)
    assert [one.token for one in answer.output[0].content[0].logprobs] == ["a", "b", "c"]
    assert create(client, "abc").output[0].content[0].logprobs == []


def test_pictures_of_users_and_tools(client: OpenAI) -> None:
    image = {"type": "input_image", "image_url": picture(), "detail": "low"}
    answer = create(client, [{"role": "user", "content": [{"type": "input_text", "text": "hi"}, image]}])
    assert answer.usage.input_tokens_details.image_tokens == 4
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": [image]}
    answer = create(client, [{"role": "user", "content": "hi"}, call, output])
    assert answer.usage.input_tokens_details.image_tokens == 4


def test_items_that_follow_each_other_are_one_message() -> None:
    items = [
        Item(role="user", content="hi"),
        Item(type="reasoning", content=[Part(type="reasoning_text", text="hm")], summary=[]),
        Item(type="message", role="assistant", content=[Part(type="output_text", text="wait")]),
        Item(type="function_call", call_id="c1", name="look", arguments="{}"),
        Item(type="function_call_output", call_id="c1", output="seen"),
        Item(type="reasoning", summary=[Part(type="summary_text", text="so")]),
        Item(type="function_call", call_id="c2", name="look"),
    ]
    body = ResponsesBody(model="m", input=items, instructions="Be brief.")
    turns = turns_of(body)
    messages = chat_body(body, [turn.message for turn in turns]).messages
    assert [message.role for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert [message.reasoning_content for message in messages] == [None, None, "hm", None, "so"]
    assert [len(message.tool_calls or ()) for message in messages] == [0, 0, 1, 0, 1]
    assert turns[4].source == "input[5]" and turns[4].calls == ["input[6]"]


def test_a_stream_that_fails_ends_with_an_error(client: OpenAI, server: RunningServer) -> None:
    with pytest.raises(APIError) as failed:
        list(create(client, "!fail and more", stream=True))
    assert failed.value.code
    assert 'endpoint="responses"' in httpx.get(f"{server.url}/metrics").text


def complete(client: OpenAI, prompt: Any, **fields: Any) -> Any:
    return client.completions.create(model="tiny", prompt=prompt, **fields)


def test_a_prompt_is_a_text_or_its_ids(client: OpenAI) -> None:
    for prompt in ("say it", ["say it"], list(b"say it"), [list(b"say it")]):
        answer = complete(client, prompt, max_tokens=4)
        assert answer.id.startswith("cmpl-") and (answer.object, answer.model) == ("text_completion", "tiny")
        (choice,) = answer.choices
        assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, "say ", "length", None)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 4)


def test_a_completion_has_sixteen_tokens_and_its_reasoning(client: OpenAI) -> None:
    assert complete(client, "x" * 40).choices[0].text == "x" * 16
    assert complete(client, "<think>a</think>b", max_tokens=40).choices[0].text == "<think>a</think>b"


def test_a_stream_has_all_choices_and_the_usage(client: OpenAI) -> None:
    *chunks, last = complete(client, "abc", n=2, stream=True, stream_options={"include_usage": True})
    for index in range(2):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.text for choice in own) == "abc"
        assert [choice.finish_reason for choice in own] == [*(None,) * (len(own) - 1), "stop"]
    assert last.choices == [] and last.usage.completion_tokens == 6
    assert [choice.text for choice in complete(client, "abc", n=2, stop="c").choices] == ["ab", "ab"]
