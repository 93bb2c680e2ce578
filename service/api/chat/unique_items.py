"""uniqueItems of JSON Schema, which llguidance does not know. An array of few possible values becomes the list of all
orders in which they can stand; the first items of an order are an array, too."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from math import perm
from typing import Any

MAX_ORDERS = 120
"""Orders of the values of one array: five values, or two of eleven."""
UNSUITABLE = (
    "uniqueItems: supported in an array of a few values, which enum, const or type list in its items: strings, "
    f"integers, booleans, null, with at most {MAX_ORDERS} orders (of 5 values, or of fewer items by maxItems)"
)
"""Why an array is refused."""

Resolve = Callable[[str], Any]
"""The part of the schema that a $ref names; None if that is not certain."""

_SIDE = frozenset({"title", "description", "$comment", "default", "examples", "deprecated", "readOnly"})
_REPLACED = frozenset({"type", "items", "minItems", "maxItems"})
_KINDS: dict[str, type] = {"string": str, "boolean": bool, "null": type(None), "integer": int, "number": int}
_ALL: dict[str, list[Any]] = {"boolean": [True, False], "null": [None]}
_MOST_REFERENCES = 8


def unique_array(schema: dict[str, Any], resolve: Resolve) -> dict[str, Any] | None:
    """The schema without uniqueItems and with the same answers; None if it has too many."""
    most = schema.get("maxItems")
    form = {key: value for key, value in schema.items() if key != "uniqueItems"}
    if schema["uniqueItems"] is False or (type(most) is int and most <= 1):
        return form
    values = _values(schema.get("items"), resolve)
    if values is None or schema["uniqueItems"] is not True or schema.get("type") != "array":
        return None
    if schema.keys() & {"anyOf", "prefixItems", "additionalItems"} or not (most is None or type(most) is int):
        return None
    length = len(values) if most is None else min(most, len(values))
    if perm(len(values), length) > MAX_ORDERS:
        return None
    # Lists as items are read alike in every draft. Beside `items` of the array itself, the library would check each
    # value of each order against them: ten times the cost.
    bounds = {"type": "array", "additionalItems": False}
    if "minItems" in schema:
        bounds["minItems"] = schema["minItems"]
    orders = [{**bounds, "items": [{"const": value} for value in order]} for order in permutations(values, length)]
    return {**{key: value for key, value in form.items() if key not in _REPLACED}, "anyOf": orders}


def _values(items: Any, resolve: Resolve) -> list[Any] | None:
    """All values of an item, each once; None if they are not listed, or if one may be written in several ways."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(items, dict) or items.keys() - {"enum", "const", "type", "$ref"} - _SIDE:
            return None
        if "$ref" not in items:
            break
        if items.keys() & {"enum", "const", "type"} or not isinstance(items["$ref"], str):
            return None
        items = resolve(items["$ref"])
    else:
        return None
    types = items.get("type", list(_KINDS))
    types = types if isinstance(types, list) else [types]
    listed = items.get("enum", [items["const"]] if "const" in items else None)
    if not all(isinstance(name, str) for name in types) or {"enum", "const"} <= items.keys():
        return None
    if listed is None and "type" in items and all(name in _ALL for name in types):
        listed = [value for name in types for value in _ALL[name]]
    if not isinstance(listed, list) or len(listed) > MAX_ORDERS:  # too many, or repeated
        return None
    if not all(type(value) in _KINDS.values() for value in listed):
        return None
    allowed = {_KINDS[name] for name in types if name in _KINDS}
    # True equals 1 in Python, but not in JSON.
    return list({(type(value), value): value for value in listed if type(value) in allowed}.values())
