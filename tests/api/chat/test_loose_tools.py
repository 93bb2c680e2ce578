"""Tools with schemas that no grammar can say as a whole: without `strict` they are called nonetheless."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from models.media import Tool
from service.api.chat import route, tool_grammar
from service.api.chat.grammar_checks import GrammarChecks
from service.api.chat.loose_schema import UNENFORCED
from service.api.chat.tool_grammar import checked_tool_grammar
from service.api.chat.tools import ToolUse
from service.api.http.errors import ApiError
from tests.api.chat.test_tools import USER, fits
from tests.support.schemas import UNSUPPORTED
from tests.support.servers import RunningServer
from tests.support.tool_samples import call_text

COUNT = {"type": "integer", "minimum": 0, "maximum": 9}
AS_GIVEN = ["a", "a"]

LOOSER: dict[str, tuple[dict[str, Any], Any]] = {
    **{keyword: ({"$comment": "any", keyword: value}, 5) for keyword, value in UNSUPPORTED.items()},
    "uniqueItems": ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, AS_GIVEN),
    "a format": ({"type": "string", "format": "uri-reference"}, "a b"),
    "schemas that both fit": ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "a"),
    "oneOf beside anyOf": ({"anyOf": [{"type": "null"}], "oneOf": [{}, {"type": "null"}]}, None),
    "look-behind": ({"type": "string", "pattern": "(?<=b)a"}, "c"),
    "a pattern that other engines read": ({"type": "string", "pattern": "^{.*}$"}, "{}"),
    "names with look-behind": (
        {"type": "object", "patternProperties": {"(?<=b)a": {}}, "additionalProperties": False},
        {"ba": 1},
    ),
    "a schema elsewhere": ({"$ref": "https://example.com/schema.json"}, 5),
    "deep inside": ({"type": "array", "items": {"type": "object", "properties": {"not": {"not": {}}}}}, [{"not": 1}]),
}
"""A property of a tool that is not supported, and a value that its grammar lets through."""


def parameters(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": part, "count": COUNT}, "required": ["x", "count"]}


def grammar_of(*tools: Tool, strict: frozenset[str] = frozenset()) -> str:
    async def checked() -> str:
        checks = GrammarChecks()
        try:
            return await checked_tool_grammar(checks, ToolUse(tools, tools, True, True, strict), "")
        finally:
            checks.close()

    return asyncio.run(checked())


@pytest.fixture(scope="module")
def url(server: RunningServer) -> str:
    return f"{server.url}/v1/chat/completions"


@pytest.mark.parametrize("name", LOOSER)
def test_only_a_strict_tool_is_refused(url: str, name: str) -> None:
    function = {"name": "f", "parameters": parameters(LOOSER[name][0])}
    for strict, status in ((None, 200), (False, 200), (True, 400)):
        tools = [{"type": "function", "function": {**function, "strict": strict}}]
        answer = httpx.post(url, json={"model": "tiny", "messages": [USER], "tools": tools})
        assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("tools[0].function.parameters", "invalid_grammar")


@pytest.mark.parametrize("name", LOOSER)
def test_what_a_grammar_can_say_is_enforced(name: str) -> None:
    part, value = LOOSER[name]
    grammar = grammar_of(Tool("f", None, parameters(part)))
    assert fits(grammar, call_text("f", x=value, count=3))
    assert not fits(grammar, call_text("f", x=value, count=10))
    assert not fits(grammar, call_text("f", count=3))


def test_other_tools_of_the_request_keep_their_schemas() -> None:
    loose = Tool("loose", None, parameters({"not": {"type": "null"}}))
    exact = Tool("exact", None, parameters({"oneOf": [{"type": "string", "pattern": "^a+$"}, {"type": "null"}]}))
    grammar = grammar_of(loose, exact, strict=frozenset({"exact"}))
    assert fits(grammar, call_text("loose", x="b", count=3)) and fits(grammar, call_text("exact", x="a", count=3))
    assert not fits(grammar, call_text("exact", x="b", count=3))


def test_a_pattern_stays_where_something_else_is_in_the_way() -> None:
    tool = Tool("f", None, parameters({"type": "string", "pattern": "^a+$", "not": {"const": "a"}}))
    grammar = grammar_of(tool)
    assert fits(grammar, call_text("f", x="aa", count=3)) and not fits(grammar, call_text("f", x="b", count=3))


def test_tools_are_looked_at_in_threads(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is answered while the event loop looks at large ones."""
    threads: dict[str, str] = {}

    def noting(name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any) -> Any:
            threads[name] = threading.current_thread().name
            return usual(*given)

        return noted

    monkeypatch.setattr(route, "tool_use", noting("tool_use", route.tool_use))
    monkeypatch.setattr(tool_grammar, "looser_schemas", noting("looser_schemas", tool_grammar.looser_schemas))
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters({"not": {}})}}]
    answer = httpx.post(url, json={"model": "tiny", "messages": [USER], "tools": tools})
    assert answer.status_code == 200, answer.text
    assert threads["tool_use"].startswith("work") and threads["looser_schemas"].startswith("grammars")


def test_what_no_schema_says_is_refused_without_strict() -> None:
    with pytest.raises(ApiError) as caught:
        grammar_of(Tool("f", None, parameters({"type": "any", "not": {}})))
    assert caught.value.param == "tools[0].function.parameters" and "any" in caught.value.message


def test_every_unsupported_keyword_is_left_out() -> None:
    assert UNSUPPORTED.keys() <= UNENFORCED
