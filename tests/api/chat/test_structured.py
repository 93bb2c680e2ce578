"""Structured output over HTTP, from the embedded model in a real server, with OpenAI's own client."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.media.samples import data_url
from tests.support.processes import ROOT, ServerProcess

pytestmark = pytest.mark.slow
MODEL = "reprise/qwen2_vl"


@pytest.fixture
def client(embedded_server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{embedded_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


PICTURE = {"type": "image_url", "image_url": {"url": data_url((ROOT / "docs/images/shapes.png").read_bytes())}}


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"choice": ["red", "blue"]}, "red|blue"),
        ({"regex": "[0-9]{3}-[a-c]"}, "[0-9]{3}-[a-c]"),
        ({"grammar": 'start: "<" /[a-z]{2}/ ">"'}, "<[a-z]{2}>"),
        ({"json": '{"type": "integer", "minimum": 10, "maximum": 19}'}, "1[0-9]"),
        ({"json": {"enum": [1, 2]}}, "[12]"),
    ],
    ids=str,
)
def test_every_answer_matches(client: OpenAI, outputs: dict[str, Any], pattern: str) -> None:
    sampling: Any = {"n": 3, "seed": 1, "temperature": 1.5, "max_tokens": 20}
    messages: Any = [{"role": "user", "content": [PICTURE, {"type": "text", "text": "What is in the picture?"}]}]
    completion = client.chat.completions.create(
        model=MODEL, messages=messages, **sampling, extra_body={"structured_outputs": outputs}
    )
    for choice in completion.choices:
        assert choice.finish_reason == "stop" and re.fullmatch(pattern, choice.message.content or "")


def test_a_picture_that_a_tool_returns_is_seen_and_cached(client: OpenAI) -> None:
    call: Any = {"id": "c1", "type": "function", "function": {"name": "shot", "arguments": "{}"}}
    shot = [{"type": "text", "text": "done"}, PICTURE]
    messages = [
        {"role": "user", "content": "Take a picture."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": shot},
        {"role": "user", "content": "What shape is red?"},
    ]
    one, again = (client.chat.completions.create(model=MODEL, messages=messages, temperature=0) for _ in range(2))
    assert "circle" in one.choices[0].message.content == again.choices[0].message.content
    details = again.usage.prompt_tokens_details
    assert details.image_tokens > 0 and details.cached_tokens > details.image_tokens
    assert again.steps["encoded_media"] == 0
