"""The parts of a JSON schema, and which of its objects are closed, so that an answer has only the properties that they
list.

JSON Schema allows further names by default. A model that may invent names may do so without end, and schemas that are
made from classes seldom say that there are none. Every answer that is left fits the schema as it was given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Path = tuple[str | int, ...]
"""From a schema to a part of it: keywords, names and indices."""

UNREAD = frozenset({"enum", "const", "default", "examples"})
"""Keywords of values, not of schemas."""
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords of objects whose keys are names, not keywords."""
LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
"""Keywords of lists of schemas."""
SINGLE = frozenset({"items", "additionalItems", "additionalProperties"})
"""Keywords of one schema; `items` may be a list in older drafts."""
_SAYS_MORE = frozenset(
    ("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref")
)
"""Keywords with which a schema itself says what else an object may hold."""
_NEEDS_MORE = frozenset(("enum", "const", "minProperties"))
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


def children(schema: Mapping[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The schemas directly inside one, definitions first."""
    for key, value in sorted(schema.items(), key=lambda item: item[0] not in ("$defs", "definitions")):
        if key in NAMED and isinstance(value, dict):
            yield from (((key, name), part) for name, part in value.items() if isinstance(part, dict))
        elif key in LISTS | SINGLE and isinstance(value, list):
            yield from (((key, index), part) for index, part in enumerate(value) if isinstance(part, dict))
        elif key in SINGLE and isinstance(value, dict):
            yield (key,), value


def close_objects(schema: dict[str, Any]) -> None:
    """Closes the objects of a schema that list their properties and say nothing of others. If an object may have to fit
    several parts of the schema at once, only the outermost one is closed."""
    _close(schema)
    waiting = [] if any(map(_joins, _parts(schema))) else [schema]
    while waiting:
        for _, part in children(waiting.pop()):
            _close(part)
            waiting.append(part)


def _close(schema: dict[str, Any]) -> None:
    listed = schema.get("properties")
    if listed and not (_SAYS_MORE | _NEEDS_MORE) & schema.keys() and listed.keys() >= set(schema.get("required", ())):
        schema["additionalProperties"] = False


def _joins(part: Mapping[str, Any]) -> bool:
    return bool(_JOINED & part.keys() or (_ALTERNATIVES & part.keys() and "properties" in part))


def _parts(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schema and those inside it, also below keywords that nobody knows, to which a reference may lead."""
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
