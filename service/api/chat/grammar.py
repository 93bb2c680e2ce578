"""The grammar that an answer must match, in llguidance's form, and the limits that keep every grammar cheap.

A grammar is text in llguidance's JSON form. This module makes the grammar and checks its size, depth, references and
rules; then a confined process tries it (service/api/chat/grammar_worker.py), and the engine builds its matcher from it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import llguidance
import msgspec

from service.api.chat.schema_form import (
    LOWER,
    MAX_DEPTH,
    MAX_INTEGER,
    MAX_LITERAL,
    UPPER,
    Unfit,
    is_rounded,
    target,
    with_options,
)
from service.link.grammar_limits import MAX_GRAMMAR_BYTES

MAX_SCHEMA_BYTES = 4 * MAX_GRAMMAR_BYTES
"""Bytes of a schema's JSON before it has the form of a grammar, which leaves a few keywords out. The tools of a request
may have as many together."""
MAX_LEVELS = 1000
"""Sum of the depths of a schema and of all definitions that it refers to: no chain of references can be deeper."""
MAX_RULES = 200
"""Rules of a Lark grammar; they may refer to each other in a chain."""
MAX_MULTIPLE = 1000
"""Largest multipleOf, in units of its last digit: a matcher has that many states."""

_ANNOTATIONS = frozenset({"title", "description", "$comment", "default", "examples", "deprecated", "readOnly"})
_RULE = re.compile(r"(?:^|[\r\n])[ \t]*[?!]?[A-Za-z_]")
"""A line that begins with a name. Counts every rule, and some lines that are not rules."""
_AROUND_CHOICE = len('"" | ')
"""Characters that a choice takes beside its own."""
_EMBEDDED = re.compile(r"%json\s*")


def json_schema_grammar(schema: dict[str, Any]) -> str:
    """Grammar of answers that are JSON and valid against `schema`, which a check must accept. They have only names that
    it lists, unless it says that others are allowed. Unfit if it is too large or cannot be said in a grammar."""
    _check_size(len(msgspec.json.encode(schema)), MAX_SCHEMA_BYTES)
    return _top_level({"json_schema": with_options(schema)})


def regex_grammar(pattern: str) -> str:
    """Grammar of answers that match a regular expression as a whole, in the syntax of Rust's regex crate."""
    _check_size(len(pattern))
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def choice_grammar(choices: Sequence[str]) -> str:
    """Grammar of answers that are one of these strings."""
    _check_size(sum(map(len, choices)) + _AROUND_CHOICE * len(choices))
    quoted = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    return _top_level({"lark_grammar": f"start: CHOICE\nCHOICE: {' | '.join(quoted)}"})


def lark_grammar(text: str) -> str:
    """Grammar of answers that match a grammar in llguidance's dialect of Lark."""
    _check_size(len(text))
    return _top_level({"lark_grammar": text})


def check_bounds(text: str) -> None:
    """Raises Unfit for a grammar that may cost too much, judging by what can be counted before it is built."""
    _check_size(len(text.encode(errors="replace")))
    for grammar in msgspec.json.decode(text)["grammars"]:
        if (schema := grammar.get("json_schema")) is not None:
            _check_schema(schema)
        else:
            _check_lark(grammar["lark_grammar"])


def _check_size(size: int, most: int = MAX_GRAMMAR_BYTES) -> None:
    """size: the bytes of a grammar, or what is known of them before the time is spent to make it."""
    if size > most:
        raise Unfit(f"too large: {size} bytes, at most {MAX_GRAMMAR_BYTES} allowed as a grammar")


def _top_level(grammar: dict[str, Any]) -> str:
    return msgspec.json.encode({"grammars": [grammar]}).decode()


