"""Tools of a chat request: what may be called, and the calls and results in its messages."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from models.interfaces.media import CallFormat, Tool, ToolCall
from models.text.tools import CALL_END, CALL_START
from service.api.chat import schema
from service.api.chat.detokenizer import CALL_HEAD, ToolCallParser
from service.api.chat.schema import ChatRequestBody, Message
from service.api.chat.xml_calls import FUNCTION, XmlFunction
from service.api.chat.xml_calls import RULE as XML_RULE
from service.api.http.errors import ApiError, bad_request, invalid
from service.api.http.json_body import check_values
from service.api.structured.grammar import GrammarChecks, form_grammar, formed_lark_grammar, refusal
from service.api.structured.grammar_worker import Tried
from service.api.structured.schema_form import Unfit, as_grammar, schema_form, without

# The grammar of answers that may call tools: text, then calls in the format of models/text/tools.py. Also the grammar
# of answers that must match something after reasoning.

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
    xml: list[str] = []
    if use.format == "xml":
        pairs = [XmlFunction(tool).grammar(BLANKS, f"OTHER_{index}") for index, tool in enumerate(use.callable)]
        begin, end, functions = FUNCTION, f"\n{CALL_END}", [function for function, _ in pairs]
        xml = [XML_RULE, *(rule for _, rule in pairs)]
    else:
        begin, end, functions = CALL_HEAD, f"}}\n{CALL_END}", [_function(tool) for tool in use.callable]
    rules = [
        *_TEXT,
        *xml,
        f"SEPARATOR: {json.dumps(chr(10) + CALL_START)}",
        f"""call: {json.dumps(begin)} function {json.dumps(end)}""",
        f"function: {' | '.join(functions)}",
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
) -> tuple[ToolUse, str]:
    """(the tools with parameters in the form of a grammar, the result of tool_grammar after a check). ApiError 400
    names the tool whose parameters cannot be used, or `tools`."""
    use = await checks.made(partial(formed, use), client)
    grammar, tried = await checks.tried(partial(tool_grammar, use, answer=answer, reasoning=reasoning), "tools", client)
    if tried.problem:
        usable = [await _usable(checks, use, tool, client) for tool in use.callable]
        use = replace(use, callable=tuple(usable))
        grammar = await checks.checked(partial(tool_grammar, use, answer=answer, reasoning=reasoning), "tools", client)
    return use, grammar


def formed(use: ToolUse) -> ToolUse:
    """The tools with parameters in the form of a grammar. ApiError names the tool with a schema that has no such
    form."""
    return replace(use, callable=tuple(_formed(use, tool) for tool in use.callable))


def _formed(use: ToolUse, tool: Tool) -> Tool:
    try:
        form = schema_form(tool.parameters, loose=tool.name not in use.strict)
    except Unfit as unfit:
        raise _naming(tool, refusal(_field(use, tool), Tried(str(unfit)))) from None
    return replace(tool, parameters={**form, "type": "object"})


async def _usable(checks: GrammarChecks, use: ToolUse, tool: Tool, client: str) -> Tool:
    """The tool with parameters that a grammar can say: unless it is strict, without the parts that none can say."""
    field = _field(use, tool)
    for _ in range(_MOST_LEFT_OUT):
        _, tried = await checks.tried(partial(form_grammar, tool.parameters), field, client)
        if not tried.problem:
            return tool
        if not tried.path or tool.name in use.strict:
            break
        tool = replace(tool, parameters=without(tool.parameters, tried.path))
    raise _naming(tool, refusal(field, tried))


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


MAX_TOOLS = 128
MAX_CALLS = 128
MAX_CHARACTERS = 262_144
"""Characters of all tools together, as JSON."""
MAX_DEPTH = 32
"""Depth of nested objects and lists in a tool's parameters and in a call's arguments."""
MAX_ID = 256
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
NAME_RULE = "1 to 64 letters, digits, _ and - allowed"
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
"""A function without `parameters` has none, as in OpenAI's API."""

NO_CALL = "not the id of a call in the assistant message before"
NO_RESULT = "must be followed by a message with role tool and the id of this call"


@dataclass(frozen=True)
class ToolUse:
    """tools: those in the prompt. callable: those that the answer may call. forced: the answer consists of calls.
    several: it may have more than one call. strict: names of the tools whose schemas no keyword may be left out of.
    format: how the model writes calls."""

    tools: tuple[Tool, ...]
    callable: tuple[Tool, ...]
    forced: bool
    several: bool
    strict: frozenset[str] = frozenset()
    format: CallFormat = "json"

    def parser(self, *, either: bool = False) -> ToolCallParser:
        """Of an answer, if the parameters have the form of a grammar. either: as of ToolCallParser."""
        xml = {tool.name: XmlFunction(tool).types for tool in self.callable} if self.format == "xml" else None
        return ToolCallParser(forced=self.forced, either=either, xml=xml)


