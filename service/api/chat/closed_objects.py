"""Closes the objects of a JSON schema that list their properties, so that an answer has no others.

JSON Schema allows further names by default. A model that may invent names may do so without end, and schemas that are
made from classes seldom say that there are none. Every answer that is left fits the schema as it was given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from service.api.chat.schema_form import MAX_DEPTH, NAMED, UNREAD

_SAYS_MORE = frozenset(
    ("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref")
)
"""Keywords with which a schema itself says what else an object may hold."""
_NEEDS_MORE = frozenset(("enum", "const", "minProperties", "dependentRequired"))
"""Keywords that may ask for names that are not listed."""
_JOINED = frozenset(
    (
        *("allOf", "oneOf", "not", "if", "then", "else", "dependencies", "dependentSchemas", "contains"),
        *("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"),
    )
)
"""Keywords by which an object may have to fit two schemas, or not to fit one: closed ones would contradict each other,
or allow what the open ones do not."""
_ALTERNATIVES = frozenset(("anyOf", "$ref"))


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with its objects closed; the outermost alone where others may have to fit several schemas at once."""
    if any(_JOINED & part.keys() or (_ALTERNATIVES & part.keys() and "properties" in part) for part in _parts(schema)):
        return _closed_here(schema)
    return _closed(schema, 0)


def _closed_here(schema: Mapping[str, Any]) -> dict[str, Any]:
    listed, required = schema.get("properties"), schema.get("required", [])
    if not listed or not isinstance(listed, dict) or not isinstance(required, list):
        return dict(schema)
    if (_SAYS_MORE | _NEEDS_MORE) & schema.keys():
        return dict(schema)
    if not all(isinstance(name, str) and name in listed for name in required):
        return dict(schema)
    return {**schema, "additionalProperties": False}


def _closed(schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
    return _closed_here({key: _inner(key, value, depth) for key, value in schema.items()})


def _inner(key: str | None, value: Any, depth: int) -> Any:
    """key: the keyword that the value belongs to; None for what has a name of its own."""
    if depth > MAX_DEPTH or key in UNREAD:  # What is too deep is refused later.
        return value
    if isinstance(value, dict) and key in NAMED:
        return {name: _inner(None, part, depth + 1) for name, part in value.items()}
    if isinstance(value, dict):
        return _closed(value, depth + 1)
    return [_inner(None, part, depth + 1) for part in value] if isinstance(value, list) else value


def _parts(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schema and those inside it."""
    stack: list[tuple[str | None, Any]] = [(None, schema)]
    while stack:
        key, value = stack.pop()
        if key in UNREAD:
            continue
        if isinstance(value, dict):
            if key not in NAMED:
                yield value
            stack += [(None if key in NAMED else name, inner) for name, inner in value.items()]
        elif isinstance(value, list):
            stack += [(None, inner) for inner in value]
