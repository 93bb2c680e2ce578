"""What becomes a grammar, what is refused with which words, and that no grammar costs more than its budget."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest

from benchmarks.servers.footprint import inspect
from service.api.http.errors import ApiError
from service.api.structured import grammar as grammar_module
from service.api.structured.grammar import (
    MAX_GRAMMAR_BYTES,
    GrammarChecks,
    choice_grammar,
    form_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from service.api.structured.grammar_worker import problem
from service.api.structured.schema_form import LIBRARY_FORMATS, PATTERNED_FORMATS, Unfit, schema_form, shown, without
from service.engine.chat.guided.mask_server import deep_executor
from service.link.messages import PARSER_LIMITS
from tests.support.grammars import check_grammar
from tests.support.processes import stand_still
from tests.support.rows import rows
from tests.support.schemas import SUPPORTED, UNSUPPORTED
from tests.support.waiting import GENEROUS, until

BYTES = llguidance.LLTokenizer("byte")
PAGE = Path(__file__).parents[3] / "docs/structured_output.md"


def accepts(grammar: str, answer: str) -> bool:
    """Whether the grammar allows the whole answer, byte by byte."""
    limits = llguidance.LLParserLimits(**PARSER_LIMITS)
    matcher = llguidance.LLMatcher(BYTES, grammar, log_level=0, limits=limits)
    raw = answer.encode()
    return matcher.try_consume_tokens(list(raw)) == len(raw) and matcher.is_accepting()


def refused(make: Callable[[], str]) -> str:
    with pytest.raises(Unfit) as caught:
        check_grammar(make())
    return str(caught.value)


@pytest.mark.parametrize("keyword", SUPPORTED)
def test_a_supported_keyword_decides_what_an_answer_may_be(keyword: str) -> None:
    schema, right, wrong = SUPPORTED[keyword]
    assert keyword in json.dumps(schema)
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    checker = validator(schema, format_checker=jsonschema.FormatChecker())
    assert checker.is_valid(json.loads(right)) and not checker.is_valid(json.loads(wrong))
    grammar = json_schema_grammar(schema)
    check_grammar(grammar)
    assert accepts(grammar, right) and not accepts(grammar, wrong)


def test_refusals_name_the_path_and_the_keyword() -> None:
    for keyword, value in UNSUPPORTED.items():
        inner = {"type": "object", "properties": {"a": {keyword: value}}, "required": ["a"]}
        assert refused(partial(json_schema_grammar, inner)) == f"properties.a.{keyword}: no grammar can enforce it"


def test_formats() -> None:
    """Those that are known are enforced, and all others are annotations."""
    assert schema_form({"type": "string", "format": "json-pointer"}) == {"type": "string"}
    known = [*LIBRARY_FORMATS, *PATTERNED_FORMATS]
    for name in known:
        assert schema_form({"type": "string", "format": name}).keys() & {"format", "pattern"}
        check_grammar(json_schema_grammar({"type": "string", "format": name}))
    listed = re.search(r"Supported values of `format` are ([^;]+);", PAGE.read_text())
    assert listed and re.split(", | and ", " ".join(listed[1].split())) == known


def test_no_format_goes_on_for_ever() -> None:
    """A model that likes one character, or is biased to it, would write it up to max_tokens."""
    endless = {"uri": "http://a{}", "hostname": "a{}", "email": "a{}@b.c", "time": "01:02:03.1{}Z"}
    endless |= {"date-time": "2024-01-02T01:02:03.1{}Z", "duration": "P1{}D"}
    for name, text in endless.items():
        grammar = json_schema_grammar({"type": "string", "format": name})
        assert [accepts(grammar, json.dumps(text.format("1" * more))) for more in (0, 2048)] == [True, False], name


def test_the_page_lists_the_keywords() -> None:
    _, supported, unsupported, _ = re.split("<!-- (?:supported|unsupported|end) -->", PAGE.read_text())
    for part, keywords in ((supported, SUPPORTED), (unsupported, UNSUPPORTED)):
        assert set(re.findall(r"`([$a-zA-Z]+)`", part)) == set(keywords)


def test_json_may_be_indented_but_not_padded() -> None:
    grammar = json_schema_grammar({"type": "object"})
    value = {"a": [1, {"b": None}], "c": "x"}
    assert accepts(grammar, json.dumps(value)) and accepts(grammar, json.dumps(value, separators=(",", ":")))
    assert accepts(grammar, json.dumps(value, indent=2))
    assert not accepts(grammar, '{"a":  1}') and not accepts(grammar, " {}")


def test_a_schema_cannot_loosen_the_rules() -> None:
    assert "not" in refused(partial(json_schema_grammar, {"x-guidance": {"lenient": True}, "not": {}}))


def test_choices_are_literal() -> None:
    for choice in ("red", "", 'é\n\t"quoted" \\ /end/', "日本 🙂", "a|b"):
        grammar = choice_grammar(["other", choice])
        check_grammar(grammar)
        assert accepts(grammar, choice) and accepts(grammar, "other") and not accepts(grammar, choice + "x")


def chain(length: int) -> dict[str, Any]:
    steps = {f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**steps, f"a{length}": {"type": "integer"}}}


def nested(depth: int) -> dict[str, Any]:
    return {"type": "array", "items": nested(depth - 1)} if depth else {"type": "integer"}


def rules(name: str, count: int, form: str) -> str:
    """A Lark grammar in which each rule, of this name and a number, is `form` and there needs the NEXT one."""
    each = (f"{name}{number}: {form.replace('NEXT', f'{name}{number + 1}')}" for number in range(count))
    return "\n".join([f"start: {name}0", *each, f'{name}{count}: "x"'])


MAKERS: dict[str, Callable[[Any], str]] = {
    "json": json_schema_grammar,
    "regex": regex_grammar,
    "choice": choice_grammar,
    "grammar": lark_grammar,
}
TOO_LARGE: list[tuple[str, Any]] = [
    ("json", {"enum": ["x" * 10_000_000]}),
    ("json", {"enum": [f"{i}" for i in range(100_000)]}),
    ("regex", "a" * MAX_GRAMMAR_BYTES + "b"),
    ("choice", [f"{i}" for i in range(100_000)]),
    ("choice", ["a"] * 13_000),
    ("grammar", f'start: "{"a" * MAX_GRAMMAR_BYTES}"'),
]
"""What is refused before it becomes a grammar: a field and its value."""
REFUSED: list[tuple[str, Any, str]] = [
    ("json", {"enum": [f"{i}" for i in range(10_000)]}, "too large"),
    ("json", nested(70), "nested too deeply"),
    ("grammar", rules("A", 60, "NEXT NEXT"), "too big"),
    ("grammar", "start: " + "(" * 9000 + '"a"' + ")" * 9000, "too deeply nested"),
    ("json", {"const": "x" * 5000}, "string of 5000 characters"),
    ("json", {"multipleOf": 10**400}, "multipleOf"),
    ("json", {"allOf": [{"anyOf": [{"pattern": f"{i}{j}"} for j in range(3)]} for i in range(14)]}, "too complex"),
    ("regex", "(a|b)*a" + "(a|b)?" * 800, "too complex"),
    *rows(__file__, "refused_grammars.jsonl"),
]


def test_no_time_is_spent_on_what_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    for used in ("schema_form", "_top_level", "llguidance"):
        monkeypatch.setattr(grammar_module, used, None)
    for field, value in TOO_LARGE:
        with pytest.raises(Unfit, match=r"too large: [0-9]+ bytes, at most 65536 allowed as a grammar"):
            MAKERS[field](value)


def test_bounds_of_a_whole_type_are_moved_inwards() -> None:
    for most, wrong in ((2**63 - 1, 2**63), (2**64 - 1, -1)):
        bounded = {"type": "integer", "minimum": 0, "maximum": most}
        grammar = json_schema_grammar({"type": "object", "properties": {"a": bounded}})
        check_grammar(grammar)
        assert [number for number in (0, 2**62, wrong) if accepts(grammar, f'{{"a": {number}}}')] == [0, 2**62]


def test_numbers_that_would_be_rounded_are_refused() -> None:
    for schema, reason in rows(__file__, "rounded_numbers.jsonl"):
        assert reason in refused(partial(json_schema_grammar, schema))


LARGE: dict[str, tuple[str, Any]] = {
    "longest chain": ("json", chain(300)),
    "longest chain of rules": ("grammar", rules("A", 190, 'NEXT "y"')),
    "deepest rules": ("grammar", rules("a", 190, '(((("x" NEXT | "y"))))')),
    "deepest": ("json", nested(30)),
    "most choices": ("choice", [f"value number {i}" for i in range(2500)]),
    "repetitions": ("regex", "(((a{1,1000}){1,1000}){1,1000}){1,1000}"),
    "backtracking": ("regex", "((x+x+)+y|(a|b)*a(a|b){300})"),
    "many patterns": (
        "json",
        {
            "type": "object",
            "properties": {f"p{i}": {"type": "string", "pattern": f"(a|b)*{i}(a|b){{40}}"} for i in range(200)},
        },
    ),
    "ambiguous": ("grammar", 'start: start start | "a" | ""'),
}
TOO_COMPLEX = ("repetitions",)
"""Accepted, and stopped by the budget of a token on the way."""


@pytest.mark.parametrize("name", LARGE)
def test_the_largest_accepted_grammars_are_built_and_advance(name: str) -> None:
    """In a thread with the stack of those that build matchers and compute masks."""
    field, value = LARGE[name]
    grammar = MAKERS[field](value)
    assert len(grammar) <= MAX_GRAMMAR_BYTES
    check_grammar(grammar)
    with deep_executor("grammars") as thread:
        thread.submit(advance, name, grammar).result()


def advance(name: str, grammar: str) -> None:
    limits = llguidance.LLParserLimits(**PARSER_LIMITS)
    matcher = llguidance.LLMatcher(BYTES, grammar, log_level=0, limits=limits)
    mask = np.zeros((1, 9), dtype=np.int32)
    for _ in range(40):
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        bits = int.from_bytes(mask.tobytes(), "little") & (2**256 - 1)
        if not bits:
            break
        matcher.consume_token(bits.bit_length() - 1)
    assert matcher.stop_reason() in ("NotStopped", "NoExtension") or name in TOO_COMPLEX


POINT: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def takes(schema: dict[str, Any], value: Any) -> bool:
    return accepts(json_schema_grammar(schema), json.dumps(value))


def test_objects_are_closed_at_every_place_but_where_they_may_need_more_names() -> None:
    for schema, listed, more, is_open in rows(__file__, "objects.jsonl"):
        assert (takes(schema, listed), takes(schema, more)) == (True, is_open), schema


def test_a_schema_that_is_given_is_not_changed() -> None:
    schema = {"type": "array", "items": POINT, "examples": [{"properties": {"x": 1}}]}
    before = json.dumps(schema)
    assert schema_form(schema)["items"]["additionalProperties"] is False
    assert json.dumps(schema) == before


def test_what_generators_write() -> None:
    """Rows: who writes it, schema, values that fit, values that do not, paths that are left out unless it is strict."""
    for origin, schema, fits, breaks, left_out in rows(__file__, "generated_schemas.jsonl"):
        form = schema_form(schema, loose=True)
        while path := problem(form_grammar(form))[1]:
            assert shown(path) in left_out, origin
            form = without(form, path)
        check_grammar(grammar := form_grammar(form))
        assert [value for value in fits if not accepts(grammar, json.dumps(value))] == [], origin
        assert [value for value in breaks if accepts(grammar, json.dumps(value))] == [], origin
        if left_out:
            assert refused(partial(json_schema_grammar, schema)).partition(": ")[0] in left_out, origin
        else:
            check_grammar(json_schema_grammar(schema))


COLORS = choice_grammar(["red", "blue"])
OVERFLOWING = {
    "$ref": "#/$defs/a0",
    "$defs": {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(1000)} | {"a1000": {}},
}


@pytest.fixture
async def checks() -> AsyncIterator[GrammarChecks]:
    checks = GrammarChecks()
    yield checks
    checks.close()


async def check(checks: GrammarChecks, grammar: str | Callable[[], str]) -> str:
    return await checks.checked(grammar if callable(grammar) else lambda: grammar, "guided")


async def refusal(checks: GrammarChecks, grammar: str | Callable[[], str]) -> str:
    with pytest.raises(ApiError) as caught:
        await check(checks, grammar)
    error = caught.value
    assert (error.status, error.param, error.code) == (400, "guided", "invalid_grammar")
    return error.message


async def test_clients_take_turns_at_making_grammars(checks: GrammarChecks) -> None:
    begun, go_on, order = threading.Event(), threading.Event(), list[str]()

    def make(name: str) -> str:
        order.append(name)
        begun.set()
        assert go_on.wait(GENEROUS)
        return COLORS

    names = ["hostile 1", "hostile 2", "hostile 3", "other"]
    asked = [checks.checked(partial(make, name), "guided", name.split()[0]) for name in names]
    making = asyncio.gather(*asked)
    await until(begun.is_set, what="the first one is being made")
    go_on.set()
    assert await making == [COLORS] * 4
    assert order == ["hostile 1", "hostile 2", "other", "hostile 3"]


async def test_one_process_tries_all_large_and_hostile_grammars(checks: GrammarChecks) -> None:
    for field, value in LARGE.values():
        assert await check(checks, grammar := MAKERS[field](value)) == grammar
    for field, value, reason in REFUSED:
        assert reason in await refusal(checks, partial(MAKERS[field], value))
    assert checks.workers.workers_lost == 0 and len(checks.workers._idle) == 1


async def test_a_grammar_that_overflows_the_stack_is_too_complex(checks: GrammarChecks) -> None:
    assert await check(checks, COLORS) == COLORS
    pid = checks.workers._idle[-1].pid
    for lost, grammar in enumerate((json_schema_grammar(OVERFLOWING), lark_grammar(rules("a", 2500, "NEXT"))), 1):
        message = await refusal(checks, grammar)
        assert message == "guided: too complex: checking it takes more time, memory or stack than allowed."
        assert checks.workers.workers_lost == lost
    other = regex_grammar("[a-z]+")
    assert await check(checks, other) == other
    assert checks.workers._idle[-1].pid != pid and inspect(pid) is None


async def test_a_process_has_limits_on_memory_and_processor_time(checks: GrammarChecks) -> None:
    await check(checks, COLORS)
    lines = Path(f"/proc/{checks.workers._idle[-1].pid}/limits").read_text().splitlines()
    limits = {line[:25].strip(): line[25:].split()[0] for line in lines}
    assert limits["Max address space"] == str(1 << 30) and limits["Max core file size"] == "0"
    assert int(limits["Max cpu time"]) < 60


async def test_what_was_tried_is_not_tried_again(checks: GrammarChecks) -> None:
    wrong = regex_grammar("(?=a)a")
    assert "look-around" in await refusal(checks, wrong)
    assert await check(checks, COLORS) == COLORS
    stand_still(checks.workers._idle[-1].pid)
    assert await check(checks, COLORS) == COLORS and "look-around" in await refusal(checks, wrong)
