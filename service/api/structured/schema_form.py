"""A JSON schema in the form that llguidance compiles exactly.

What generators write beside the standard is read as it is meant: null for absent, PHP's empty list for an empty object,
dialects of any spelling, bounds of a type's whole range. What no grammar can say is refused by its path, or left out of
a schema that is not strict.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cached_property
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from service.api.structured.closed_objects import LISTS, NAMED, SINGLE, Path, close_objects
from service.api.structured.string_formats import (
    FREE_FORMATS,
    LIBRARY_FORMATS,
    LONGEST,
    LOOK_AROUND,
    PATTERNED_FORMATS,
    known_pattern,
)
from service.link.sampling_limits import WHITESPACE

MAX_LITERAL = 4096
"""Characters of a string that an answer is matched with: a name, a value, a pattern."""
MAX_INTEGER = 2**63 - 1
"""Largest integer in `enum` and `const`."""
MAX_MULTIPLE = 1000
"""Largest multipleOf, in units of its last digit: a matcher has that many states."""

EDGE = 2**63 - 1024
"""Largest double that is an int64: the library reads bounds as doubles and writes them as integers."""
_EXACT = 2**53
"""From this number on, doubles are farther apart than integers."""
_FLOAT_MAX = 3.4e38
"""Bounds beyond it are the range of a float or a double, and exclude nothing."""
_SMALLEST = 1e-20
"""The library writes bounds without an exponent. Smaller ones are moved inwards, to this number or to 0."""
_COUNT_MAX = 2**31 - 1
"""No answer has as many characters, items or properties."""
SHOWN = 60
"""Characters of a name in a path."""

LOWER, UPPER = frozenset({"minimum", "exclusiveMinimum"}), frozenset({"maximum", "exclusiveMaximum"})
LEAST = LOWER | {"minLength", "minItems", "minProperties"}
MOST = UPPER | {"maxLength", "maxItems", "maxProperties"}
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


class Unfit(Exception):
    """Why a grammar is not accepted."""


class Fault(Exception):
    """Why the value of a keyword cannot be used."""


def shown(path: Path) -> str:
    """A path in words: properties.a.anyOf[0]."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step[:SHOWN]}" for step in path)
    return "".join(steps).removeprefix(".")


def types(value: Any) -> dict[str, Any]:
    """Types in lower case, as Gemini's are not; "any" is draft 3's."""
    named = value if isinstance(value, list) else [value]
    kinds = [str(kind).lower() for kind in named]
    if "any" in kinds or not kinds:
        return {}
    if unknown := set(kinds) - _TYPES:
        raise Fault(f"{min(unknown)[:SHOWN]} is none of {', '.join(sorted(_TYPES))}")
    return {"type": kinds if isinstance(value, list) else kinds[0]}


def pattern(value: Any, path: Path) -> dict[str, Any]:
    if not isinstance(value, str):
        raise Fault("a string expected")
    check_values(value, path)
    try:
        pattern, least, most = known_pattern(value)
    except ValueError as error:
        raise Fault(str(error)) from None
    return {"pattern": pattern} | ({} if most is None else {"minLength": least, "maxLength": most})


def count(key: str, value: Any) -> dict[str, Any]:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise Fault("a whole number from 0 on expected")
    if value < _COUNT_MAX:
        return {key: int(value)}
    if key in LEAST:
        raise Fault(f"at most {_COUNT_MAX} allowed")
    return {}


def multiple(value: Any) -> dict[str, Any]:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise Fault("a number above 0 expected")
    if _units(value) > MAX_MULTIPLE or value < 1e-9:
        raise Fault(f"at most {MAX_MULTIPLE} units of its last digit, and at least 1e-9, allowed")
    return {"multipleOf": value}


def _units(value: float) -> float:
    """The number without its decimal point and the zeros after its last digit: 0.25 -> 25."""
    if value > MAX_INTEGER:  # it may be too large for a float
        return value
    mantissa, _, exponent = f"{value:.15e}".partition("e")
    digits = mantissa.replace(".", "").rstrip("0")
    return int(digits) * 10 ** max(0, int(exponent) - len(digits) + 1)


