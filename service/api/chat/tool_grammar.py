"""The grammar of answers that may call tools: text, then calls in the format of models/text/tools.py. Also the grammar
of answers that must match something after reasoning."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import msgspec

from models.interfaces.media import Tool
from models.text.tools import CALL_END, CALL_START
from service.api.chat.tool_calls import CALL_HEAD
from service.api.chat.tools import ToolUse
from service.api.http.errors import ApiError, bad_request
from service.api.structured.grammar import form_grammar, formed_lark_grammar
from service.api.structured.grammar_checks import GrammarChecks, refusal
from service.api.structured.grammar_worker import Tried
from service.api.structured.schema_form import as_grammar, schema_form, without
from service.api.structured.schema_values import Unfit, shown

log = logging.getLogger(__name__)

_BLANK = r"[\s\x1c-\x1f]"
"""Characters that may precede the opening marker of reasoning: Python's white space."""
_TEXT = ("TEXT: /(.|\\n)*/", "BREAK: /\\n{0,2}/")
BLANKS = " ?"
"""White space between JSON's tokens in arguments: as in training, which is how templates write earlier calls."""
_MOST_LEFT_OUT = 32
"""Keywords of a tool that are found and left out one by one, because no grammar can be made with them."""


@dataclass(frozen=True)
class Reasoning:
    """Reasoning, in which nothing is a call. start, end: its markers. opened: the prompt ends with the opening marker,
    so the answer begins with reasoning; otherwise an unconstrained answer may begin with it."""

    start: str
    end: str
    opened: bool


def tool_grammar(use: ToolUse, *, answer: str = "", reasoning: Reasoning | None = None) -> str:
    """Grammar of answers: only calls if calls are forced, else text that may end in calls. The tools' parameters have
    the form of a grammar (formed).

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
    grammar = formed_lark_grammar("\n".join([f"start: {start}", *rules]))
    return grammar if use.forced or not answer else _beside(grammar, answer)


def reasoned_grammar(answer: str, reasoning: Reasoning) -> str:
    """Grammar of reasoning that the prompt opened, followed by what matches the grammar `answer`."""
    return _beside(
        formed_lark_grammar("\n".join(["start: reasoning BREAK @answer", _reasoning(reasoning), *_TEXT])), answer
    )


def _reasoning(reasoning: Reasoning) -> str:
    return f"reasoning[lazy]: TEXT {json.dumps(reasoning.end)}"


async def checked_tool_grammar(
    checks: GrammarChecks, use: ToolUse, client: str, *, answer: str = "", reasoning: Reasoning | None = None
) -> tuple[str, list[str]]:
    """(the result of tool_grammar after a check, paths of what it does not enforce of the schemas). ApiError 400 names
    the tool whose parameters cannot be used, or `tools`."""
    use, unenforced = await checks.made(partial(formed, use), client)
    grammar, tried = await checks.tried(partial(tool_grammar, use, answer=answer, reasoning=reasoning), "tools", client)
    if tried.problem:
        usable = [await _usable(checks, use, tool, client, unenforced) for tool in use.callable]
        use = replace(use, callable=tuple(usable))
        grammar = await checks.checked(partial(tool_grammar, use, answer=answer, reasoning=reasoning), "tools", client)
    for tool in use.callable if unenforced else ():
        if count := sum(path.startswith(_field(use, tool)) for path in unenforced):
            _tell(tool.name, count)
    return grammar, unenforced


def formed(use: ToolUse) -> tuple[ToolUse, list[str]]:
    """(the tools with parameters in the form of a grammar, paths of what is not enforced). ApiError names the tool with
    a schema that has no such form."""
    unenforced: list[str] = []
    callable = []
    for tool in use.callable:
        field = _field(use, tool)
        try:
            form, left_out = schema_form(tool.parameters, loose=tool.name not in use.strict)
        except Unfit as unfit:
            raise _naming(tool, refusal(field, Tried(str(unfit)))) from None
        callable.append(replace(tool, parameters={**form, "type": "object"}))
        unenforced += [f"{field}.{path}" for path in left_out]
    return replace(use, callable=tuple(callable)), unenforced


async def _usable(checks: GrammarChecks, use: ToolUse, tool: Tool, client: str, unenforced: list[str]) -> Tool:
    """The tool with parameters that a grammar can say: unless it is strict, without the parts that none can say."""
    field = _field(use, tool)
    for _ in range(_MOST_LEFT_OUT):
        _, tried = await checks.tried(partial(form_grammar, tool.parameters), field, client)
        if not tried.problem:
            return tool
        if not tried.path or tool.name in use.strict:
            break
        tool = replace(tool, parameters=without(tool.parameters, tried.path))
        unenforced.append(f"{field}.{shown(tried.path)}")
    raise _naming(tool, refusal(field, tried))


@lru_cache(1024)
def _tell(name: str, count: int) -> None:
    """Once for each tool: agents send the same ones with every request."""
    log.warning("tool %s: %d keywords of its schema are not enforced; answers name them as unenforced", name, count)


def _field(use: ToolUse, tool: Tool) -> str:
    names = [one.name for one in use.tools]
    return f"tools[{names.index(tool.name)}].function.parameters"


def _naming(tool: Tool, error: ApiError) -> ApiError:
    return bad_request(error.message.replace(": ", f": tool {tool.name}: ", 1), error.param, error.code)


def _function(tool: Tool) -> str:
    arguments = json.dumps(as_grammar(tool.parameters, BLANKS), ensure_ascii=False)
    return f"""{json.dumps(tool.name + '", "arguments": ')} %json {arguments}"""


def _beside(grammar: str, answer: str) -> str:
    """`grammar` with @answer standing for the grammar `answer`."""
    main, other = (msgspec.json.decode(text)["grammars"][0] for text in (grammar, answer))
    return msgspec.json.encode({"grammars": [main, {**other, "name": "answer"}]}).decode()
