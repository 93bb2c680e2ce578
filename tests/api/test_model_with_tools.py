"""Tools with the embedded model, which was not trained for them: only the grammar makes it call."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, ConfigDict, Field

from tests.support.processes import ROOT, ServerProcess

pytestmark = pytest.mark.slow

MODEL = "reprise/qwen2_vl"
PICTURE = ROOT / "docs/images/shapes.png"


class Paint(BaseModel):
    """Paints a shape."""

    model_config = ConfigDict(extra="forbid")
    shape: Literal["circle", "square"]
    size: int = Field(ge=1, le=9)
    colors: list[Literal["red", "blue"]] = Field(min_length=1, max_length=2)


class Erase(BaseModel):
    """Erases everything or a part."""

    model_config = ConfigDict(extra="forbid")
    everything: bool


TOOLS: list[Any] = [pydantic_function_tool(Paint), pydantic_function_tool(Erase)]
KINDS: dict[str, type[BaseModel]] = {"Paint": Paint, "Erase": Erase}


@pytest.fixture
def client(embedded_server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{embedded_server.url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        yield client


def ask(client: OpenAI, **fields: Any) -> Any:
    messages = [{"role": "user", "content": "Paint a red circle."}]
    fields = {"messages": messages, "tools": TOOLS, "max_tokens": 400, "temperature": 0, **fields}
    return client.chat.completions.create(model=MODEL, **fields)


def check(call: Any) -> None:
    KINDS[call.function.name].model_validate_json(call.function.arguments, strict=True)


@pytest.mark.parametrize("seed", range(3))
def test_required_calls_fit_whatever_is_drawn(client: OpenAI, seed: int) -> None:
    answer = ask(client, tool_choice="required", parallel_tool_calls=False, temperature=2, seed=seed, n=2)
    for one in answer.choices:
        assert one.finish_reason == "tool_calls" and one.message.content is None
        (call,) = one.message.tool_calls
        check(call)


@pytest.mark.parametrize("name", KINDS)
def test_a_named_tool_is_called_also_in_a_stream(client: OpenAI, name: str) -> None:
    choice = {"type": "function", "function": {"name": name}}
    (one,) = ask(client, tool_choice=choice).choices
    (call,) = one.message.tool_calls
    assert call.function.name == name
    check(call)
    deltas = [chunk.choices[0].delta for chunk in ask(client, tool_choice=choice, stream=True)]
    parts = [part for delta in deltas for part in delta.tool_calls or []]
    assert parts[0].function.name == name
    assert "".join(part.function.arguments for part in parts) == call.function.arguments


def test_auto_may_answer_in_text_and_none_does(client: OpenAI) -> None:
    (free,) = ask(client).choices
    assert (free.finish_reason == "tool_calls") is bool(free.message.tool_calls)
    (text,) = ask(client, tool_choice="none").choices
    assert text.message.content and not text.message.tool_calls and text.finish_reason == "stop"
    without = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Paint a red circle."}], temperature=0
    )
    assert without.choices[0].message.content == text.message.content


def test_a_picture_that_a_tool_returns_is_seen_and_cached(client: OpenAI) -> None:
    url = f"data:image/png;base64,{base64.b64encode(PICTURE.read_bytes()).decode()}"
    call: Any = {"id": "c1", "type": "function", "function": {"name": "shot", "arguments": "{}"}}
    shot = [{"type": "text", "text": "done"}, {"type": "image_url", "image_url": {"url": url}}]
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