def bound(key: str, value: Any, schema: Mapping[str, Any]) -> dict[str, Any]:
    """A bound as the library reads it exactly: the next double inside, where doubles are rare."""
    inclusive = "minimum" if key in LOWER else "maximum"
    if isinstance(value, bool) and key != inclusive:  # draft 4
        value = schema.get(inclusive) if value else None
        if value is None:
            return {}
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Fault("a number expected")
    sign, exclusive = 1 if key in LOWER else -1, key != inclusive
    low = sign * value  # An upper bound is a lower one of the negative number.
    if low <= -_FLOAT_MAX:
        return {}
    if low < -EDGE:
        low, exclusive = -EDGE, False
    elif 0 < abs(low) < _SMALLEST:
        low, exclusive = _SMALLEST if low > 0 else 0, False
    elif _EXACT <= abs(low) <= MAX_INTEGER:
        double = float(low)
        low, exclusive = math.nextafter(double, math.inf) if double < int(low) + exclusive else double, False
    if low > EDGE:
        raise Fault(f"a number from -{EDGE} to {EDGE} expected")
    bound = int(low) if low == int(low) else low
    return {key if exclusive else inclusive: sign * bound}


def check_values(value: Any, path: Path) -> None:
    """Unfit for a value that is too long, or that the library would round."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str) and len(one) > MAX_LITERAL:
            raise Unfit(f"{shown(path)}: a string of {len(one)} characters given, at most {MAX_LITERAL} allowed")
        if isinstance(one, int) and abs(one) > MAX_INTEGER:
            raise Unfit(
                f"{shown(path)}: an integer of {len(str(abs(one)))} digits given, at most {MAX_INTEGER} allowed"
            )
        if isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, list):
            waiting += one


MAX_DEPTH = 64
"""Depth of nested containers in a JSON schema."""
_ALONE = 10**17
"""From here on, the library needs a bound on the other side, too."""
_MOST_REFERENCES = 8

_NOTES = frozenset({"title", "description", "$comment", "default", "examples", "deprecated", "readOnly", "writeOnly"})
UNSUPPORTED = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames"),
        *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
    )
)
"""Keywords that no grammar here can say. Without one, a schema fits everything that it fitted before."""
_DRAFT = re.compile(r"draft[-/]?0?([467])(?!\d)")


def schema_form(schema: Mapping[str, Any], *, loose: bool = False) -> tuple[dict[str, Any], list[str]]:
    """(form, paths of what it does not enforce: `uniqueItems` and unknown formats, and if `loose`, whatever no grammar
    can say). Unfit names the path of anything else, and what is over a limit."""
    former = _Former(schema, loose)
    form = former.of(schema)
    close_objects(form)
    return form, former.unenforced


def as_grammar(form: Mapping[str, Any], whitespace: str = WHITESPACE) -> dict[str, Any]:
    """The form with its options. whitespace: pattern of what may stand between JSON's tokens."""
    return {**form, "x-guidance": {"whitespace_pattern": whitespace, "lenient": False, "coerce_one_of": False}}


