"""The grammar of answers that may call tools: text, then calls in the format of models/tools.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from models.media import Tool
from models.tools import CALL_END, CALL_START
from service.api.chat.grammar import json_schema_grammar, lark_grammar, with_options
from service.api.chat.grammar_checks import GrammarChecks
from service.api.chat.tools import ToolUse
from service.api.http.errors import ApiError

_OPENING = frozenset(
    ("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref")
)
"""Keywords that say themselves what else an object may hold."""
BLANKS = " ?"
"""Between JSON's tokens in arguments: as models saw them in training, which is what templates make of earlier calls."""


def tool_grammar(use: ToolUse, *, answer: str = "", reasoning_end: str | None = None) -> str:
    """Answers of calls alone where calls are forced, else text with calls at its end, if any.

    answer: grammar of answers that call nothing; empty: any text. reasoning_end: the marker up to which an answer is
    reasoning, where it begins with some; nothing in it is a call.
    """
    calls = "call (SEPARATOR call)*" if use.several else "call"
    rules = [
        "TEXT: /(.|\\n)*/",
        "BREAK: /\\n{0,2}/",
        f"SEPARATOR: {json.dumps(chr(10) + CALL_START)}",
        f"""call: {json.dumps(chr(10) + '{"name": "')} function {json.dumps("}" + chr(10) + CALL_END)}""",
        f"function: {' | '.join(map(_function, use.callable))}",
    ]
    if use.forced:
        start = f"BREAK {json.dumps(CALL_START)} {calls}"
    elif answer:
        start = f"BREAK (@answer | {json.dumps(CALL_START)} {calls})"
    else:
        start = f"(TEXT | opening {calls})"
        rules.append(f"opening[lazy]: TEXT {json.dumps(CALL_START)}")
    if reasoning_end is not None:
        start = f"reasoning {start}"
        rules.append(f"reasoning[lazy]: TEXT {json.dumps(reasoning_end)}")
    grammar = lark_grammar("\n".join([f"start: {start}", *rules]))
    return grammar if use.forced or not answer else _beside(grammar, answer)


async def checked_tool_grammar(
    checks: GrammarChecks, use: ToolUse, client: str, *, answer: str = "", reasoning_end: str | None = None
) -> str:
    """What tool_grammar returns, once it has been checked. ApiError 400 that names the tool whose parameters cannot be
    used, or `tools`."""
    try:
        make = partial(tool_grammar, use, answer=answer, reasoning_end=reasoning_end)
        return await checks.checked(make, "tools", client)
    except ApiError as error:
        if error.status != 400:
            raise
        for tool in use.callable:
            field = f"tools[{use.tools.index(tool)}].function.parameters"
            await checks.checked(partial(json_schema_grammar, dict(tool.parameters)), field, client)
        raise


def _function(tool: Tool) -> str:
    schema = with_options(_closed(tool.parameters))
    schema["x-guidance"]["whitespace_pattern"] = BLANKS
    arguments = json.dumps(schema, ensure_ascii=False)
    return f"""{json.dumps(tool.name + '", "arguments": ')} %json {arguments}"""


def _closed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters that list what a function takes, without the leave to add more that JSON Schema gives by default."""
    listed, required = parameters.get("properties"), parameters.get("required", [])
    if not listed or not isinstance(listed, dict) or not isinstance(required, list) or _OPENING & set(parameters):
        return dict(parameters)
    if not all(isinstance(name, str) and name in listed for name in required):
        return dict(parameters)
    return {**parameters, "additionalProperties": False}


def _beside(grammar: str, answer: str) -> str:
    """`grammar`, in which @answer is the grammar `answer`."""
    main, other = (msgspec.json.decode(text)["grammars"][0] for text in (grammar, answer))
    return msgspec.json.encode({"grammars": [main, {**other, "name": "answer"}]}).decode()
