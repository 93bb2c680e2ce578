"""Tools through the openai package. The fake engine answers with the text of the last message: the tests write what the
model says."""

from __future__ import annotations

import json
from typing import Any

import httpx
import llguidance
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessage

from models.interfaces.media import Tool
from service.api.chat.schema import ChatRequestBody
from service.api.chat.tool_grammar import Reasoning, formed, reasoned_grammar, tool_grammar
from service.api.chat.tools import ToolUse, arguments_of, tool_use
from service.api.http.errors import ApiError
from service.api.http.json_body import MAX_SIGNS, parse
from service.api.structured.grammar import choice_grammar, json_schema_grammar, regex_grammar
from tests.support.grammars import check_grammar
from tests.support.servers import RunningServer
from tests.support.tool_samples import TIME, TOOLS, asked, call_text, result, tool

ROME = call_text("get_weather", city="Rome")
SUM = call_text("add", a=2, b=40)


def ask(client: OpenAI, said: Any, **fields: Any) -> Any:
    messages = said if isinstance(said, list) else [{"role": "user", "content": said}]
    return client.chat.completions.create(model="tiny", messages=messages, **{"tools": TOOLS, **fields})


def called(message: ChatCompletionMessage) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
def test_an_answer_that_calls(client: OpenAI, choice: Any) -> None:
    (one,) = ask(client, ROME, tool_choice=choice).choices
    assert one.finish_reason == "tool_calls" and one.message.content is None
    (call,) = one.message.tool_calls
    assert call.type == "function" and call.id.startswith("call_")
    assert called(one.message) == [("get_weather", {"city": "Rome"})]


def test_several_calls_after_a_text(client: OpenAI) -> None:
    (one,) = ask(client, f"I will look.\n\n{ROME}\n{SUM}").choices
    assert one.message.content == "I will look."
    assert called(one.message) == [("get_weather", {"city": "Rome"}), ("add", {"a": 2, "b": 40})]
    assert len({call.id for call in one.message.tool_calls}) == 2


@pytest.mark.parametrize("stop", ["\n", "<", "get_weather", '"'])
@pytest.mark.parametrize("streamed", [False, True])
def test_forced_calls_have_no_text_for_stop_strings(client: OpenAI, stop: str, streamed: bool) -> None:
    said = f"\n\n{ROME}"
    if streamed:
        with client.chat.completions.stream(
            model="tiny",
            messages=[{"role": "user", "content": said}],
            tools=TOOLS,
            tool_choice="required",
            stop=[stop],
        ) as stream:
            one = stream.get_final_completion().choices[0]
    else:
        one = ask(client, said, tool_choice="required", stop=[stop]).choices[0]
    assert called(one.message) == [("get_weather", {"city": "Rome"})] and one.finish_reason == "tool_calls"


@pytest.mark.parametrize("length", [1, 4, 7])
def test_a_forced_call_that_is_cut_in_its_tag_says_nothing(client: OpenAI, length: int) -> None:
    (one,) = ask(client, f"\n\n{ROME}", tool_choice="required", max_tokens=length).choices
    assert (one.message.content, one.message.tool_calls, one.finish_reason) == (None, None, "length")


def test_an_answer_without_a_call(client: OpenAI) -> None:
    (one,) = ask(client, "It is sunny.").choices
    assert (one.message.content, one.message.tool_calls, one.finish_reason) == ("It is sunny.", None, "stop")


def test_none_calls_nothing(client: OpenAI, server: RunningServer) -> None:
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