def tool_use(body: ChatRequestBody, format: CallFormat = "json") -> ToolUse | None:
    """The tools of the request; None if nothing can be called. ApiError names the field that is not valid."""
    given = body.tools or []
    if len(given) > MAX_TOOLS:
        raise invalid("tools", f"too many: {len(given)} given, at most {MAX_TOOLS} allowed")
    if (size := len(msgspec.json.encode(given))) > MAX_CHARACTERS:
        raise invalid("tools", f"too large: {size} bytes of JSON given, at most {MAX_CHARACTERS} allowed")
    tools = tuple(_tool(tool.function, f"tools[{index}].function") for index, tool in enumerate(given))
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            field = f"tools[{index}].function.name"
            raise invalid(field, "another tool has this name")
    choice = body.tool_choice or "auto"
    if not tools:
        if choice in ("none", "auto"):
            return None
        raise invalid("tool_choice", "requires tools")
    if choice == "none":
        return None
    several = body.parallel_tool_calls is not False
    strict = frozenset(tool.function.name for tool in given if tool.function.strict)
    use = ToolUse(tools, tools, choice == "required", several, strict, format)
    match choice:
        case schema.NamedToolChoice():
            return replace(use, callable=_chosen(tools, [choice], "tool_choice"), forced=True, several=False)
        case schema.AllowedToolsChoice(allowed_tools=allowed):
            at = [f"tool_choice.allowed_tools.tools[{index}]" for index in range(len(allowed.tools))]
            return replace(use, callable=_chosen(tools, allowed.tools, *at), forced=allowed.mode == "required")
        case _:
            return use


def _chosen(tools: Sequence[Tool], choices: Sequence[schema.NamedToolChoice], *at: str) -> tuple[Tool, ...]:
    """The tools that are named, in the order of the request. at: the path of each choice."""
    names = {tool.name for tool in tools}
    for choice, path in zip(choices, at, strict=True):
        if choice.function.name not in names:
            field = f"{path}.function.name"
            raise invalid(field, "no tool of this request has this name")
    wanted = {choice.function.name for choice in choices}
    return tuple(tool for tool in tools if tool.name in wanted)


def earlier_calls(message: Message, field: str) -> tuple[ToolCall, ...]:
    """The calls of an assistant's message. ApiError names the field that does not fit."""
    calls = message.tool_calls or []
    at = f"{field}.tool_calls"
    if calls and message.role != "assistant":
        raise invalid(at, "only allowed in assistant messages")
    if len(calls) > MAX_CALLS:
        raise invalid(at, f"too many calls: {len(calls)} given, at most {MAX_CALLS} allowed")
    return tuple(_earlier_call(call, f"{at}[{index}]") for index, call in enumerate(calls))


def result_order(messages: Sequence[Message]) -> list[int]:
    """Indices of all messages, with results in the order of their calls: prompts do not name calls by their ids.
    ApiError for a call without a result, or a result without a call."""
    order: list[int] = []
    caller, results = -1, dict[str, int | None]()
    """The last message that is no result, and the index of each of its calls' results by the call's id."""
    for index, message in enumerate([*messages, None]):
        if message is not None and message.role == "tool":
            field, id = f"messages[{index}].tool_call_id", message.tool_call_id
            if id is None:
                raise invalid(field, "this field is required")
            if id not in results:
                raise invalid(field, NO_CALL)
            if results[id] is not None:
                raise invalid(field, "this call has a result already")
            results[id] = index
            continue
        for number, result in enumerate(results.values()):
            if result is None:
                field = f"messages[{caller}].tool_calls[{number}]"
                raise invalid(field, NO_RESULT)
            order.append(result)
        if message is not None:
            order.append(index)
            caller, results = index, {}
            for number, call in enumerate(message.tool_calls or ()):
                if call.id in results:
                    field = f"messages[{index}].tool_calls[{number}].id"
                    raise invalid(field, "another call of this message has this id")
                results[call.id] = None
    return order


def _tool(function: schema.FunctionDefinition, field: str) -> Tool:
    check_name(function.name, f"{field}.name")
    if function.parameters is None:
        return Tool(function.name, function.description, NO_PARAMETERS)
    at = f"{field}.parameters"
    parameters = function.parameters or {}
    if isinstance(parameters, list):
        raise invalid(at, f"tool {function.name}: must be an object")
    _check_depth(parameters, at)
    kind = parameters.get("type") or "object"
    if "object" not in (str(one).lower() for one in (kind if isinstance(kind, list) else [kind])):
        raise invalid(f"{at}.type", f'tool {function.name}: must be "object": arguments are named')
    return Tool(function.name, function.description, {"type": "object", **parameters})


def _earlier_call(call: schema.ToolCallEntry, field: str) -> ToolCall:
    check_name(call.function.name, f"{field}.function.name")
    check_call_id(call.id, f"{field}.id")
    return ToolCall(call.function.name, arguments_of(call.function.arguments, f"{field}.function.arguments"))


def check_call_id(id: str, field: str) -> None:
    if not 0 < len(id) <= MAX_ID:
        raise invalid(field, f"a string of {len(id)} characters given, 1 to {MAX_ID} allowed")


def arguments_of(written: str, field: str) -> dict[str, Any] | str:
    """The arguments of an earlier call, from their JSON, or the text itself if it is not that of an object: an answer
    that ended within a call has such arguments. ApiError if they are nested too deeply or have too many values."""
    check_values(written)
    try:
        arguments = msgspec.json.decode(written or "{}")
    except msgspec.DecodeError:
        return written
    except RecursionError:
        raise _too_deep(field) from None
    if not isinstance(arguments, dict):
        return written
    _check_depth(arguments, field)
    return arguments


def check_name(name: str, field: str) -> None:
    if not NAME.fullmatch(name):
        raise invalid(field, f"a name of {len(name)} characters given, {NAME_RULE}")


def _check_depth(value: Any, field: str) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (one for outer in level for one in (outer.values() if isinstance(outer, dict) else outer))
        level = [one for one in inner if isinstance(one, dict | list)]
        if not level:
            return
    raise _too_deep(field)


def _too_deep(field: str) -> ApiError:
    return invalid(field, f"nested too deeply: at most {MAX_DEPTH} levels allowed")
