"""Schemas of tools without `strict`, less what no grammar here can say.

Many tools come from other programs, with schemas that the client cannot change. As in OpenAI's API, a keyword that is
not supported does not keep such a tool from being called. The prompt shows the schema as it was given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from service.api.chat.closed_objects import NAMED, UNREAD
from service.api.chat.schema_form import FREE_FORMATS, LIBRARY_FORMATS, PATTERNED_FORMATS

UNENFORCED = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames"),
        *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
    )
)
"""Keywords that are left out. Without one, a schema fits everything that it fitted before."""
_FORMATS = frozenset((*LIBRARY_FORMATS, *FREE_FORMATS, *PATTERNED_FORMATS))
_PATTERNS = frozenset({"pattern", "patternProperties"})


def looser_schemas(schema: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What a schema comes to without unsupported keywords, formats and references, and then without patterns, too."""
    for dropped in (UNENFORCED, UNENFORCED | _PATTERNS):
        yield _looser(schema, dropped)


def _looser(schema: Mapping[str, Any], dropped: frozenset[str]) -> dict[str, Any]:
    form = {key: _inner(key, value, dropped) for key, value in schema.items() if key not in dropped}
    if "oneOf" in form:
        alternatives = form.pop("oneOf")
        form.setdefault("anyOf", alternatives)
    if isinstance(name := form.get("format"), str) and name not in _FORMATS:
        del form["format"]
    if isinstance(reference := form.get("$ref"), str) and not reference.startswith("#"):
        del form["$ref"]
    if "patternProperties" in schema.keys() & dropped:
        form.pop("additionalProperties", None)  # it would forbid the names that fitted a pattern
    return form


def _inner(key: str | None, value: Any, dropped: frozenset[str]) -> Any:
    """key: the keyword that the value belongs to; None for an item of a list, and for what has a name of its own."""
    if key in UNREAD:
        return value
    if isinstance(value, dict) and key in NAMED:
        return {name: _inner(None, part, dropped) for name, part in value.items()}
    if isinstance(value, dict):
        return _looser(value, dropped)
    return [_inner(None, part, dropped) for part in value] if isinstance(value, list) else value
