"""LangChain as it is installed: structured output in its three ways, and an agent with two tools."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.support.optional import needed
from tests.support.processes import ROOT, ServerProcess
from tests.support.servers import RunningServer, running_server
from tests.support.tool_samples import call_text

PICTURE = ROOT / "docs/images/shapes.png"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Seen(BaseModel):
    """A shape in the picture."""

    shape: Literal["circle", "square", "triangle"]


def chat(url: str, model: str, **fields: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": 200, "max_retries": 0, **fields}
    return needed("langchain_openai").ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", **fields)


@pytest.fixture(scope="module")
def scripted() -> Iterator[RunningServer]:
    """Its model says the text of the last message."""
    with running_server() as server:
        yield server


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_structured_output_about_a_picture(embedded_server: ServerProcess, method: str) -> None:
    model = chat(embedded_server.url, "reprise/qwen2_vl").with_structured_output(Seen, method=method)
    url = f"data:image/png;base64,{base64.b64encode(PICTURE.read_bytes()).decode()}"
    question = {"type": "text", "text": "What shape is red? Answer in JSON."}
    seen = model.invoke([("user", [{"type": "image_url", "image_url": {"url": url}}, question])])
    assert isinstance(seen, Seen)
    if method != "function_calling":  # the model was trained for JSON and not for tools
        assert seen.shape == "circle"


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_with_two_tools(scripted: RunningServer, streamed: bool) -> None:
    """What a tool returns is what the model says next: a call of the other tool, then the answer."""
    calls: list[tuple[str, Any]] = []

    def get_weather(city: str) -> str:
        """The weather of a city."""
        calls.append(("get_weather", city))
        return call_text("add", a=len(city), b=38)

    def add(a: int, b: int) -> str:
        """The sum of two numbers."""
        calls.append(("add", (a, b)))
        return f"It is {a + b} degrees."

    create_agent = needed("langchain.agents").create_agent
    agent = create_agent(chat(scripted.url, "tiny", streaming=streamed), [get_weather, add])
    question = "Let me see.\n" + call_text("get_weather", city="Rome")
    messages = agent.invoke({"messages": [{"role": "user", "content": question}]})["messages"]
    assert calls == [("get_weather", "Rome"), ("add", (4, 38))]
    assert messages[1].content == "Let me see." and messages[-1].content == "It is 42 degrees."
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai", "tool", "ai"]
    assert messages[1].response_metadata["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_over_responses(scripted: RunningServer, streamed: bool) -> None:
    def add(a: int, b: int) -> str:
        """The sum of two numbers."""
        return f"It is {a + b}."

    create_agent = needed("langchain.agents").create_agent
    agent = create_agent(chat(scripted.url, "tiny", streaming=streamed, use_responses_api=True), [add])
    messages = agent.invoke({"messages": [{"role": "user", "content": call_text("add", a=4, b=38)}]})["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    assert messages[-1].text == "It is 42." and messages[-1].usage_metadata["output_tokens"] > 0


@pytest.mark.parametrize("streamed", [False, True])
def test_structured_output_over_responses(scripted: RunningServer, streamed: bool) -> None:
    model = chat(scripted.url, "tiny", streaming=streamed, use_responses_api=True)
    seen = model.with_structured_output(Seen, method="json_schema").invoke('{"shape": "circle"}')
    assert seen == Seen(shape="circle")


def test_a_call_that_was_cut_off_goes_back_with_an_error(scripted: RunningServer) -> None:
    """LangChain keeps it as an invalid call, and agents answer it."""
    messages = needed("langchain_core.messages")
    tools = [{"name": "note", "description": "Notes a text.", "parameters": {"properties": {"text": {}}}}]
    said = call_text("note", text="something long")
    model = chat(scripted.url, "tiny", max_tokens=said.index("long")).bind_tools(tools)
    cut = model.invoke([("user", said)])
    assert cut.response_metadata["finish_reason"] == "length" and not cut.tool_calls
    (call,) = cut.invalid_tool_calls
    result = messages.ToolMessage("Not valid.", tool_call_id=call["id"])
    assert model.invoke([("user", said), cut, result]).content == "Not valid."


def test_a_prompt_that_is_too_long_is_known_as_such(scripted: RunningServer) -> None:
    overflow = needed("langchain_core.exceptions").ContextOverflowError
    with pytest.raises(overflow):
        chat(scripted.url, "tiny").invoke("x" * 5000)
