"""A JSON schema in the form that llguidance compiles: what the library would read inexactly or refuse, although it can
be said with what the library knows, is said that way, and objects are closed (closed_objects.py). Everything else stays
as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeGuard

from service.api.chat.closed_objects import NAMED, UNREAD, closed, may_be_joined
from service.api.chat.patterns.automaton import MAX_STEPS
from service.api.chat.patterns.look_ahead import LONGEST, Separated, separated, united
from service.api.chat.unique_items import MAX_ORDERS, UNSUITABLE, unique_array
from service.link.grammar_limits import MAX_GRAMMAR_BYTES, WHITESPACE

MAX_DEPTH = 64
"""Depth of nested containers in a JSON schema."""
MAX_LITERAL = LONGEST
"""Characters of a string that an answer is matched with: a name, a value, a pattern."""
MAX_INTEGER = 2**63 - 1
"""Largest integer that an answer is matched with, and largest bound of an integer."""
MAX_PATTERN_STEPS = 2 * MAX_STEPS
"""Steps for all patterns with look-ahead of a schema: a tenth of a second."""
MAX_ALL_ORDERS = 4 * MAX_ORDERS
"""Orders of the values of all arrays of a schema that have uniqueItems."""

_EXACT = 2**53
"""From this number on, doubles are farther apart than integers."""
LOWER, UPPER = frozenset({"minimum", "exclusiveMinimum"}), frozenset({"maximum", "exclusiveMaximum"})
LIBRARY_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
"""What llguidance has patterns for."""
FREE_FORMATS = frozenset({"binary", "directory-path", "file-path", "password", "path"})
"""What pydantic and OpenAPI say of strings that may be any. The library does not know them."""
_H16 = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [f"(?:{_H16}:){{7}}{_H16}", f"(?:{_H16}:){{1,7}}:", f":(?::{_H16}){{1,7}}", "::"]
    + [f"(?:{_H16}:){{1,{before}}}(?::{_H16}){{1,{7 - before}}}" for before in range(1, 7)]
)
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
PATTERNED_FORMATS = {
    "base64": "^(?:[0-9a-zA-Z+/]{4})*(?:[0-9a-zA-Z+/]{2}==|[0-9a-zA-Z+/]{3}=)?$",
    "base64url": "^(?:[0-9a-zA-Z_-]{4})*(?:[0-9a-zA-Z_-]{2,3})?$",
    "cidrv4": rf"^(?:{_BYTE}\.){{3}}{_BYTE}/(?:[12]?[0-9]|3[0-2])$",
    "cidrv6": f"^(?:{_IPV6})/(?:12[0-8]|1[01][0-9]|[1-9]?[0-9])$",
    "cuid": "^[cC][0-9a-z]{6,}$",
    "cuid2": "^[0-9a-z]+$",
    "e164": r"^\+[1-9][0-9]{6,14}$",
    "emoji": r"^[\p{Extended_Pictographic}\p{Emoji_Component}]+$",
    "ksuid": "^[0-9A-Za-z]{27}$",
    "lowercase": "^[^A-Z]*$",
    "nanoid": "^[0-9A-Za-z_-]{21}$",
    "ulid": "^[0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{26}$",
    "uppercase": "^[^a-z]*$",
    "xid": "^[0-9a-vA-V]{20}$",
}
"""Formats that Zod has beside those of JSON Schema, as it checks them. base64url: Zod's own pattern allows lengths that
its check does not."""
ANY_NAME = {"type": "string"}
"""propertyNames of Zod's records: every name is a string."""
_SHOWN = 60
"""Characters of a pattern in a message."""


class Unfit(Exception):
    """Why a grammar is not accepted."""


def with_options(schema: dict[str, Any]) -> dict[str, Any]:
    """The form of a schema inside a grammar, also after %json: with the rules for white space and unknown keywords.
    Unfit for what can be said in no such form."""
    return {
        **_Form(schema).of(schema),
        "x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False},
    }


def target(schema: Any, reference: str) -> Any:
    """The part of the schema that a reference names; the whole schema if it cannot be found that simply."""
    found = schema
    for step in reference.removeprefix("#").split("/")[1:]:
        if not isinstance(found, dict):
            return schema
        found = found.get(step.replace("~1", "/").replace("~0", "~"), schema)
    return found