def _check_schema(schema: Any) -> None:
    targets: set[str] = set()
    levels = _depth(schema)
    for key, value in _constraints(schema):
        if isinstance(value, str) and len(value) > MAX_LITERAL:
            raise Unfit(f"a string of {len(value)} characters given, at most {MAX_LITERAL} allowed")
        if key == "multipleOf" and isinstance(value, int | float) and _units(value) > MAX_MULTIPLE:
            raise Unfit(f"multipleOf: at most {MAX_MULTIPLE} units of its last digit allowed")
        if isinstance(value, int | float) and (problem := _too_large(key, value)):
            raise Unfit(problem)
        if key in ("$ref", "$dynamicRef", "$recursiveRef") and isinstance(value, str):
            targets.add(value)
    named = [target(schema, reference) for reference in targets]
    # Thousands of references may name one part, such as the whole schema.
    depths = {place: _depth(part) for place, part in {id(part): part for part in named}.items()}
    levels += sum(depths[id(part)] for part in named)
    if levels > MAX_LEVELS:
        raise Unfit(f"references too deep: {levels} levels given, at most {MAX_LEVELS} allowed")


def _too_large(key: str | None, value: float) -> str:
    """Why a number would be rounded to another one; "" if it would not be."""
    # The library takes a larger integer as an upper bound: no answer reaches it.
    if (key in LOWER and abs(value) > MAX_INTEGER) or (
        key in UPPER and not -MAX_INTEGER <= value <= sys.float_info.max
    ):
        return f"{key}: too large: a number from -{MAX_INTEGER} to {MAX_INTEGER} allowed"
    if key in LOWER | UPPER:
        exclusive = key is not None and key.startswith("exclusive")
        rounded = is_rounded(value) and (exclusive or (isinstance(value, int) and int(float(value)) != value))
        return f"{key}: {value} cannot be told from the numbers beside it" if rounded else ""
    large = isinstance(value, int) and abs(value) > MAX_INTEGER
    return f"an integer of {len(str(abs(value)))} digits given, at most {MAX_INTEGER} allowed" if large else ""


def _check_lark(text: str) -> None:
    rules = len(_RULE.findall(text))
    if rules > MAX_RULES:
        raise Unfit(f"too many rules: {rules} given, at most {MAX_RULES} allowed")
    levels = sum(1 + _brackets(rule) for rule in _RULE.split(text))
    if levels > MAX_LEVELS:
        raise Unfit(f"rules too deep: {levels} levels of brackets given, at most {MAX_LEVELS} allowed")
    for found in _EMBEDDED.finditer(text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError):
            raise Unfit("%json must be followed by a JSON schema") from None
        _check_schema(schema)


def _brackets(rule: str) -> int:
    """Depth of nested brackets, including those in strings."""
    depth = deepest = 0
    for character in rule:
        if character in "([":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]":
            depth = max(0, depth - 1)
    return deepest


def _constraints(schema: Any) -> Iterator[tuple[str | None, Any]]:
    """(key, value) of everything in a schema except annotations; names of properties count as values, too."""
    stack = [(None, schema)]
    while stack:
        key, value = stack.pop()
        yield key, value
        if isinstance(value, dict):
            yield from ((None, name) for name in value)
            stack += [(name, inner) for name, inner in value.items() if name not in _ANNOTATIONS or key == "properties"]
        elif isinstance(value, list):
            stack += [(None, inner) for inner in value]


def _depth(value: Any) -> int:
    """Containers inside each other."""
    depth, layer = 0, [value]
    while layer := [inner for inner in layer if isinstance(inner, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise Unfit(f"nested too deeply: at most {MAX_DEPTH} levels allowed")
        layer = [inner for outer in layer for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return depth


def _units(value: float) -> float:
    """The number without its decimal point and the zeros after its last digit: 0.25 -> 25."""
    if abs(value) > MAX_INTEGER:  # it may be too large for a float
        return abs(value)
    mantissa, _, exponent = f"{abs(value):.15e}".partition("e")
    digits = mantissa.replace(".", "").rstrip("0")
    return int(digits or "0") * 10 ** max(0, int(exponent) - len(digits) + 1)