def test_the_librarys_stream_helper_adds_them_up(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": f"{ROME}\n{SUM}"}]
    with client.chat.completions.stream(model="tiny", messages=messages, tools=TOOLS) as stream:
        names = [event.name for event in stream if event.type == "tool_calls.function.arguments.done"]
        (one,) = stream.get_final_completion().choices
    assert names == ["get_weather", "add"]
    assert called(one.message) == [("get_weather", {"city": "Rome"}), ("add", {"a": 2, "b": 40})]


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_have_calls_of_their_own(client: OpenAI, stream: bool) -> None:
    answer = ask(client, ROME, n=3, stream=stream)
    if stream:
        calls = [(one.index, call) for chunk in answer for one in chunk.choices for call in one.delta.tool_calls or []]
        ids = {call.id for _, call in calls if call.id}
        texts = [
            "".join(call.function.arguments for choice, call in calls if choice == index and not call.id)
            for index in range(3)
        ]
        assert [json.loads(text) for text in texts] == [{"city": "Rome"}] * 3
    else:
        ids = {call.id for one in answer.choices for call in one.message.tool_calls}
        assert all(called(one.message) == [("get_weather", {"city": "Rome"})] for one in answer.choices)
    assert len(ids) == 3


def test_a_call_after_reasoning(client: OpenAI) -> None:
    """The template of the fake model thinks before it speaks."""
    answer = ask(client, ROME, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    message = answer.choices[0].message
    assert message.reasoning_content == "hm" and called(message) == [("get_weather", {"city": "Rome"})]


def test_a_loop_with_two_tools(client: OpenAI) -> None:
    """The answers of tools are what the fake model says next: a call, then the last answer."""
    tools = {"get_weather": lambda city: call_text("add", a=len(city), b=1), "add": lambda a, b: f"It is {a + b}."}
    messages: list[Any] = [{"role": "user", "content": ROME}]
    seen = []
    for _ in range(4):
        (one,) = ask(client, messages).choices
        messages.append(one.message)
        if one.finish_reason != "tool_calls":
            break
        for call in one.message.tool_calls:
            arguments = json.loads(call.function.arguments)
            seen.append((call.function.name, arguments))
            messages.append(result(call.id, tools[call.function.name](**arguments)))
    assert seen == [("get_weather", {"city": "Rome"}), ("add", {"a": 4, "b": 1})]
    assert messages[-1].content == "It is 5."


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


def test_calls_are_counted(client: OpenAI, server: RunningServer) -> None:
    def count() -> float:
        text = httpx.get(f"{server.url}/metrics").text
        lines = [line for line in text.splitlines() if line.startswith("reprise_tool_calls_total{")]
        return sum(float(line.split()[-1]) for line in lines)

    before = count()
    ask(client, f"{ROME}\n{SUM}")
    assert count() == before + 2


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"not": schema}
    return schema


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": fields}]}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


USER = {"role": "user", "content": "hi"}
CALL = ("a", "add", "{}")
AT = "messages[0].tool_calls[0]"
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no list": ({"tools": 5}, "tools"),
    "no function": ({"tools": [{"type": "function"}]}, "tools[0].function"),
    "custom tool": ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    "no name": (function(description="x"), "tools[0].function.name"),
    "empty name": (function(name=""), "tools[0].function.name"),
    "name with a blank": (function(name="a b"), "tools[0].function.name"),
    "name with a line break": (function(name="a\n"), "tools[0].function.name"),
    "name with a token": (function(name="<|im_end|>"), "tools[0].function.name"),
    "long name": (function(name="a" * 65), "tools[0].function.name"),
    "same names": ({"tools": [TIME, TIME]}, "tools[1].function.name"),
    "too many": ({"tools": [tool(f"f{index}") for index in range(129)]}, "tools"),
    "too large": (function(name="f", description="x" * 300_000), "tools"),
    "too deep": (function(name="f", parameters=deep(40)), "tools[0].function.parameters"),
    "parameters are a list": (function(name="f", parameters=[1]), "tools[0].function.parameters"),
    "parameters of an array": (function(name="f", parameters={"type": "array"}), "tools[0].function.parameters.type"),
    "unsupported keyword": (
        {"tools": [TIME, *function(name="f", strict=True, parameters={"dependentSchemas": {"a": {}}})["tools"]]},
        "tools[1].function.parameters",
    ),
    "impossible": (
        function(name="f", strict=True, parameters={"properties": {"a": {"enum": [1], "const": 2}}, "required": ["a"]}),
        "tools[0].function.parameters",
    ),
    "look-behind": (
        function(name="f", strict=True, parameters={"properties": {"a": {"pattern": "(?<=b)a"}}}),
        "tools[0].function.parameters",
    ),
    "choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "unknown choice": ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    "choice of no tool": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice.function.name",
    ),
    "choice of a custom tool": (
        {"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "x"}}},
        "tool_choice.type",
    ),
    "no tool allowed": (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        "tool_choice.allowed_tools.tools",
    ),
    "allowed in no mode": (
        {"tools": TOOLS, "tool_choice": allowed("none", "add")},
        "tool_choice.allowed_tools.mode",
    ),
    "another tool allowed": (
        {"tools": TOOLS, "tool_choice": allowed("required", "add", "subtract")},
        "tool_choice.allowed_tools.tools[1].function.name",
    ),
    "parallel": ({"tools": TOOLS, "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    "result without calls": ({"messages": [USER, result("a", "x")]}, "messages[1].tool_call_id"),
    "result without id": ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
    "result of another call": ({"messages": [asked(CALL), result("b", "x")]}, "messages[1].tool_call_id"),
    "second result": ({"messages": [asked(CALL), result("a", "x"), result("a", "y")]}, "messages[2].tool_call_id"),
    "call without result": ({"messages": [asked(CALL), USER]}, AT),
    "call without result at the end": ({"messages": [asked(CALL)]}, AT),
    "result without content": (
        {"messages": [asked(CALL), {"role": "tool", "tool_call_id": "a"}]},
        "messages[1].content",
    ),
    "picture in a result": (
        {"messages": [asked(CALL), {**result("a", ""), "content": [{"image_url": "data:,"}]}]},
        "messages[1].content[0].image_url",
    ),
    "calls of the user": ({"messages": [{**asked(CALL), "role": "user", "content": "x"}]}, "messages[0].tool_calls"),
    "same ids": ({"messages": [asked(CALL, CALL), result("a", "x")]}, "messages[0].tool_calls[1].id"),
    "empty id": ({"messages": [asked(("", "add", "{}"))]}, f"{AT}.id"),
    "called name": ({"messages": [asked(("a", "a b", "{}"))]}, f"{AT}.function.name"),
    "too many calls": (
        {"messages": [asked(*[(f"{index}", "add", "{}") for index in range(129)])]},
        "messages[0].tool_calls",
    ),
    **{
        f"arguments {index}": ({"messages": [asked(("a", "add", text))]}, f"{AT}.function.arguments")
        for index, text in enumerate(["[" * 9000, json.dumps({"a": deep(40)})])
    },
    "arguments are no text": (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {}}}]}]},
        f"{AT}.function.arguments",
    ),
    "function_call": (
        {"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": ""}}]},
        "messages[0].function_call",
    ),
    "functions": ({"functions": [{"name": "f"}]}, "functions"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_named(server: RunningServer, name: str) -> None:
    fields, param = BAD[name]
    response = httpx.post(f"{server.url}/v1/chat/completions", json={"model": "tiny", "messages": [USER], **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and error["message"].startswith(f"{param}: ") and len(error["message"]) < 300


@pytest.mark.parametrize(("mode", "forced"), [("auto", False), ("required", True)])
def test_allowed_tools_are_the_only_ones_that_can_be_called(client: OpenAI, mode: str, forced: bool) -> None:
    body = {"model": "tiny", "messages": [USER], "tools": TOOLS, "tool_choice": allowed(mode, "add")}
    use = tool_use(parse(json.dumps(body), ChatRequestBody))
    assert use is not None and (use.forced, use.several) == (forced, True)
    assert [tool.name for tool in use.tools] == [tool["function"]["name"] for tool in TOOLS]
    assert [tool.name for tool in use.callable] == ["add"]
    (one,) = ask(client, SUM, tool_choice=allowed(mode, "add")).choices
    assert called(one.message) == [("add", {"a": 2, "b": 40})]


@pytest.mark.parametrize(
    ("field", "instead"),
    [("functions", "tools"), ("function_call", "tool_choice"), ("repeat_penalty", "repetition_penalty")],
)
def test_a_refused_field_names_the_one_to_use(server: RunningServer, field: str, instead: str) -> None:
    body = {"model": "tiny", "messages": [USER], field: [{"name": "f"}]}
    error = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["error"]
    assert error["message"] == f"{field}: not supported by this server; use {instead}."


def test_results_go_with_their_calls_in_any_order(client: OpenAI) -> None:
    """The fake model answers with the last message of the prompt: the result of the last call."""
    calls = asked(("x", "now", "{}"), ("y", "now", ""))
    assert ask(client, [calls, result("y", "second"), result("x", "first")]).choices[0].message.content == "second"


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


@pytest.mark.parametrize(
    ("forced", "several", "fitting"),
    [
        (False, True, ["Sunny.", "", "a <tool_cal", ROME, BOTH, f"Hm.\n{ROME}", f"Hm.\n{BOTH}", f"\n\n{ROME}"]),
        (False, False, ["Sunny.", "", "a <tool_cal", ROME, f"Hm.\n{ROME}", f"\n\n{ROME}"]),
        (True, True, [ROME, BOTH, f"\n\n{ROME}"]),
        (True, False, [ROME, f"\n\n{ROME}"]),
    ],
)
def test_what_the_grammar_lets_through(forced: bool, several: bool, fitting: list[str]) -> None:
    use = ToolUse(DEFINITIONS, DEFINITIONS, forced, several)
    grammar = tool_grammar(use)
    check_grammar(grammar)
    every = ["Sunny.", "", ROME, BOTH, f"Hm.\n{ROME}", f"Hm.\n{BOTH}", "a <tool_cal", f"\n\n{ROME}", *BROKEN]
    assert [answer for answer in every if fits(grammar, answer)] == [one for one in every if one in fitting]


def test_a_named_tool_is_the_only_one() -> None:
    use = ToolUse(DEFINITIONS, DEFINITIONS[1:2], forced=True, several=False)
    assert fits(tool_grammar(use), SUM) and not fits(tool_grammar(use), ROME)


def test_reasoning_calls_nothing() -> None:
    for forced in (False, True):
        thinking = Reasoning("<think>", "</think>", opened=True)
        grammar = tool_grammar(ToolUse(DEFINITIONS, DEFINITIONS, forced, True), reasoning=thinking)
        assert fits(grammar, f"I could <tool_call> it</think>\n\n{ROME}")
        assert not fits(grammar, ROME)
        assert fits(grammar, "Hm.</think>\n\nSunny.") is not forced


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


@pytest.mark.parametrize(
    "answer", [json_schema_grammar({"const": {"a": 1}}), regex_grammar("[a-z]+"), choice_grammar(["x"])]
)
def test_reasoning_that_the_prompt_opened_comes_before_what_has_to_match(answer: str) -> None:
    grammar = reasoned_grammar(answer, Reasoning("<think>", "</think>", opened=True))
    check_grammar(grammar)
    right = next(text for text in ('{"a": 1}', "x") if fits(answer, text))
    assert fits(grammar, f"{{It}} <tool_call> 5\n</think>\n\n{right}")
    assert not fits(grammar, right) and not fits(grammar, "Hm.</think>\n\n")
    assert not fits(grammar, f"Hm.</think>\n\n{right}!") and not fits(grammar, f"Hm.</think>\n\n\n\n\n{right}")


def test_an_answer_with_a_format_may_begin_with_reasoning(client: OpenAI) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = ask(client, '{"ok": true}', tools=[], response_format={"type": "json_object"}, extra_body=thinking)
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", '{"ok": true}')


@pytest.mark.parametrize("said", ['{"tag": "<tool_call>"}', f'{{"a": {json.dumps(ROME)}}}', '{"tag": "<tool_c'])
@pytest.mark.parametrize("stream", [False, True])
def test_tags_in_an_answer_with_a_format_belong_to_it(client: OpenAI, said: str, stream: bool) -> None:
    answer = ask(client, said, response_format={"type": "json_object"}, stream=stream)
    if stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in answer) == said
    else:
        choice = answer.choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (said, None, "stop")


@pytest.mark.parametrize("stop", ["{", "name", '"'])
def test_stop_strings_do_not_end_a_call_beside_a_format(client: OpenAI, stop: str) -> None:
    answer = ask(client, ROME, response_format={"type": "json_object"}, stop=[stop])
    assert called(answer.choices[0].message) == [("get_weather", {"city": "Rome"})]


def test_forced_calls_come_without_reasoning_that_the_prompt_does_not_open() -> None:
    thinking = Reasoning("◁think▷", "◁/think▷", opened=False)
    grammar = tool_grammar(ToolUse(DEFINITIONS, DEFINITIONS, forced=True, several=True), reasoning=thinking)
    assert fits(grammar, ROME) and not fits(grammar, f"◁think▷Hm.◁/think▷{ROME}")


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


@pytest.mark.parametrize(
    ("schema", "open_"),
    [
        ({"properties": {"x": {"type": "integer"}}}, False),
        ({"properties": {"x": {"type": "integer"}}, "additionalProperties": True}, True),
        ({"properties": {"x": {"type": "integer"}}, "required": ["y"]}, True),
        ({"properties": {}}, True),
        ({}, True),
    ],
)
def test_functions_take_what_is_listed_unless_the_schema_says_more(schema: dict[str, Any], open_: bool) -> None:
    tools = (Tool("f", None, {"type": "object", **schema}),)
    grammar = tool_grammar(formed(ToolUse(tools, tools, forced=True, several=False))[0])
    assert fits(grammar, call_text("f", x=1, y=2)) is open_


def test_arguments_that_are_no_list_of_names_are_refused(server: RunningServer) -> None:
    x = {"x": {"type": "integer"}}
    for broken in ({"properties": 5}, {"properties": x, "required": 5}, {"properties": x, "required": [[]]}):
        given = tool("f", None, {"type": "object", **broken})
        given["function"]["strict"] = True
        body = {"model": "tiny", "messages": [USER], "tools": [given]}
        response = httpx.post(f"{server.url}/v1/chat/completions", json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "tools[0].function.parameters"


def test_every_definition_refers_to_its_own() -> None:
    """Two tools with $defs of the same name."""
    kinds = ("string", "integer")
    tools = tuple(
        Tool(
            kind,
            None,
            {
                "type": "object",
                "properties": {"x": {"$ref": "#/$defs/Value"}},
                "required": ["x"],
                "additionalProperties": False,
                "$defs": {"Value": {"type": kind}},
            },
        )
        for kind in kinds
    )
    grammar = tool_grammar(ToolUse(tools, tools, forced=True, several=False))
    assert fits(grammar, call_text("string", x="a")) and fits(grammar, call_text("integer", x=1))
    assert not fits(grammar, call_text("string", x=1)) and not fits(grammar, call_text("integer", x="a"))


def test_arguments_are_bounded_before_they_are_read(server: RunningServer) -> None:
    """Their values take up to a hundred times the memory of their text."""
    calls = asked(("c", "add", "{" + " " * 100_000 + "}"))
    said = {"model": "tiny", "messages": [calls, result("c", "42")]}
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=said)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    with pytest.raises(ApiError) as caught:
        arguments_of('{"a": [0' + ",0" * MAX_SIGNS + "]}", "arguments")
    assert caught.value.code == "too_many_values"
