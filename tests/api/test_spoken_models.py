"""Answers about a picture, spoken by the embedded models through the real server, as openai-python hears them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from openai import OpenAI

from tests.api.test_meaning import ONLY, SHAPES
from tests.support.processes import ServerProcess
from tests.support.tool_samples import result

MODEL = "reprise/qwen2_vl"
SPOKEN: dict[str, Any] = {
    "model": MODEL,
    "modalities": ["text", "audio"],
    "temperature": 0,
    "seed": 3,
    "audio": {"voice": "nova", "format": "wav", "max_len": 3},
}
PATCH_SECONDS = 0.16

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def client(embedded_server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{embedded_server.url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        yield client


def question(text: str) -> Any:
    url = "data:image/png;base64," + base64.b64encode(SHAPES.read_bytes()).decode()
    return [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]}
    ]


def test_a_streamed_answer_is_the_same_answer_and_sounds_the_same(client: OpenAI) -> None:
    asked = {**SPOKEN, "audio": {**SPOKEN["audio"], "format": "pcm16", "sample_rate": 48_000}}
    asked["messages"] = question("Is there a dog in the picture?")
    whole: Any = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(stream=True, **asked))
    audio: list[Any] = [choice.delta.audio for chunk in chunks for choice in chunk.choices if choice.delta.audio]
    text = "".join(entry.transcript or "" for entry in audio)
    assert text == whole.choices[0].message.audio.transcript == ONLY
    sound = base64.b64decode("".join(entry.data or "" for entry in audio))
    before = base64.b64decode(whole.choices[0].message.audio.data)
    assert len(sound) == len(before) > 2 * 7680 * 3
    difference = np.frombuffer(sound, "<i2").astype(int) - np.frombuffer(before, "<i2")
    assert np.abs(difference).max() <= 8


def test_a_call_is_not_spoken_and_the_answer_to_its_result_is(client: OpenAI) -> None:
    """Only the grammar makes the model call."""
    messages = question("What color is the square?")
    color = {"type": "object", "properties": {"color": {"enum": ["red", "blue"]}}, "required": ["color"]}
    paint = {"name": "paint", "parameters": {**color, "additionalProperties": False}}
    asked = {**SPOKEN, "tools": [{"type": "function", "function": paint}], "parallel_tool_calls": False}
    (one,) = client.chat.completions.create(messages=messages, tool_choice="required", **asked).choices
    calls = one.message.tool_calls
    assert one.finish_reason == "tool_calls" and calls and (one.message.content, one.message.audio) == (None, None)
    messages += [one.message, *(result(call.id, "Done.") for call in calls)]
    answer: Any = client.chat.completions.create(messages=messages, tool_choice="none", **asked)
    assert answer.choices[0].message.audio.transcript and answer.usage.completion_tokens_details.audio_tokens > 0
    audio = {"role": "assistant", "audio": {"id": answer.choices[0].message.audio.id}}
    again = [*messages, audio, {"role": "user", "content": "And the circle?"}]
    grown: Any = client.chat.completions.create(messages=again, tool_choice="none", **asked)
    assert grown.usage.prompt_tokens > answer.usage.prompt_tokens


def test_an_answer_that_fits_a_schema_is_spoken(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"color": {"enum": ["red", "blue"]}}, "required": ["color"]}
    schema["additionalProperties"] = False
    shape = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    messages = question("What color is the square?")
    answer: Any = client.chat.completions.create(messages=messages, response_format=shape, **SPOKEN)
    assert json.loads(answer.choices[0].message.audio.transcript)["color"] in ("red", "blue")
    assert answer.usage.completion_tokens_details.audio_tokens > 0
