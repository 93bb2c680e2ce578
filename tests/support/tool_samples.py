"""Tools for tests, and answers that call them in the format of models/text/tools.py."""

from __future__ import annotations

import json
from typing import Any


def tool(name: str, description: str | None = None, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    """A tool as clients send it."""
    fields = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


WEATHER = tool(
    "get_weather",
    "The weather of a city.",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
ADD = tool(
    "add",
    "The sum of two numbers.",
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
)
TIME = tool("now")
TOOLS = [WEATHER, ADD, TIME]


def call_text(name: str, **arguments: Any) -> str:
    """What a model says to call a tool."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def xml_call_text(name: str, **arguments: Any) -> str:
    """What a model of Qwen3.5 says."""
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def asked(*calls: tuple[str, str, str], content: str | None = None) -> dict[str, Any]:
    """An assistant's message with (id, name, arguments) of its calls."""
    entries = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": text}} for id, name, text in calls
    ]
    return {"role": "assistant", "content": content, "tool_calls": entries}


def result(id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}
