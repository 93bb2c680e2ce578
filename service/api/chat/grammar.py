"""The grammar that an answer must match, in llguidance's form, and the limits that keep every grammar cheap.

A grammar is text in llguidance's JSON form. This module makes the grammar and checks its size, depth, references and
rules; then a confined process tries it (service/api/chat/grammar_worker.py), and the engine builds its matcher from it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import llguidance
import msgspec

from service.link.grammar_limits import MAX_GRAMMAR_BYTES, WHITESPACE

MAX_DEPTH = 64
"""Depth of nested containers in a JSON schema."""
MAX_LEVELS = 1000
"""Sum of the depths of a schema and of all definitions that it refers to: no chain of references can be deeper."""
MAX_RULES = 200
"""Rules of a Lark grammar; they may refer to each other in a chain."""
MAX_LITERAL = 4096
"""Characters of a string that an answer is matched with: a name, a value, a pattern."""
MAX_MULTIPLE = 1000
"""Largest multipleOf, in units of its last digit: a matcher has that many states."""

MAX_INTEGER = 2**63 - 1
"""Largest integer that an answer is matched with, and largest bound of an integer."""

_EXACT = 2**53
"""From this number on, doubles are farther apart than integers."""
_LOWER, _UPPER = frozenset({"minimum", "exclusiveMinimum"}), frozenset({"maximum", "exclusiveMaximum"})
FREE_FORMATS = frozenset({"binary", "directory-path", "file-path", "password", "path"})
"""What pydantic and OpenAPI say of strings that may be any. The library does not know them."""
ANY_NAME = {"type": "string"}
"""propertyNames of Zod's records: every name is a string."""
_VALUES = frozenset({"enum", "const"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords of objects whose keys are names, not keywords."""
_ANNOTATIONS = frozenset({"title", "description", "$comment", "default", "examples", "deprecated", "readOnly"})
_RULE = re.compile(r"(?:^|[\r\n])[ \t]*[?!]?[A-Za-z_]")
"""A line that begins with a name. Counts every rule, and some lines that are not rules."""
_EMBEDDED = re.compile(r"%json\s*")


def json_schema_grammar(schema: dict[str, Any]) -> str:
    """Grammar of answers that are JSON and valid against `schema`, which a check must accept."""
    return _top_level({"json_schema": with_options(schema)})


def with_options(schema: dict[str, Any]) -> dict[str, Any]:
    """The form of a schema inside a grammar, also after %json: with the rules for white space and unknown keywords, and
    with bounds that the library does not round."""
    return {
        **_with_exact_bounds(schema),
        "x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False},
    }


def _with_exact_bounds(schema: dict[str, Any], depth: int = 0) -> dict[str, Any]:
    """Adjusts bounds. The library reads them as floats, and subtracts 1 from exclusive ones. If floats are farther
    apart than that, a bound becomes the next float inside. Leaves out what allows everything, but is not supported."""
    exact = {key: _with_exact_inner(key, value, depth) for key, value in schema.items()}
    if isinstance(exact.get("format"), str) and exact["format"] in FREE_FORMATS:
        del exact["format"]
    if exact.get("propertyNames") == ANY_NAME:
        del exact["propertyNames"]
    for key in (_LOWER | _UPPER) & exact.keys():
        if isinstance(bound := exact[key], float) and bound.is_integer():
            exact[key] = int(bound)  # The digits of a float with .0 are not read exactly either.
    for key, stricter, inside in (("minimum", max, math.inf), ("maximum", min, -math.inf)):
        exclusive = "exclusive" + key.capitalize()
        if _is_rounded(given := exact.get(key)):
            exact[key] = _double(given, inside)
        if _is_rounded(given := exact.get(exclusive)):
            del exact[exclusive]
            bound = int(math.nextafter(_double(given, inside), inside))
            given = exact.get(key, bound)
            exact[key] = stricter(bound, given) if isinstance(given, int | float) else given
    return exact


def _with_exact_inner(key: str | None, value: Any, depth: int) -> Any:
    """key: the keyword that the value belongs to; None for an item of a list, and for what has a name of its own."""
    if depth > MAX_DEPTH or key in _VALUES:
        return value
    if isinstance(value, dict) and key in _NAMED:
        return {name: _with_exact_inner(None, inner, depth + 1) for name, inner in value.items()}
    if isinstance(value, dict):
        return _with_exact_bounds(value, depth + 1)
    return [_with_exact_inner(None, inner, depth + 1) for inner in value] if isinstance(value, list) else value


def _is_rounded(bound: Any) -> TypeGuard[float]:
    """Whether the library may read a bound as another number."""
    return type(bound) in (int, float) and _EXACT <= abs(bound) <= MAX_INTEGER


def _double(bound: float, inside: float) -> float:
    """The bound, or the next double in the direction of `inside`."""
    nearest = float(bound)
    outside = nearest < bound if inside > 0 else nearest > bound
    nearest = math.nextafter(nearest, inside) if outside else nearest
    return int(nearest) if isinstance(bound, int) else nearest


def regex_grammar(pattern: str) -> str:
    """Grammar of answers that match a regular expression as a whole, in the syntax of Rust's regex crate."""
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def choice_grammar(choices: Sequence[str]) -> str:
    """Grammar of answers that are one of these strings."""
    quoted = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    return _top_level({"lark_grammar": f"start: CHOICE\nCHOICE: {' | '.join(quoted)}"})


def lark_grammar(text: str) -> str:
    """Grammar of answers that match a grammar in llguidance's dialect of Lark."""
    return _top_level({"lark_grammar": text})


class Unfit(Exception):
    """Why a grammar is not accepted."""


def check_bounds(text: str) -> None:
    """Raises Unfit for a grammar that may cost too much, judging by what can be counted before it is built."""
    if (size := len(text.encode(errors="replace"))) > MAX_GRAMMAR_BYTES:
        raise Unfit(f"too large: {size} bytes as a grammar, at most {MAX_GRAMMAR_BYTES} allowed")
    for grammar in msgspec.json.decode(text)["grammars"]:
        if (schema := grammar.get("json_schema")) is not None:
            _check_schema(schema)
        else:
            _check_lark(grammar["lark_grammar"])


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
    named = [_target(schema, reference) for reference in targets]
    # Thousands of references may name one part, such as the whole schema.
    depths = {place: _depth(part) for place, part in {id(part): part for part in named}.items()}
    levels += sum(depths[id(part)] for part in named)
    if levels > MAX_LEVELS:
        raise Unfit(f"references too deep: {levels} levels given, at most {MAX_LEVELS} allowed")


def _too_large(key: str | None, value: float) -> str:
    """Why a number would be rounded to another one; "" if it would not be."""
    if (key in _LOWER and value > MAX_INTEGER) or (key in _UPPER and value < -MAX_INTEGER):
        return f"{key}: too large: a number from -{MAX_INTEGER} to {MAX_INTEGER} allowed"
    if key in _LOWER | _UPPER:
        exclusive = key is not None and key.startswith("exclusive")
        rounded = _is_rounded(value) and (exclusive or (isinstance(value, int) and int(float(value)) != value))
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


def _target(schema: Any, reference: str) -> Any:
    """The part of the schema that a reference names; the whole schema if it cannot be found that simply."""
    found = schema
    for step in reference.removeprefix("#").split("/")[1:]:
        if not isinstance(found, dict):
            return schema
        found = found.get(step.replace("~1", "/").replace("~0", "~"), schema)
    return found


def _units(value: float) -> float:
    """The number without its decimal point and the zeros after its last digit: 0.25 -> 25."""
    if abs(value) > MAX_INTEGER:  # it may be too large for a float
        return abs(value)
    mantissa, _, exponent = f"{abs(value):.15e}".partition("e")
    digits = mantissa.replace(".", "").rstrip("0")
    return int(digits or "0") * 10 ** max(0, int(exponent) - len(digits) + 1)