class _Form:
    """Makes the form of one schema within the schema's budgets."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self.steps = MAX_PATTERN_STEPS
        self.orders = MAX_ALL_ORDERS
        self.characters = 0
        self.seen: dict[tuple[bool, str], Separated] = {}
        self.targets: dict[str, Any] = {}
        self.inner_closed = not may_be_joined(root)

    def of(self, schema: dict[str, Any], depth: int = 0) -> dict[str, Any]:
        """depth: of containers around it. What is too deep is left alone, and refused later."""
        form = {key: self._inner(key, value, depth) for key, value in schema.items()}
        if form.get("propertyNames") == ANY_NAME:
            del form["propertyNames"]
        _make_strings_known(form, lambda pattern: self._looked_up(separated, pattern).patterns)
        _make_bounds_exact(form)
        if self.inner_closed or depth == 0:
            form = closed(form)
        return self._unique(form) if "uniqueItems" in form else form

    def _inner(self, key: str | None, value: Any, depth: int) -> Any:
        """key: the keyword that the value belongs to; None for an item of a list, and for what has a name of its
        own."""
        if depth > MAX_DEPTH or key in UNREAD:
            return value
        if isinstance(value, dict) and key in NAMED:
            inner = {name: self._inner(None, part, depth + 1) for name, part in value.items()}
            return self._names(inner) if key == "patternProperties" else inner
        if isinstance(value, dict):
            return self.of(value, depth + 1)
        return [self._inner(None, part, depth + 1) for part in value] if isinstance(value, list) else value

    def _names(self, properties: dict[str, Any]) -> dict[str, Any]:
        """patternProperties, of which each name is one pattern."""
        form = {self._looked_up(united, name).patterns[0]: value for name, value in properties.items()}
        if len(form) < len(properties):
            raise Unfit("patternProperties: two patterns that mean the same")
        return form

    def _looked_up(self, make: Callable[[str], Separated], pattern: str) -> Separated:
        key = (make is united, pattern)
        self.characters += len(pattern)
        if len(pattern) > MAX_LITERAL or self.characters > MAX_GRAMMAR_BYTES:
            return Separated((pattern,), "", 0)  # The grammar will be refused as too large.
        if key not in self.seen:
            if self.steps < 0:
                raise Unfit("too complex: its patterns with look-ahead take more steps than allowed")
            self.seen[key] = make(pattern)
            self.steps -= self.seen[key].steps
        if problem := self.seen[key].problem:
            shown = pattern if len(pattern) <= _SHOWN else f"{pattern[:_SHOWN]}..."
            raise Unfit(f"pattern {shown}: {problem}")
        return self.seen[key]

    def _resolved(self, reference: str) -> Any:
        """None where a part with a name of its own may be what "#" stands for."""
        if not reference.startswith("#/") or self._has_named_parts:
            return None
        if reference not in self.targets:  # hundreds of arrays may have the same long one
            self.targets[reference] = target(self.root, reference)
        return self.targets[reference]

    @cached_property
    def _has_named_parts(self) -> bool:
        draft_4 = "draft-04" in str(self.root.get("$schema"))  # in which any "id" may be such a name
        return draft_4 or str(self.root).count("'$id'") > ("$id" in self.root)

    def _unique(self, schema: dict[str, Any]) -> dict[str, Any]:
        form = unique_array(schema, self._resolved)
        if form is None:
            raise Unfit(UNSUITABLE)
        self.orders -= len(form.get("anyOf", ())) if "anyOf" not in schema else 0
        if self.orders < 0:
            raise Unfit(f"uniqueItems: at most {MAX_ALL_ORDERS} possible orders of all such arrays together allowed")
        return form


def _make_strings_known(schema: dict[str, Any], separate: Callable[[str], tuple[str, ...]]) -> None:
    """Says patterns and formats with patterns that the library can compile. Several must all match."""
    name, given = schema.get("format"), schema.get("pattern")
    if isinstance(name, str) and name in FREE_FORMATS:
        del schema["format"]
    if not isinstance(given, str | None):
        return
    patterns = list(separate(given)) if given is not None else []
    if isinstance(name, str) and name in PATTERNED_FORMATS:
        del schema["format"]
        patterns.append(PATTERNED_FORMATS[name])
    if not patterns:
        return
    schema["pattern"], *more = dict.fromkeys(patterns)
    others = schema.get("allOf", [])
    if more and not isinstance(others, list):
        raise Unfit("allOf: a list of schemas expected")
    if more:
        schema["allOf"] = [*others, *({"pattern": pattern} for pattern in more)]


def _make_bounds_exact(schema: dict[str, Any]) -> None:
    """Adjusts bounds. The library reads them as floats, and subtracts 1 from exclusive ones. If floats are farther
    apart than that, a bound becomes the next float inside."""
    for key in (LOWER | UPPER) & schema.keys():
        if isinstance(bound := schema[key], float) and bound.is_integer():
            schema[key] = int(bound)  # The digits of a float with .0 are not read exactly either.
    for key, stricter, inside in (("minimum", max, math.inf), ("maximum", min, -math.inf)):
        exclusive = "exclusive" + key.capitalize()
        if is_rounded(given := schema.get(key)):
            schema[key] = _double(given, inside)
        if is_rounded(given := schema.get(exclusive)):
            del schema[exclusive]
            bound = int(math.nextafter(_double(given, inside), inside))
            given = schema.get(key, bound)
            schema[key] = stricter(bound, given) if isinstance(given, int | float) else given


def is_rounded(bound: Any) -> TypeGuard[float]:
    """Whether the library may read a bound as another number."""
    return type(bound) in (int, float) and _EXACT <= abs(bound) <= MAX_INTEGER


def _double(bound: float, inside: float) -> float:
    """The bound, or the next double in the direction of `inside`."""
    nearest = float(bound)
    outside = nearest < bound if inside > 0 else nearest > bound
    nearest = math.nextafter(nearest, inside) if outside else nearest
    return int(nearest) if isinstance(bound, int) else nearest
