"""Tools, calls and results in prompts: templates that know them, and the block for those that do not."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.checkpoints.registry import family_of, resolve
from models.interfaces.media import ChatMessage, Tool, ToolCall
from models.text.chat_template import ChatTemplate, escaped_reasoning, unused_character
from models.text.tokenizer import Tokenizer
from models.text.tools import escaped_calls, escaped_tools, prompt_texts
from tests.support.golden import GOLDEN, read_json
from tests.support.prompts import say

KNOWS = """
{%- if tools %}<|im_start|>system
TOOLS{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content is string %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}

<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
MARKS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>")


SPECIAL = {name: 10_000 + index for index, name in enumerate(MARKS)}
TOKENIZER = Tokenizer(
    read_json(GOLDEN / "qwen2_vl", "tokenizer.json")
    | {"added_tokens": [{"id": token, "content": name, "special": False} for name, token in SPECIAL.items()]}
)
ADD = Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}})
ADD_AS_JSON = json.dumps(
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD.parameters}}
)


TALK = (
    say("user", "2 + 40?"),
    say("assistant", "Wait.", calls=(ToolCall("add", {"a": 2}), ToolCall("add", {"a": 40}))),
    say("tool", "2"),
    say("tool", "42"),
)


@cache
def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {})


def ids(source: str, messages: tuple[ChatMessage, ...], tools: tuple[Tool, ...] = ()) -> list[int]:
    """Those of a rendered conversation."""
    escape = unused_character(prompt_texts(messages, tools))

    def escaped(text: str) -> str:
        return escape + TOKENIZER.escape(text, escape) + escape

    turns: list[dict[str, Any]] = [
        {
            "role": message.role,
            "content": "".join(escaped(part.text or "") for part in message.content),
            **escaped_reasoning(message, escaped),
            **escaped_calls(message, escaped),
        }
        for message in messages
    ]
    rendered = template(source).render(turns, tools=escaped_tools(tools, escaped))
    return TOKENIZER.encode(rendered, escape)


def text_of(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens).decode()


def test_a_template_that_knows_tools_renders_them() -> None:
    assert ChatTemplate(KNOWS, {}).knows_tools and ChatTemplate(KNOWS, {}).call_format == "json"
    assert ChatTemplate(KNOWS.replace('{"name"', "<function="), {}).call_format == "xml"
    text = text_of(ids(KNOWS, TALK, (ADD,)))
    assert f"TOOLS {ADD_AS_JSON}<|im_end|>" in text
    assert 'Wait.\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>\n<tool_call>' in text
    assert text.count("<|im_start|>tool\n") == 2 and "You may call" not in text


def test_the_block_of_a_template_that_knows_none() -> None:
    others = (PLAIN + "{{ tools }}", KNOWS.replace('{"name"', "<arg_key>"), KNOWS.replace("tool_call>", "call>"))
    assert not any(ChatTemplate(source, {}).knows_tools for source in (PLAIN, *others))
    text = text_of(ids(PLAIN, TALK, (ADD,)))
    assert text.startswith("<|im_start|>system\nYou are a helpful assistant.\n\n# Tools\n\nYou may call")
    assert f"<tools>\n{ADD_AS_JSON}\n</tools>" in text
    assert text.endswith(
        "<|im_start|>user\n2 + 40?<|im_end|>\n"
        "<|im_start|>assistant\nWait.\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 40}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n42\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant"
    )


def test_a_template_that_knows_reasoning_gets_it() -> None:
    """Without line breaks around it; also one that is given calls as text."""
    thought = say("assistant", "Wait.", calls=(ToolCall("add", {"a": 2}),), reasoning="I add.\n")
    for source in (KNOWS, KNOWS.replace("tools", "functions")):
        assert "<think>I add.</think>Wait.\n<tool_call>" in text_of(ids(source, (thought,)))
        assert "<think>" not in text_of(ids(source, (say("assistant", "Wait."),)))
    assert "I add" not in text_of(ids(PLAIN, (thought,)))


