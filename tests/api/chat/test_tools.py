"""Tools through the openai package. The fake engine answers with the text of the last message: the tests write what the
model says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from typing import Any

import httpx
import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI
from openai.types.chat import ChatCompletionMessage

from models.interfaces.media import Tool
from service.api.chat.detokenizer import joined
from service.api.chat.schema import ChatRequestBody
from service.api.chat.tools import Reasoning, ToolUse, arguments_of, formed, tool_grammar, tool_use
from service.api.http.errors import ApiError
from service.api.http.json_body import MAX_SIGNS, parse
from service.api.structured.grammar import json_schema_grammar
from tests.api.chat.test_detokenizer import pieces, places
from tests.support.grammars import check_grammar
from tests.support.rows import rows
from tests.support.servers import RunningServer
from tests.support.tool_samples import TOOLS, asked, call_text, result
from tests.support.tool_samples import xml_call_text as call

ROME = call_text("get_weather", city="Rome")
SUM = call_text("add", a=2, b=40)


def ask(client: OpenAI, said: Any, **fields: Any) -> Any:
    messages = said if isinstance(said, list) else [{"role": "user", "content": said}]
    return client.chat.completions.create(model="tiny", messages=messages, **{"tools": TOOLS, **fields})


def called(message: ChatCompletionMessage) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


def test_an_answer_that_calls(client: OpenAI) -> None:
    """Also after reasoning: the template of the fake model may think before it speaks."""
    for choice in ("auto", "required", {"type": "function", "function": {"name": "get_weather"}}):
        (one,) = ask(client, ROME, tool_choice=choice).choices
        assert one.finish_reason == "tool_calls" and one.message.content is None
        (call,) = one.message.tool_calls
        assert call.type == "function" and call.id.startswith("call_")
        assert called(one.message) == [("get_weather", {"city": "Rome"})]
    message = ask(client, ROME, extra_body={"chat_template_kwargs": {"enable_thinking": True}}).choices[0].message
    assert message.reasoning_content == "hm" and called(message) == [("get_weather", {"city": "Rome"})]


def test_forced_calls_have_no_text_for_stop_strings(client: OpenAI) -> None:
    said = f"\n\n{ROME}"
    fields: Any = {"model": "tiny", "messages": [{"role": "user", "content": said}], "tools": TOOLS}
    fields |= {"tool_choice": "required", "stop": ["\n", "<", "get_weather", '"']}
    with client.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion()
    for answer in (streamed, client.chat.completions.create(**fields)):
        (one,) = answer.choices
        assert called(one.message) == [("get_weather", {"city": "Rome"})] and one.finish_reason == "tool_calls"


def test_none_calls_nothing(client: OpenAI) -> None:
    (one,) = ask(client, "Sunny.", tool_choice="none").choices
    assert (one.message.content, one.message.tool_calls, one.finish_reason) == ("Sunny.", None, "stop")
    # Without tools there is nothing to call, whatever the field says.
    assert ask(client, "Sunny.", tools=[], tool_choice="auto").choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_stream_has_the_deltas_of_openai(client: OpenAI, choice: str) -> None:
    text = "Hm." if choice == "auto" else ""
    options = {"include_usage": True}
    chunks = list(ask(client, f"{text}{ROME}\n{SUM}", tool_choice=choice, stream=True, stream_options=options))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(f"{text}{ROME}\n{SUM}")
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert deltas[0].role == "assistant" and deltas[0].content == ("" if choice == "auto" else None)
    assert "".join(delta.content or "" for delta in deltas) == text
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    first = [call for call in calls if call.id]
    assert [(call.index, call.type, call.function.name, call.function.arguments) for call in first] == [
        (0, "function", "get_weather", ""),
        (1, "function", "add", ""),
    ]
    assert all(call.function.name is None and call.type is None for call in calls if not call.id)
    arguments = ["".join(call.function.arguments for call in calls if call.index == index) for index in (0, 1)]
    assert [json.loads(text) for text in arguments] == [{"city": "Rome"}, {"a": 2, "b": 40}]
    assert sum(call.index == 0 for call in calls) > 5  # in fragments, as they are generated
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons[-1] == "tool_calls" and set(reasons[:-1]) == {None}


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_call_that_was_cut_off_can_be_sent_back(client: OpenAI, choice: Any) -> None:
    """With an error as its result, as agents send it."""
    (one,) = ask(client, ROME, tool_choice=choice, max_tokens=ROME.index("Rome") + 2).choices
    (call,) = one.message.tool_calls
    assert one.finish_reason == "length" and call.function.arguments == '{"city": "Ro'
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.function.arguments)
    said = [{"role": "user", "content": "hi"}, one.message, result(call.id, "This is no JSON.")]
    assert ask(client, said).choices[0].message.content == "This is no JSON."


def test_arguments_are_read_where_they_are_an_object() -> None:
    assert arguments_of('{"a": 1}', "arguments") == {"a": 1} and arguments_of("", "arguments") == {}
    for text in ("[]", "5", "{", '{"a": NaN}', '{"a": "\\ud800"}', '{"a": 1e999}', '{"city": "Ro'):
        assert arguments_of(text, "arguments") == text


USER = {"role": "user", "content": "hi"}


def test_allowed_tools_are_the_only_ones_that_can_be_called(client: OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    for mode in ("auto", "required"):
        choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
        body = {"model": "tiny", "messages": [USER], "tools": TOOLS, "tool_choice": choice}
        use = tool_use(parse(json.dumps(body), ChatRequestBody))
        assert use is not None and (use.forced, use.several) == (mode == "required", True)
        assert [tool.name for tool in use.tools] == [tool["function"]["name"] for tool in TOOLS]
        assert [tool.name for tool in use.callable] == ["add"]
        (one,) = ask(client, SUM, tool_choice=choice).choices
        assert called(one.message) == [("add", {"a": 2, "b": 40})]


# The grammar, on tokens of single bytes.

BYTES = llguidance.LLTokenizer("byte")
DEFINITIONS = tuple(
    Tool(one["function"]["name"], None, one["function"].get("parameters", {"type": "object", "properties": {}}))
    for one in TOOLS
)
BOTH = f"{ROME}\n{SUM}"
BROKEN = [
    ROME.replace("city", "town"),
    ROME.replace('"Rome"', "5"),
    ROME.replace("get_weather", "get_whether"),
    ROME.replace(', "arguments": {"city": "Rome"}', ""),
    ROME.replace("\n</tool_call>", ""),
    f"{ROME} and more",
]


def fits(grammar: str, answer: str) -> bool:
    matcher = llguidance.LLMatcher(BYTES, grammar)
    tokens = BYTES.tokenize_bytes(answer.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_what_the_grammar_lets_through() -> None:
    one, two, texts = [ROME, f"\n\n{ROME}"], [BOTH], ["Sunny.", "", "a <tool_cal", f"Hm.\n{ROME}"]
    for forced, several in product((False, True), repeat=2):
        grammar = tool_grammar(ToolUse(DEFINITIONS, DEFINITIONS, forced, several))
        check_grammar(grammar)
        fitting = one + two * several + (texts + [f"Hm.\n{BOTH}"] * several) * (not forced)
        every = [*one, *two, *texts, f"Hm.\n{BOTH}", *BROKEN]
        assert [answer for answer in every if fits(grammar, answer)] == [one for one in every if one in fitting]
    named = tool_grammar(ToolUse(DEFINITIONS, DEFINITIONS[1:2], forced=True, several=False))
    assert fits(named, SUM) and not fits(named, ROME)


@pytest.mark.parametrize("begin", ["◁think▷", "\n ◁think▷"])
def test_reasoning_that_the_answer_opens_itself_calls_nothing(begin: str) -> None:
    thinking = Reasoning("◁think▷", "◁/think▷", opened=False)
    grammar = tool_grammar(ToolUse(DEFINITIONS, DEFINITIONS, forced=False, several=True), reasoning=thinking)
    check_grammar(grammar)
    thought = f"{begin}I could <tool_call> it, or {ROME[:30]}"
    for said in ("", "Sunny.", ROME, f"Hm.\n{BOTH}", f"Then ◁think▷ is text.\n{ROME}"):
        assert fits(grammar, said) and fits(grammar, f"{thought}◁/think▷\n\n{said}"), said
    assert fits(grammar, thought), "an answer may end within its reasoning"
    for wrong in BROKEN:
        assert not fits(grammar, wrong) and not fits(grammar, f"{thought}◁/think▷{wrong}"), wrong


def test_tags_in_an_answer_with_a_format_belong_to_it(client: OpenAI) -> None:
    fields = {"response_format": {"type": "json_object"}}
    for said in ('{"tag": "<tool_call>"}', f'{{"a": {json.dumps(ROME)}}}', '{"tag": "<tool_c'):
        (choice,) = ask(client, said, **fields).choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (said, None, "stop")
        chunks = ask(client, said, stream=True, **fields)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said


def test_a_text_can_have_a_grammar_of_its_own() -> None:
    answer = json_schema_grammar({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})
    use = ToolUse(DEFINITIONS, DEFINITIONS, forced=False, several=True)
    grammar = tool_grammar(use, answer=answer)
    check_grammar(grammar)
    assert fits(grammar, '{"ok": true}') and fits(grammar, BOTH)
    assert not fits(grammar, "Sunny.") and not fits(grammar, f'{{"ok": true}}\n{ROME}')
    # As without tools, nothing may come before what has to match.
    assert fits(grammar, f"\n\n{ROME}") and not fits(grammar, '\n\n{"ok": true}')
    opened = tool_grammar(use, answer=answer, reasoning=Reasoning("<think>", "</think>", opened=True))
    assert fits(opened, 'Hm.</think>\n\n{"ok": true}') and fits(opened, f"Hm.</think>\n\n{ROME}")


def test_arguments_are_bounded_before_they_are_read(server: RunningServer) -> None:
    """Their values take up to a hundred times the memory of their text."""
    calls = asked(("c", "add", "{" + " " * 100_000 + "}"))
    said = {"model": "tiny", "messages": [calls, result("c", "42")]}
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=said)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    with pytest.raises(ApiError) as caught:
        arguments_of('{"a": [0' + ",0" * MAX_SIGNS + "]}", "arguments")
    assert caught.value.code == "too_many_values"


def test_every_definition_refers_to_its_own() -> None:
    """Two tools with $defs of the same name."""
    own = {"type": "object", "properties": {"x": {"$ref": "#/$defs/Value"}}, "required": ["x"]}
    tools = tuple(Tool(kind, None, {**own, "$defs": {"Value": {"type": kind}}}) for kind in ("string", "integer"))
    grammar = tool_grammar(ToolUse(tools, tools, forced=True, several=False))
    assert fits(grammar, call_text("string", x="a")) and fits(grammar, call_text("integer", x=1))
    assert not fits(grammar, call_text("string", x=1)) and not fits(grammar, call_text("integer", x="a"))


def asked_with(server: RunningServer, parameters: Any, **more: Any) -> httpx.Response:
    function = {"name": "search", "parameters": parameters, **more}
    body = {"model": "tiny", "messages": [USER], "tools": [{"type": "function", "function": function}], "max_tokens": 1}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body)


def test_what_generators_write_is_served(server: RunningServer) -> None:
    """A strict tool is refused by the path of a keyword that cannot be enforced."""
    assert asked_with(server, []).status_code == 200, "PHP's empty map"
    for origin, schema, _, _, left_out in rows(__file__, "generated_schemas.jsonl"):
        answer = asked_with(server, schema)
        assert answer.status_code == 200, (origin, answer.text)
        error = asked_with(server, schema, strict=True).json().get("error", {})
        starts = tuple(f"tools[0].function.parameters: tool search: {path}: " for path in left_out)
        assert error.get("message", "").startswith(starts) if left_out else not error, (origin, error)


PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer", "minimum": 1},
    "unit": {"enum": ["km", "m"]},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "list": {"type": "array", "items": {"$ref": "#/$defs/point"}},
    "any": {},
}
POINT = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "additionalProperties": False}
LOOK = Tool("look", None, {"type": "object", "properties": PROPERTIES, "required": ["text"], "$defs": {"point": POINT}})
NOW = Tool("now", None, {"type": "object", "properties": {}, "additionalProperties": False})
USE = formed(ToolUse((LOOK, NOW), (LOOK, NOW), forced=False, several=True, format="xml"))


def read(answer: str, places: Sequence[int] = ()) -> tuple[str, list[tuple[str, Any]]]:
    """(text, calls) of an answer that arrives in pieces."""
    parser = USE.parser()
    said, deltas = "", []
    for piece in pieces(answer, places):
        text, more = parser.feed(piece)
        said, deltas = said + text, deltas + more
    calls = [(one.function.name, json.loads(one.function.arguments)) for one in joined(deltas)]
    return said + parser.flush(), calls


texts = st.text(st.sampled_from('ab<>/=\n"\\{}é'), max_size=20).filter(lambda text: "</parameter>" not in text)
NO_JSON = texts.filter(lambda text: text.strip() not in ("", "null") and text.strip()[0] != '"')
"""A value that may be a string or null is JSON where it parses."""


@given(texts, NO_JSON, st.integers(1), texts, places)
def test_any_split_gives_the_same_values(text: str, note: str, count: int, said: str, where: list[int]) -> None:
    points = [{"x": 1.5}, {"x": -2}]
    written = call("look", text=text, count=str(count), unit="km", note=note, list=json.dumps(points))
    answer = f"{said}{written}\n{call('now')}"
    values = {"text": text, "count": count, "unit": "km", "note": note, "list": points}
    assert read(answer, where) == (said.rstrip(), [("look", values), ("now", {})])
    assert read(answer, tuple(range(len(answer)))) == read(answer)
    assert fits(tool_grammar(USE), answer)


def test_what_is_no_json_of_the_schema_is_text() -> None:
    notes = [("null", None), ("Null", "Null"), ("12", "12"), ('"a"', "a"), ("{", "{"), ("", "")]
    values = [("[1]", [1]), ("12", 12), ("True", "True"), ("a\nb", "a\nb")]
    for name, cases in (("note", notes), ("any", values)):
        for written, value in cases:
            assert read(call("look", text="", **{name: written}))[1] == [("look", {"text": "", name: value})]


def test_what_the_grammar_of_xml_lets_through() -> None:
    """What is required, in the order of the schema, each by its type."""
    grammar = tool_grammar(USE)
    check_grammar(grammar)
    for name, parameters, fitting in rows(__file__, "xml_calls.jsonl"):
        assert fits(grammar, call(name, **parameters)) == fitting, parameters
    assert fits(grammar, f"Hm.\n{call('now')}") and not fits(grammar, call("now").removesuffix("</tool_call>"))
    forced = tool_grammar(ToolUse(USE.tools, USE.callable[1:], forced=True, several=False, format="xml"))
    assert fits(forced, call("now")) and not fits(forced, "Hm.") and not fits(forced, call("look", text=""))


def test_a_call_that_is_cut_short_is_a_beginning() -> None:
    whole = call("look", text='a "b"\n', count="12", note="x") + call("now")
    for end in range(1, len(whole)):
        said, deltas = USE.parser().feed(whole[:end])
        begun = joined(deltas)
        assert not said and len(begun) <= 2
        if begun:
            assert '{"text": "a \\"b\\"\\n", "count": 12, "note": "x"}'.startswith(begun[0].function.arguments)


def forced(**parameters: Any) -> ToolUse:
    tool = Tool("free", None, {"type": "object", **parameters})
    return formed(ToolUse((tool,), (tool,), forced=True, several=False, format="xml"))


def test_a_listed_parameter_is_none_of_the_further_ones() -> None:
    """Its text would be taken for JSON of its type."""
    properties = {"on": {"type": "boolean"}, 'a "b\\': {"type": "integer"}, "off": False}
    use = forced(properties=properties, additionalProperties=True)
    grammar = tool_grammar(use)
    check_grammar(grammar)
    for parameters in ({"on": "true", "only": "yes"}, {"on": "false"}, {'a "b\\': "1"}, {"o": "n"}, {}):
        assert fits(grammar, call("free", **parameters))
    for parameters in ({"on": "True"}, {"only": "yes", "on": "True"}, {"off": "x"}, {'a "b\\': "one"}):
        assert not fits(grammar, call("free", **parameters))
    said = use.parser().feed(call("free", a="1", b="x y"))[1]
    assert joined(said)[0].function.arguments == '{"a": 1, "b": "x y"}'


def test_schemas_that_refer_to_themselves_are_read_once() -> None:
    node = {"anyOf": [{"$ref": "#/$defs/node"}, {"$ref": "#/$defs/node"}, {"type": "string"}]}
    properties = {f"p{number}": {"$ref": "#/$defs/node"} for number in range(50)}
    check_grammar(tool_grammar(forced(properties=properties, **{"$defs": {"node": node}})))
