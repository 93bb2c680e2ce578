"""JSON schemas for tests: random ones, and one for each keyword with an answer that fits it and one that does not."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

Schema = dict[str, Any]

NAMES = ("a", "b", "name", "total", "x y")
PATTERNS = ("^[a-f]{2,6}$", "^(red|blue)-[0-9]{1,3}$", "ab", "^$|z")
FORMATS = ("date", "uuid", "ipv4", "ipv6")


def random_schema(dice: random.Random, depth: int = 3) -> Schema:
    """Any mixture of supported keywords, with bounds so that an answer ends. Some have no answer at all."""
    kinds = ["string", "integer", "number", "enum", "const", "boolean", "pattern", "format"]
    if depth:
        kinds += ["object", "object", "array", "array", "map", "anyOf", "allOf", "tuple", "ref"]
    kind = dice.choice(kinds)
    return _MAKERS[kind](dice, depth)


def _string(dice: random.Random, depth: int) -> Schema:
    low = dice.randrange(4)
    return {"type": "string", "minLength": low, "maxLength": low + dice.randrange(5)}


def _number(kind: str, dice: random.Random) -> Schema:
    low = dice.randrange(-50, 50)
    schema: Schema = {"type": kind, dice.choice(["minimum", "exclusiveMinimum"]): low}
    if dice.random() < 0.5:
        schema[dice.choice(["maximum", "exclusiveMaximum"])] = low + dice.randrange(2, 90)
    if kind == "integer" and dice.random() < 0.3:
        schema["multipleOf"] = dice.choice([2, 3, 7])
    return schema


def _value(dice: random.Random) -> Any:
    return dice.choice([None, True, 3, -1.5, "", "red", 'say "hi"', [1, "a"], {"k": [None]}])


def _object(dice: random.Random, depth: int) -> Schema:
    names = dice.sample(NAMES, dice.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(dice, depth - 1) for name in names},
        "required": [name for name in names if dice.random() < 0.6],
        "additionalProperties": False,
    }


def _map(dice: random.Random, depth: int) -> Schema:
    return {
        "type": "object",
        "patternProperties": {"^k[0-9]$": random_schema(dice, depth - 1)},
        "additionalProperties": False,
        "maxProperties": dice.randrange(1, 4),
    }


def _array(dice: random.Random, depth: int) -> Schema:
    low = dice.randrange(3)
    return {
        "type": "array",
        "items": random_schema(dice, depth - 1),
        "minItems": low,
        "maxItems": low + dice.randrange(3),
    }


def _tuple(dice: random.Random, depth: int) -> Schema:
    items = [random_schema(dice, depth - 1) for _ in range(dice.randrange(1, 3))]
    return {"type": "array", "prefixItems": items, "minItems": len(items), "items": False}


def _reference(dice: random.Random, depth: int) -> Schema:
    """A list that may hold itself."""
    item = {"anyOf": [random_schema(dice, depth - 1), {"$ref": "#"}]}
    return {"type": "array", "items": item, "maxItems": 2} if depth == 3 else random_schema(dice, depth - 1)


_MAKERS = {
    "string": _string,
    "integer": lambda dice, depth: _number("integer", dice),
    "number": lambda dice, depth: _number("number", dice),
    "boolean": lambda dice, depth: {"type": ["boolean", "null"]},
    "enum": lambda dice, depth: {"enum": [_value(dice) for _ in range(dice.randrange(1, 4))]},
    "const": lambda dice, depth: {"const": _value(dice)},
    "pattern": lambda dice, depth: {"type": "string", "pattern": dice.choice(PATTERNS), "maxLength": 12},
    "format": lambda dice, depth: {"type": "string", "format": dice.choice(FORMATS)},
    "object": _object,
    "map": _map,
    "array": _array,
    "tuple": _tuple,
    "ref": _reference,
    "anyOf": lambda dice, depth: {"anyOf": [random_schema(dice, depth - 1) for _ in range(2)]},
    "allOf": lambda dice, depth: {"allOf": [_number("integer", dice), {"minimum": dice.randrange(-60, 60)}]},
}


_KEYWORDS = json.loads(Path(__file__).with_name("keywords.json").read_text())
SUPPORTED: dict[str, tuple[Schema, str, str]] = _KEYWORDS["supported"]
"""By keyword: a schema, an answer that fits it, and JSON that only this keyword keeps out."""
UNSUPPORTED: dict[str, Any] = _KEYWORDS["unsupported"]
"""By keyword: a value."""