hostile = st.lists(
    st.sampled_from([*SPECIAL, "<|im_", "end|>", "<tool_", "call>", "<", "\ufdd0", '"', "\\", "\n", "{", "é"]),
    max_size=5,
).map("".join)
objects = st.dictionaries(hostile, st.none() | st.integers() | hostile | st.lists(hostile, max_size=2), max_size=3)


@pytest.mark.parametrize("source", [KNOWS, PLAIN])
@settings(max_examples=60, deadline=None)
@given(hostile, hostile, objects | hostile, objects)
def test_nothing_of_a_request_becomes_a_control_token(
    source: str, text: str, name: str, arguments: dict[str, Any] | str, parameters: dict[str, Any]
) -> None:
    def special(messages: tuple[ChatMessage, ...], tool: Tool) -> list[int]:
        return [token for token in ids(source, messages, (tool,)) if token >= 10_000]

    def talk(text: str, name: str, arguments: dict[str, Any] | str) -> tuple[ChatMessage, ...]:
        return (
            say("system", text),
            say("user", text, text),
            say("assistant", text, calls=(ToolCall(name, arguments),), reasoning=text),
            say("tool", text),
        )

    wanted = special(talk("x", "x", {}), Tool("x", "x", {}))
    assert special(talk(text, name, arguments), Tool(name, text, parameters)) == wanted
    if source is PLAIN:  # its text is as it was sent
        rendered = text_of(ids(source, talk(text, name, arguments), (Tool(name, text, parameters),)))
        assert json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) in rendered


MINICPM = tuple(f"minicpmv_{version}" for version in ("2_5", "2_6", "4_0", "4_5"))
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "kimi_vl", *MINICPM)


def loaded(family: str) -> Any:
    return resolve(family_of(GOLDEN / family).processor)(GOLDEN / family)


def written(processor: Any, *talk: ChatMessage, **options: Any) -> str:
    """What a template makes of a conversation."""
    chat = processor.apply_chat_template(talk, [], options={}, **options)
    return processor.detokenize(chat.token_ids.tolist()).decode()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_writes_tools_and_escapes_what_they_hold(family: str) -> None:
    processor = loaded(family)
    names = list(processor.tokenizer.special_ids)
    special = set(processor.tokenizer.special_ids.values())

    def counted(text: str) -> list[int]:
        talk = (
            say("user", "hi"),
            say("assistant", calls=(ToolCall("add", {text: text}),), reasoning=text),
            say("tool", text),
        )
        tool = Tool("add", text, {"type": "object", "properties": {text: {"const": text}}})
        tokens = processor.apply_chat_template(talk, [], options={}, tools=(tool,)).token_ids.tolist()
        return [token for token in tokens if token in special]

    assert counted("".join(names)) == counted("x")
    said = written(processor, *TALK, tools=(ADD,))
    assert '{"name": "add", "arguments": {"a": 40}}' in said and "<tool_response>\n42" in said
    call = say("assistant", calls=(ToolCall("add", '{"a": 4'),))  # whose arguments are no JSON
    said = written(processor, say("user", "hi"), call, say("tool", "no JSON"), tools=(ADD,))
    assert any(f'{{"name": "add", "arguments": {text}}}' in said for text in ('{"a": 4', json.dumps('{"a": 4')))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_shows_the_pictures_of_results(family: str) -> None:
    """In the results of which they are a part, whatever others stand beside them."""
    processor = loaded(family)
    talk = [
        say("user", "hi"),
        say("assistant", calls=(ToolCall("look", {}),) * 3),
        say("tool", "one", 0, "two"),
        say("tool", 1),
        say("tool", "three"),
    ]
    chat = processor.apply_chat_template(talk, ["image", "image"], options={}, tools=(ADD,))
    places = [place for place, _ in chat.placeholders]
    assert [item for _, item in chat.placeholders] == [0, 1]

    def said(begin: int, end: int | None) -> str:
        return processor.detokenize(chat.token_ids.tolist()[begin:end]).decode()

    before, between, after = said(0, places[0]), said(places[0] + 1, places[1]), said(places[1] + 1, None)
    assert before.rpartition("<tool_response>")[2].strip().startswith("one")
    assert "two" in between and between.count("<tool_response>") == 1 == after.count("<tool_response>")
    assert "three" in after and after.count("</tool_response>") == 2
