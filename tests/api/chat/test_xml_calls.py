"""Calls as Qwen3.5 writes them: the grammar of what a model may write, and the calls that are read from it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.interfaces.media import Tool
from service.api.chat.detokenizer import joined
from service.api.chat.tools import ToolUse, formed, tool_grammar
from service.api.http.errors import ApiError
from tests.api.chat.test_tools import fits
from tests.support.grammars import check_grammar

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
USE, _ = formed(ToolUse((LOOK, NOW), (LOOK, NOW), forced=False, several=True, format="xml"))


def call(name: str, **values: str) -> str:
    """As the templates of the family write it."""
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def read(answer: str, places: tuple[int, ...] = ()) -> tuple[str, list[tuple[str, Any]]]:
    """(text, calls) of an answer that arrives in pieces."""
    parser = USE.parser()
    said, deltas = "", []
    edges = [0, *sorted(place % (len(answer) + 1) for place in places), len(answer)]
    for start, stop in pairwise(edges):
        text, more = parser.feed(answer[start:stop])
        said, deltas = said + text, deltas + more
    calls = [(one.function.name, json.loads(one.function.arguments)) for one in joined(deltas)]
    return said + parser.flush(), calls


texts = st.text(st.sampled_from('ab<>/=\n"\\{}é'), max_size=20).filter(lambda text: "</parameter>" not in text)
NO_JSON = texts.filter(lambda text: text.strip() not in ("", "null") and text.strip()[0] != '"')
"""A value that may be a string or null is JSON where it parses."""
places = st.lists(st.integers(0, 10_000), max_size=12).map(tuple)


@given(texts, NO_JSON, st.integers(1), texts, places)
def test_any_split_gives_the_same_values(text: str, note: str, count: int, said: str, where: tuple[int, ...]) -> None:
    points = [{"x": 1.5}, {"x": -2}]
    written = call("look", text=text, count=str(count), unit="km", note=note, list=json.dumps(points))
    answer = f"{said}{written}\n{call('now')}"
    values = {"text": text, "count": count, "unit": "km", "note": note, "list": points}
    assert read(answer, where) == (said.rstrip(), [("look", values), ("now", {})])
    assert read(answer, tuple(range(len(answer)))) == read(answer)
    assert fits(tool_grammar(USE), answer)


@pytest.mark.parametrize(
    ("written", "value"), [("null", None), ("Null", "Null"), ("12", "12"), ('"a"', "a"), ("{", "{"), ("", "")]
)
def test_what_is_no_json_of_the_schema_is_text(written: str, value: Any) -> None:
    assert read(call("look", text="", note=written))[1] == [("look", {"text": "", "note": value})]


def test_a_value_of_any_type_is_json_where_it_parses() -> None:
    for written, value in (("[1]", [1]), ("12", 12), ("True", "True"), ("a\nb", "a\nb")):
        assert read(call("look", text="", any=written))[1] == [("look", {"text": "", "any": value})]


def test_what_the_grammar_lets_through() -> None:
    grammar = tool_grammar(USE)
    check_grammar(grammar)
    good = [
        call("look", text="two\nlines </para"),
        call("look", text="", count="3"),
        f"Hm.\n{call('now')}",
        call("look", text="a", any='{"b": 1}'),
    ]
    bad = [
        call("look", count="3"),  # without what is required
        call("look", text="a", count="0"),
        call("look", text="a", count="three"),
        call("look", text="a", unit="cm"),
        call("look", text="a", list='[{"y": 1}]'),
        call("look", count="3", text="a"),  # in another order than that of the schema
        call("now", text="a"),
        call("never"),
        call("now").removesuffix("</tool_call>"),
    ]
    assert all(fits(grammar, answer) for answer in good)
    assert not any(fits(grammar, answer) for answer in bad)
    forced = tool_grammar(ToolUse(USE.tools, USE.callable[1:], forced=True, several=False, format="xml"))
    assert fits(forced, call("now")) and not fits(forced, "Hm.") and not fits(forced, good[0])


@pytest.mark.parametrize("end", range(1, 150))
def test_a_call_that_is_cut_short_is_a_beginning(end: int) -> None:
    whole = call("look", text='a "b"\n', count="12", note="x") + call("now")
    parser = USE.parser()
    said, deltas = parser.feed(whole[:end])
    begun = joined(deltas)
    assert not said and len(begun) <= 2
    if begun:
        assert '{"text": "a \\"b\\"\\n", "count": 12, "note": "x"}'.startswith(begun[0].function.arguments)


def test_open_objects_take_further_parameters() -> None:
    tool = Tool("free", None, {"type": "object", "additionalProperties": True})
    use, unenforced = formed(ToolUse((tool,), (tool,), forced=True, several=False, format="xml"))
    answer = call("free", a="1", b="x y")
    assert fits(tool_grammar(use), answer) and not unenforced
    parser = use.parser()
    assert joined(parser.feed(answer)[1])[0].function.arguments == '{"a": 1, "b": "x y"}'


def test_a_listed_parameter_is_none_of_the_further_ones() -> None:
    """Its text would be taken for JSON of its type."""
    properties = {"on": {"type": "boolean"}, 'a "b\\': {"type": "integer"}, "off": False}
    tool = Tool("free", None, {"type": "object", "properties": properties, "additionalProperties": True})
    use, _ = formed(ToolUse((tool,), (tool,), forced=True, several=False, format="xml"))
    grammar = tool_grammar(use)
    check_grammar(grammar)
    for parameters in ({"on": "true", "only": "yes"}, {"on": "false"}, {'a "b\\': "1"}, {"o": "n"}, {}):
        assert fits(grammar, call("free", **parameters))
    for parameters in ({"on": "True"}, {"only": "yes", "on": "True"}, {"off": "x"}, {'a "b\\': "one"}):
        assert not fits(grammar, call("free", **parameters))


def test_what_a_text_cannot_enforce_is_named_or_refused() -> None:
    strings = {"plate": {"type": "string", "pattern": "^[A-Z]+$"}, "name": {"type": "string"}}
    tool = Tool("car", None, {"type": "object", "properties": strings})
    _, unenforced = formed(ToolUse((tool,), (tool,), forced=False, several=True, format="xml"))
    assert unenforced == ["tools[0].function.parameters.properties.plate.pattern"]
    with pytest.raises(ApiError, match=r"properties\.plate\.pattern: cannot be enforced"):
        formed(ToolUse((tool,), (tool,), False, True, frozenset({"car"}), "xml"))


def test_schemas_that_refer_to_themselves_are_read_once() -> None:
    node = {"anyOf": [{"$ref": "#/$defs/node"}, {"$ref": "#/$defs/node"}, {"type": "string"}]}
    properties = {f"p{number}": {"$ref": "#/$defs/node"} for number in range(50)}
    tool = Tool("deep", None, {"type": "object", "properties": properties, "$defs": {"node": node}})
    use, _ = formed(ToolUse((tool,), (tool,), forced=True, several=False, format="xml"))
    check_grammar(tool_grammar(use))
