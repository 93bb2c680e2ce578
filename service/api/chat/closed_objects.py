"""Which objects of a JSON schema are closed, so that an answer has only the properties that they list.

JSON Schema allows further names by default. A model that may invent names may do so without end, and schemas that are
made from classes seldom say that there are none. Every answer that is left fits the schema as it was given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

UNREAD = frozenset({"enum", "const", "default", "examples"})
"""Keywords of values, not of schemas."""
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords of objects whose keys are names, not keywords."""
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


def may_be_joined(schema: Mapping[str, Any]) -> bool:
    """Whether an object may have to fit several parts of the schema at once. Then only the outermost may be closed."""
    return any(
        _JOINED & part.keys() or (_ALTERNATIVES & part.keys() and "properties" in part) for part in _parts(schema)
    )


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, closed if it lists its properties and says nothing of others; those inside it stay as they are."""
    listed, required = schema.get("properties"), schema.get("required", [])
    if not listed or not isinstance(listed, dict) or not isinstance(required, list):
        return schema
    if (_SAYS_MORE | _NEEDS_MORE) & schema.keys():
        return schema
    if not all(isinstance(name, str) and name in listed for name in required):
        return schema
    return {**schema, "additionalProperties": False}


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
