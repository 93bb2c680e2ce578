"""Tools in prompts: what templates are given, and a block of text for templates that do not support tools.

A call stands in the text as <tool_call>, a JSON object with `name` and `arguments`, </tool_call>, and a result between
<tool_response> and </tool_response>: the format of Hermes 2 Pro, which Qwen2.5 and Qwen3 were trained with. Inside the
same tags, Qwen3-Coder and Qwen3.5 write <function=NAME>, <parameter=KEY>, the value and closing tags, each in a line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from models.interfaces.media import ChatMessage, Tool

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
RESULT_START, RESULT_END = "<tool_response>", "</tool_response>"
DEFAULT_SYSTEM = "You are a helpful assistant."
"""Text before the block if the conversation has no system message: the one that templates would have added."""

Escape = Callable[[str], str]
Turn = dict[str, Any]


def prompt_texts(messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> list[str]:
    """Every text of the request that becomes part of the prompt, without what the template adds."""
    texts = [part.text for message in messages for part in message.content if part.text is not None]
    for message in messages:
        texts += strings(message.reasoning)
        for call in message.tool_calls:
            texts += strings([call.name, call.arguments])
    for tool in tools:
        texts += strings([tool.name, tool.description, tool.parameters])
    return texts


def strings(value: Any) -> Iterator[str]:
    """All strings of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from strings(inner)


def escaped_calls(message: ChatMessage, escape: Escape) -> Turn:
    """The field of a template's turn that has the message's calls; no field where there are none."""
    if not message.tool_calls:
        return {}
    calls = [{"name": escape(call.name), "arguments": _escaped(call.arguments, escape)} for call in message.tool_calls]
    return {"tool_calls": [{"type": "function", "function": call} for call in calls]}


def escaped_tools(tools: Sequence[Tool], escape: Escape) -> list[dict[str, Any]]:
    """Tools as OpenAI's API writes them, which templates expect, every string escaped."""
    return [{"type": "function", "function": _escaped(_function(tool), escape)} for tool in tools]


def hermes_turns(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Turns for a template that does not support tools: the tools become a block of the system message, calls become
    text of their answer, and results become a message of the user."""
    plain: list[Turn] = []
    for turn in turns:
        if turn["role"] == "tool":
            result = _result(turn["content"])
            if plain and plain[-1].get("results"):
                plain[-1]["content"] = _joined(plain[-1]["content"], result)
            else:
                plain.append({"role": "user", "content": result, "results": True})
        elif calls := turn.get("tool_calls"):
            said = [turn["content"]] if turn["content"] else []
            kept = {name: value for name, value in turn.items() if name != "tool_calls"}
            plain.append({**kept, "content": "\n".join([*said, *map(_call_text, calls)])})
        else:
            plain.append(turn)
    return _with_block(plain, tools) if tools else plain


def _result(content: Any) -> Any:
    """content: a text, or a list of parts if there are pictures among them."""
    if isinstance(content, str):
        return f"{RESULT_START}\n{content}\n{RESULT_END}"
    opening, closing = ({"type": "text", "text": text} for text in (f"{RESULT_START}\n", f"\n{RESULT_END}"))
    return [opening, *content, closing]


def _joined(one: Any, other: Any) -> Any:
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}\n{other}"
    first, second = ([{"type": "text", "text": said}] if isinstance(said, str) else said for said in (one, other))
    return [*first, {"type": "text", "text": "\n"}, *second]


def _with_block(turns: list[Turn], tools: Sequence[Mapping[str, Any]]) -> list[Turn]:
    block = _BLOCK.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if not turns or turns[0]["role"] != "system":
        return [{"role": "system", "content": f"{DEFAULT_SYSTEM}\n\n{block}"}, *turns]
    return [{**turns[0], "content": f"{turns[0]['content']}\n\n{block}"}, *turns[1:]]


def _call_text(call: Mapping[str, Any]) -> str:
    return f"{CALL_START}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CALL_END}"


def _function(tool: Tool) -> dict[str, Any]:
    described = {} if tool.description is None else {"description": tool.description}
    return {"name": tool.name, **described, "parameters": tool.parameters}


def _escaped(value: Any, escape: Escape) -> Any:
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, Mapping):
        return {escape(key): _escaped(inner, escape) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(inner, escape) for inner in value]
    return value


# The wording of Qwen2.5's template: language models of that family know it.
_BLOCK = (
    "# Tools\n\n"
    "You may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n"
    "<tools>\n{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)
