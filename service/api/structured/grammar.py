"""The grammar that an answer must match, in llguidance's form, and the limits that keep every grammar cheap.

A grammar is text in llguidance's JSON form. This module makes the grammar and checks its size, depth, references and
rules; then a confined process tries it (service/api/structured/grammar_worker.py), and the engine builds its matcher
from it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import llguidance
import msgspec

from service.api.structured.schema_form import MAX_DEPTH, Unfit, as_grammar, schema_form, target
from service.link.sampling_limits import MAX_GRAMMAR_BYTES

MAX_SCHEMA_BYTES = 4 * MAX_GRAMMAR_BYTES
"""Bytes of a schema's JSON before it has the form of a grammar, which leaves a few keywords out. The tools of a request
may have as many together."""
MAX_LEVELS = 1000
"""Sum of the depths of a schema and of all definitions that it refers to: no chain of references can be deeper."""
MAX_RULES = 200
"""Rules of a Lark grammar; they may refer to each other in a chain."""

_RULE = re.compile(r"(?:^|[\r\n])[ \t]*[?!]?[A-Za-z_]")
"""A line that begins with a name. Counts every rule, and some lines that are not rules."""
_AROUND_CHOICE = len('"" | ')
"""Characters that a choice takes beside its own."""
_EMBEDDED = re.compile(r"%json\s*")


def json_schema_grammar(schema: Mapping[str, Any], unenforced: list[str] | None = None) -> str:
    """Grammar of answers that are JSON and valid against `schema`, which a check must accept. They have only names that
    it lists, unless it says that others are allowed. Unfit if it is too large or cannot be said in a grammar.

    unenforced: gets the paths of what is not enforced (schema_form).
    """
    check_size(len(msgspec.json.encode(schema)), MAX_SCHEMA_BYTES)
    form, left_out = schema_form(schema)
    if unenforced is not None:
        unenforced += left_out
    return form_grammar(form)


def form_grammar(form: Mapping[str, Any]) -> str:
    """Grammar of a schema that has its form already."""
    return _top_level({"json_schema": as_grammar(form)})


def regex_grammar(pattern: str) -> str:
    """Grammar of answers that match a regular expression as a whole, in the syntax of Rust's regex crate."""
    check_size(len(pattern))
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def choice_grammar(choices: Sequence[str]) -> str:
    """Grammar of answers that are one of these strings."""
    check_size(sum(map(len, choices)) + _AROUND_CHOICE * len(choices))
    quoted = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    return _top_level({"lark_grammar": f"start: CHOICE\nCHOICE: {' | '.join(quoted)}"})


def lark_grammar(text: str) -> str:
    """Grammar of answers that match a grammar in llguidance's dialect of Lark. Schemas in it get their form."""
    check_size(len(text))
    parts, at = [], 0
    for begin, end, schema in _embedded(text):
        formed = schema_form(schema)[0] if isinstance(schema, dict) else schema
        parts += [text[at:begin], json.dumps(formed, ensure_ascii=False)]
        at = end
    return formed_lark_grammar("".join([*parts, text[at:]]))


def formed_lark_grammar(text: str) -> str:
    """Grammar of a text in Lark whose schemas have their form already."""
    return _top_level({"lark_grammar": text})


def check_bounds(text: str) -> None:
    """Raises Unfit for a grammar that may cost too much, judging by what can be counted before it is built."""
    check_size(len(text.encode(errors="replace")))
    for grammar in msgspec.json.decode(text)["grammars"]:
        if (schema := grammar.get("json_schema")) is not None:
            _check_levels(schema)
        else:
            _check_lark(grammar["lark_grammar"])


def check_size(size: int, most: int = MAX_GRAMMAR_BYTES) -> None:
    """size: the bytes of a grammar, or what is known of them before the time is spent to make it."""
    if size > most:
        raise Unfit(f"too large: {size} bytes, at most {MAX_GRAMMAR_BYTES} allowed as a grammar")


def _top_level(grammar: dict[str, Any]) -> str:
    return msgspec.json.encode({"grammars": [grammar]}).decode()


def _check_levels(schema: Any) -> None:
    """Unfit for a schema that is too deep, together with all definitions that it refers to."""
    # Thousands of references may name one part, such as the whole schema.
    named = [part for reference in set(_references(schema)) if (part := target(schema, reference)) is not None]
    depths = {place: _depth(part) for place, part in {id(part): part for part in named}.items()}
    levels = _depth(schema) + sum(depths[id(part)] for part in named)
    if levels > MAX_LEVELS:
        raise Unfit(f"references too deep: {levels} levels given, at most {MAX_LEVELS} allowed")


def _check_lark(text: str) -> None:
    rules = len(_RULE.findall(text))
    if rules > MAX_RULES:
        raise Unfit(f"too many rules: {rules} given, at most {MAX_RULES} allowed")
    levels = sum(1 + _brackets(rule) for rule in _RULE.split(text))
    if levels > MAX_LEVELS:
        raise Unfit(f"rules too deep: {levels} levels of brackets given, at most {MAX_LEVELS} allowed")
    for _, _, schema in _embedded(text):
        _check_levels(schema)


def _embedded(text: str) -> Iterator[tuple[int, int, Any]]:
    """(begin, end, schema) of the schemas in a text in Lark."""
    for found in _EMBEDDED.finditer(text):
        try:
            schema, end = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError):
            raise Unfit("%json must be followed by a JSON schema") from None
        yield found.end(), end, schema


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


def _references(schema: Any) -> Iterator[str]:
    stack = [schema]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            if isinstance(reference := value.get("$ref"), str):
                yield reference
            stack += value.values()
        elif isinstance(value, list):
            stack += value


def _depth(value: Any) -> int:
    """Containers inside each other."""
    depth, layer = 0, [value]
    while layer := [inner for inner in layer if isinstance(inner, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise Unfit(f"nested too deeply: at most {MAX_DEPTH} levels allowed")
        layer = [inner for outer in layer for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return depth