def target(schema: Any, reference: str) -> Any:
    """The part of the schema that a JSON pointer names; None if there is none."""
    found = schema
    for step in unquote(reference).removeprefix("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            found = found.get(step) if isinstance(found, dict) else None
    return found


def without(form: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """A copy of the form that does not enforce the keyword, or the part, at `path`; oneOf becomes anyOf."""
    copied, step, rest = dict(form), str(path[0]), path[1:]
    if not rest:
        dropped = copied.pop(step)
        if step == "oneOf":
            copied.setdefault("anyOf", dropped)
        elif step == "patternProperties":
            copied["additionalProperties"] = True  # otherwise it would forbid the names that fitted a pattern
    elif step in NAMED or isinstance(rest[0], int):
        group: Any = copied[step].copy()
        group[rest[0]] = without(group[rest[0]], rest[1:]) if rest[1:] else {}
        copied[step] = group
    else:
        copied[step] = without(copied[step], rest)
    return copied


class _Former:
    """Makes the form of one schema."""

    def __init__(self, root: Mapping[str, Any], loose: bool) -> None:
        self.root, self.loose = root, loose
        self.unenforced: list[str] = []

    def of(self, schema: Mapping[str, Any], path: Path = ()) -> dict[str, Any]:
        if len(path) > MAX_DEPTH:
            raise Unfit(f"nested too deeply: at most {MAX_DEPTH} levels allowed")
        schema = self._with_listed_names(schema)
        form: dict[str, Any] = {}
        for key, value in schema.items():
            # Go, C# and protobuf write null for absent.
            if key in _NOTES or (value is None and key != "const"):
                continue
            try:
                for name, made in self._entries(key, value, schema, (*path, key)).items():
                    _add(form, name, made)
            except Fault as fault:
                self._leave_out((*path, key), str(fault))
                if key == "patternProperties":
                    form["additionalProperties"] = True
        for sign, bounds, others in ((1, LOWER, UPPER), (-1, UPPER, LOWER)):
            if not others & form.keys() and any(sign * form[key] > _ALONE for key in bounds & form.keys()):
                form["maximum" if sign > 0 else "minimum"] = sign * EDGE
        return form

    def _leave_out(self, path: Path, reason: str) -> None:
        if not self.loose:
            raise Unfit(f"{shown(path)}: {reason}")
        self.unenforced.append(shown(path))

    def _part(self, value: Any, path: Path) -> dict[str, Any] | bool:
        """The form of a schema inside another one."""
        if value is None or value == []:  # PHP's empty object
            return {}
        if isinstance(value, bool):
            return value
        if not isinstance(value, dict):
            self._leave_out(path, "a schema expected")
            return {}
        return False if "not" in value and value["not"] in ({}, True) else self.of(value, path)

    def _entries(self, key: str, value: Any, schema: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """What a keyword becomes: often itself, sometimes nothing."""
        if key in LISTS or (key == "items" and isinstance(value, list) and value):
            return self._parts(key, value, path)
        if key in SINGLE:
            return {key: self._part(value, path)}
        if key in NAMED:
            return self._named(key, value, path)
        if key in LOWER | UPPER:
            return bound(key, value, schema)
        if key in LEAST | MOST:
            return count(key, value)
        if key in UNSUPPORTED:
            if key == "propertyNames" and self._part(value, path) in ({}, True, {"type": "string"}):
                return {}
            raise Fault("no grammar can enforce it")
        match key:
            case "type":
                return types(value)
            case "enum" | "const":
                if key == "enum" and not isinstance(value, list):
                    raise Fault("a list of values expected")
                check_values(value, path)
                return {key: value} if key == "const" or value else {}
            case "required":
                if isinstance(value, bool) or value in ([], {}):  # a boolean of draft 3: see _named
                    return {}
                if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                    raise Fault("a list of names expected")
                return {key: value}
            case "pattern":
                return pattern(value, path)
            case "format":
                return self._format(value, schema, path)
            case "multipleOf":
                return multiple(value)
            case "uniqueItems":
                if value is True and schema.get("maxItems") not in (0, 1):
                    self.unenforced.append(shown(path))
                return {}
            case "$ref":
                return self._reference(value)
            case "$schema" | "$id" | "id":
                return self._identity(key, str(value), path)
        return {key: value}

    def _parts(self, key: str, value: Any, path: Path) -> dict[str, Any]:
        if not isinstance(value, list):
            raise Fault("a list of schemas expected")
        numbers = key == "anyOf" and any(_kinds(part) & {"integer", "number"} for part in value)
        parts = [
            False if numbers and _is_decimal(part) else self._part(part, (*path, index))
            for index, part in enumerate(value)
        ]
        if key == "oneOf" and (excluding := self._excluding(parts)):
            return {"anyOf": excluding}
        return {key: parts} if parts else {}

    def _named(self, key: str, value: Any, path: Path) -> dict[str, Any]:
        if value == []:
            return {}
        if not isinstance(value, dict):
            raise Fault("an object of schemas expected")
        named = {}
        for name, part in value.items():
            check_values(name, path)
            known = pattern(name, path) if key == "patternProperties" else {"pattern": name}
            if len(known) > 1:
                raise Fault(LOOK_AROUND)
            named[known["pattern"]] = self._part(part, (*path, name))
        if key != "properties":
            return {key: named}
        # Draft 3, as Jackson writes it: a property says itself that it is required.
        required = [name for name, part in value.items() if isinstance(part, dict) and part.get("required") is True]
        return {key: named, "required": required} if required else {key: named}

    def _with_listed_names(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Maps with an enum as their names, as pydantic and Zod have them, list them as properties."""
        names = self._followed(schema.get("propertyNames")).get("enum")
        if not isinstance(names, list) or schema.keys() & {"properties", "patternProperties"}:
            return schema
        value = schema.get("additionalProperties", {})
        listed = {"properties": {name: value for name in names if isinstance(name, str)}, "additionalProperties": False}
        return {key: part for key, part in schema.items() if key != "propertyNames"} | listed

    def _followed(self, part: Any) -> dict[str, Any]:
        """The schema that a reference leads to; an empty one if that is not certain."""
        for _ in range(_MOST_REFERENCES):
            if not isinstance(part, dict) or not isinstance(part.get("$ref"), str):
                break
            part = target(self.root, part["$ref"]) if part["$ref"].startswith("#/") and not self._has_names else None
        return part if isinstance(part, dict) and "$ref" not in part else {}

    def _excluding(self, parts: list[Any]) -> list[Any] | None:
        """The alternatives of oneOf, if no value fits two: by their types, or by the values of a property, then
        required (a discriminator may have a default). None if that cannot be seen."""
        followed = [self._followed(part) for part in parts]
        kinds = [_kinds(part) for part in followed]
        clashing = {
            index
            for pair in combinations(range(len(parts)), 2)
            if not (kinds[pair[0]] and kinds[pair[1]] and kinds[pair[0]].isdisjoint(kinds[pair[1]]))
            for index in pair
        }
        if not clashing:
            return parts
        if any(kinds[index] != {"object"} for index in clashing):
            return None
        tags = [self._tags(followed[index]) for index in clashing]
        for name in tags[0]:
            values = [value for one in tags for value in one.get(name, ())]
            if all(name in one for one in tags) and len(set(values)) == len(values):
                for index in clashing:
                    _add(parts[index], "required", [name])
                return parts
        return None

    def _tags(self, part: Mapping[str, Any]) -> dict[str, list[str]]:
        """The strings that properties may be, for those that list them."""
        properties, tags = part.get("properties"), {}
        for name, given in properties.items() if isinstance(properties, dict) else ():
            given = self._followed(given)
            values = given.get("enum", [given["const"]] if "const" in given else None)
            if isinstance(values, list) and all(isinstance(value, str) for value in values):
                tags[name] = values
        return tags

    def _format(self, value: Any, schema: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """JSON Schema takes a format that is not known for an annotation."""
        if not isinstance(value, str):
            raise Fault("a string expected")
        if value in FREE_FORMATS or (_kinds(schema) and "string" not in _kinds(schema)):
            return {}
        if value in PATTERNED_FORMATS:
            return pattern(PATTERNED_FORMATS[value], path)
        if value in LIBRARY_FORMATS:
            return {"format": value} | ({"maxLength": LONGEST[value]} if value in LONGEST else {})
        self.unenforced.append(shown(path))
        return {}

    def _reference(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, str):
            raise Fault("a string expected")
        if not value.startswith("#") and "'$id'" not in self._text and "'id'" not in self._text:
            raise Fault("only references inside the schema are supported")
        if value.startswith("#/") and not self._has_names and target(self.root, value) is None:
            raise Fault("it names no part of the schema")
        return {"$ref": value}

    def _identity(self, key: str, value: str, path: Path) -> dict[str, Any]:
        """Names matter where references use them, and dialects as far as the library tells them apart."""
        if key == "$schema":
            draft = _DRAFT.search(value)
            return {key: f"http://json-schema.org/draft-0{draft[1]}/schema#"} if draft and len(path) == 1 else {}
        local = self._text.count("'$ref': '#") == self._text.count("'$ref': ") and not self._has_names
        return {} if local or (key == "id" and not self._is_draft_4) else {key: value}

    @cached_property
    def _text(self) -> str:
        return str(self.root)

    @cached_property
    def _is_draft_4(self) -> bool:
        draft = _DRAFT.search(str(self.root.get("$schema")))
        return draft is not None and draft[1] == "4"

    @cached_property
    def _has_names(self) -> bool:
        """Whether a part of the schema may have a name of its own, in which "#" stands for that part."""
        inner = self._text.count("'$id'") > ("$id" in self.root)
        return inner or "'$anchor'" in self._text or (self._is_draft_4 and "'id': '" in self._text)


def _add(form: dict[str, Any], name: str, made: Any) -> None:
    """Adds a keyword that the form may have already: then both are in force."""
    if name not in form:
        form[name] = made
    elif name in LEAST:
        form[name] = max(form[name], made)
    elif name in MOST:
        form[name] = min(form[name], made)
    elif name == "required":
        form[name] = [*dict.fromkeys([*form[name], *made])]
    elif name == "allOf":
        form[name] = [*made, *form[name]]  # references name those that the schema has
    elif name in ("pattern", "anyOf"):
        form["allOf"] = [*form.get("allOf", ()), {name: made}]


def _kinds(schema: Any) -> set[str]:
    """The types that a schema names; empty if it names none. An integer is a number."""
    given = schema.get("type") if isinstance(schema, dict) else None
    kinds = {str(kind).lower() for kind in (given if isinstance(given, list) else [given] if given else [])}
    return kinds | ({"integer"} if "number" in kinds else set())


def _is_decimal(schema: Any) -> bool:
    """Whether a schema is pydantic's of a Decimal that is written as a string."""
    return isinstance(schema, dict) and str(schema.get("pattern")).startswith("^(?!^[-+.]*$)")
