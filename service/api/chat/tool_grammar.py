"""The grammar of answers that may call tools: text, then calls in the format of models/tools.py. Also the grammar of
answers that must match something after reasoning."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from models.media import Tool
from models.tools import CALL_END, CALL_START
from service.api.chat.grammar import json_schema_grammar, lark_grammar
from service.api.chat.grammar_checks import GrammarChecks
from service.api.chat.loose_schema import looser_schemas
from service.api.chat.schema_form import with_options
from service.api.chat.tool_calls import CALL_HEAD
from service.api.chat.tools import ToolUse
from service.api.http.errors import ApiError

_BLANK = r"[\s\x1c-\x1f]"
"""Characters that may precede the opening marker of reasoning: Python's white space."""
_TEXT = ("TEXT: /(.|\\n)*/", "BREAK: /\\n{0,2}/")
BLANKS = " ?"
"""White space between JSON's tokens in arguments: as in training, which is how templates write earlier calls."""


@dataclass(frozen=True)
class Reasoning:
    """Reasoning, in which nothing is a call. start, end: its markers. opened: the prompt ends with the opening marker,
    so the answer begins with reasoning; otherwise an unconstrained answer may begin with it."""

    start: str
    end: str
    opened: bool


def tool_grammar(use: ToolUse, *, answer: str = "", reasoning: Reasoning | None = None) -> str:
    """Grammar of answers: only calls if calls are forced, else text that may end in calls.

    answer: grammar of answers that call nothing; empty: any text.
    """
    calls = "call (SEPARATOR call)*" if use.several else "call"
    rules = [
        *_TEXT,
        f"SEPARATOR: {json.dumps(chr(10) + CALL_START)}",
        f"""call: {json.dumps(CALL_HEAD)} function {json.dumps("}" + chr(10) + CALL_END)}""",
        f"function: {' | '.join(map(_function, use.callable))}",
    ]
    if use.forced:
        start = f"BREAK {json.dumps(CALL_START)} {calls}"
    elif answer:
        # New lines are dropped behind reasoning and in front of calls; elsewhere they would be part of the answer.
        before = "BREAK " if reasoning is not None and reasoning.opened else ""
        start = f"({before}@answer | BREAK {json.dumps(CALL_START)} {calls})"
    else:
        start = f"(TEXT | opening {calls})"
        rules.append(f"opening[lazy]: TEXT {json.dumps(CALL_START)}")
    if reasoning is not None and reasoning.opened:
        start = f"reasoning {start}"
        rules.append(_reasoning(reasoning))
    elif reasoning is not None and not use.forced and not answer:
        begun = f"/{_BLANK}*/ {json.dumps(reasoning.start)} TEXT"
        start = f"(TEXT | said {calls} | reasoning {start})"
        rules.append(f"said[lazy]: (TEXT {json.dumps(CALL_START)}) & ~({begun})")
        rules.append(f"reasoning[lazy]: {begun} {json.dumps(reasoning.end)}")
    grammar = lark_grammar("\n".join([f"start: {start}", *rules]))
    return grammar if use.forced or not answer else _beside(grammar, answer)


def reasoned_grammar(answer: str, reasoning: Reasoning) -> str:
    """Grammar of reasoning that the prompt opened, followed by what matches the grammar `answer`."""
    return _beside(lark_grammar("\n".join(["start: reasoning BREAK @answer", _reasoning(reasoning), *_TEXT])), answer)


def _reasoning(reasoning: Reasoning) -> str:
    return f"reasoning[lazy]: TEXT {json.dumps(reasoning.end)}"


async def checked_tool_grammar(
    checks: GrammarChecks, use: ToolUse, client: str, *, answer: str = "", reasoning: Reasoning | None = None
) -> str:
    """The result of tool_grammar after a check. Tools that are not strict may get looser parameters. ApiError 400 names
    the tool whose parameters cannot be used, or `tools`."""
    try:
        make = partial(tool_grammar, use, answer=answer, reasoning=reasoning)
        return await checks.checked(make, "tools", client)
    except ApiError as error:
        if error.status != 400:
            raise
        usable = tuple([await _usable(checks, use, tool, client) for tool in use.callable])
        if usable == use.callable:
            raise
    make = partial(tool_grammar, replace(use, callable=usable), answer=answer, reasoning=reasoning)
    return await checks.checked(make, "tools", client)


async def _usable(checks: GrammarChecks, use: ToolUse, tool: Tool, client: str) -> Tool:
    """The tool with the first parameters that a grammar can say: its own, or looser ones unless it is strict."""
    field = f"tools[{use.tools.index(tool)}].function.parameters"
    refusal: ApiError | None = None
    for parameters in await checks.made(partial(_candidates, use, tool), client):
        try:
            await checks.checked(partial(json_schema_grammar, parameters), field, client)
            return replace(tool, parameters=parameters)
        except ApiError as error:
            if error.status != 400:
                raise
            refusal = error
    assert refusal is not None
    raise refusal


def _candidates(use: ToolUse, tool: Tool) -> list[dict[str, Any]]:
    found = [dict(tool.parameters), *(() if tool.name in use.strict else looser_schemas(tool.parameters))]
    return [parameters for index, parameters in enumerate(found) if parameters not in found[:index]]


def _function(tool: Tool) -> str:
    schema = with_options(dict(tool.parameters))
    schema["x-guidance"]["whitespace_pattern"] = BLANKS
    arguments = json.dumps(schema, ensure_ascii=False)
    return f"""{json.dumps(tool.name + '", "arguments": ')} %json {arguments}"""


def _beside(grammar: str, answer: str) -> str:
    """`grammar` with @answer standing for the grammar `answer`."""
    main, other = (msgspec.json.decode(text)["grammars"][0] for text in (grammar, answer))
    return msgspec.json.encode({"grammars": [main, {**other, "name": "answer"}]}).decode()
