"""A JSON schema in the form that llguidance compiles exactly.

What generators write beside the standard is read as it is meant: null for absent, PHP's empty list for an empty object,
dialects of any spelling, bounds of a type's whole range. What no grammar can say is refused by its path, or left out of
a schema that is not strict. Objects that list their properties are closed: a model that may invent names may do so
without end, and schemas made from classes seldom say that there are no others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

WHITESPACE = r"(?: |\n {0,16})?"
"""White space between JSON's tokens: a blank, or an indented new line. A model that could choose blanks for ever might
not end."""
MAX_DEPTH = 64
"""Depth of schemas within each other."""
MAX_LITERAL = 4096
"""Characters of a string that an answer is matched with: a name, a value, a pattern."""
MAX_INTEGER = 2**63 - 1
"""Largest integer in `enum` and `const`."""
MAX_MULTIPLE = 1000
"""Largest multipleOf, in units of its last digit: a matcher has that many states."""
EDGE = 2**63 - 1024
"""Largest double that is an int64: the library reads bounds as doubles and writes them as integers."""
_SMALLEST = 1e-20
"""The library writes bounds without an exponent."""
_COUNT_MAX = 2**31 - 1
"""No answer has as many characters, items or properties."""
SHOWN = 60
"""Characters of a name in a path."""
_MOST_REFERENCES = 8

Path = tuple[str | int, ...]
"""From a schema to a part of it: keywords, names and indices."""

NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords of objects whose keys are names, not keywords."""
LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
"""Keywords of lists of schemas."""
SINGLE = frozenset({"items", "additionalItems", "additionalProperties"})
"""Keywords of one schema; `items` may be a list in older drafts."""
LOWER, UPPER = frozenset({"minimum", "exclusiveMinimum"}), frozenset({"maximum", "exclusiveMaximum"})
LEAST = LOWER | {"minLength", "minItems", "minProperties"}
MOST = UPPER | {"maxLength", "maxItems", "maxProperties"}
UNSUPPORTED = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames"),
        *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
    )
)
"""Keywords that no grammar here can say. Without one, a schema fits everything that it fitted before."""
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_DRAFT = re.compile(r"draft[-/]?0?([467])(?!\d)")

LIBRARY_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
"""What llguidance has patterns for."""
LONGEST = {"date-time": 35, "time": 24, "duration": 32, "email": 254, "hostname": 253, "uri": 2048}
"""Characters of the longest answer, where the pattern has no end: fractions of a second could go on for ever."""
FREE_FORMATS = frozenset({"binary", "directory-path", "file-path", "password", "path"})
"""What pydantic and OpenAPI say of strings that may be any."""
_UUID = "^[0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-{}[0-9a-fA-F]{{3}}-[89abAB][0-9a-fA-F]{{3}}-[0-9a-fA-F]{{12}}$"
PATTERNED_FORMATS = {
    "base64": "^(?:[0-9a-zA-Z+/]{4})*(?:[0-9a-zA-Z+/]{2}==|[0-9a-zA-Z+/]{3}=)?$",
    "guid": _UUID.format("[0-9a-fA-F]").replace("[89abAB]", "[0-9a-fA-F]"),
    **{f"uuid{version}": _UUID.format(version) for version in range(1, 9)},
}
"""Formats of pydantic (base64, uuid1 to uuid8) and .NET (guid). Zod writes a pattern beside each of its own."""
_WITHOUT_LOOK_AHEAD = {
    # Zod's email, pydantic's Decimal.
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^(?:[A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{2,}$"
    ),
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d{1,20}\.?\d{0,20}|\.\d{1,20})$",
}
"""Patterns with look-ahead that generators are known to write -> the same, or less, without it."""
_SIGN = re.compile(r"\\.?|\[\^?(?:\\.|[^\]\\])*\]?|\(\?<?[=!]", re.DOTALL)
_NEGATED = re.compile(r"(\\.)|\[\^(?!\\x00)", re.DOTALL)

_SAYS_MORE = frozenset(
    ("additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref", "enum", "const", "minProperties")
)
"""Keywords with which a schema itself says what else an object may hold, or may ask for names that are not listed."""
_JOINED = frozenset({"allOf", "oneOf"})
_ALTERNATIVES = frozenset({"anyOf", "$ref"})
"""Keywords by which an object may have to fit two schemas, these beside `properties`: closed ones would contradict each
other."""


class Unfit(Exception):
    """Why a grammar is not accepted."""


class Fault(Exception):
    """Why the value of a keyword cannot be used."""


def schema_form(schema: Mapping[str, Any], *, loose: bool = False) -> dict[str, Any]:
    """Return the form. It does not enforce `uniqueItems` and unknown formats, nor, if `loose`, what no grammar can say.
    Unfit names the path of anything else, and what is over a limit."""
    former = _Former(schema, loose)
    form = former.of(schema)
    for reference, name in former.tags:
        _require(target(form, reference), name)
    close_objects(form)
    return form


def as_grammar(form: Mapping[str, Any], whitespace: str = WHITESPACE) -> dict[str, Any]:
    """The form with its options. whitespace: pattern of what may stand between JSON's tokens."""
    return {**form, "x-guidance": {"whitespace_pattern": whitespace, "lenient": False, "coerce_one_of": False}}


def shown(path: Path) -> str:
    """A path in words: properties.a.anyOf[0]."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step[:SHOWN]}" for step in path)
    return "".join(steps).removeprefix(".")


def children(schema: Mapping[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The schemas directly inside one, definitions first."""
    for key, value in sorted(schema.items(), key=lambda item: item[0] not in ("$defs", "definitions")):
        if key in NAMED and isinstance(value, dict):
            yield from (((key, name), part) for name, part in value.items() if isinstance(part, dict))
        elif key in LISTS | SINGLE and isinstance(value, list):
            yield from (((key, index), part) for index, part in enumerate(value) if isinstance(part, dict))
        elif key in SINGLE and isinstance(value, dict):
            yield (key,), value


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


def close_objects(form: dict[str, Any]) -> None:
    """Close the objects of a form that list their properties and say nothing of others. If an object may have to fit
    several parts at once, close only the outermost one."""
    parts = list(_parts(form))
    joined = any(_JOINED & part.keys() or (_ALTERNATIVES & part.keys() and "properties" in part) for part in parts)
    for part in [form] if joined else parts:
        listed = part.get("properties")
        if listed and not _SAYS_MORE & part.keys() and listed.keys() >= set(part.get("required", ())):
            part["additionalProperties"] = False


def _parts(form: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield form
    for _, part in children(form):
        yield from _parts(part)


class _Former:
    """Makes the form of one schema."""

    def __init__(self, root: Mapping[str, Any], loose: bool) -> None:
        self.root, self.loose = root, loose
        self.tags: list[tuple[str, str]] = []
        """References to alternatives, and the property that tells each from the others."""

    def of(self, schema: Mapping[str, Any], path: Path = ()) -> dict[str, Any]:
        if len(path) > MAX_DEPTH:
            raise Unfit(f"nested too deeply: at most {MAX_DEPTH} levels allowed")
        form: dict[str, Any] = {}
        for key, value in self._with_listed_names(schema).items():
            if value is None and key != "const":  # Go, C# and protobuf write null for absent
                continue
            try:
                for name, made in self._entries(key, value, schema, (*path, key)).items():
                    _add(form, name, made)
            except Fault as fault:
                self._leave_out((*path, key), str(fault))
                if key == "patternProperties":
                    form["additionalProperties"] = True
        return form

    def _leave_out(self, path: Path, reason: str) -> None:
        if not self.loose:
            raise Unfit(f"{shown(path)}: {reason}")

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
        """What a keyword becomes: often itself, sometimes nothing. Keywords that say nothing are dropped."""
        if key in LISTS or (key == "items" and isinstance(value, list) and value):
            return self._list(key, value, schema, path)
        if key in SINGLE:
            return {key: self._part(value, path)}
        if key in NAMED:
            return self._named(key, value, path)
        if key in LOWER | UPPER:
            return _bound(key, value, schema)
        if key in LEAST | MOST:
            return _count(key, value)
        if key in UNSUPPORTED:
            if key == "propertyNames" and self._part(value, path) in ({}, True, {"type": "string"}):
                return {}
            raise Fault("no grammar can enforce it")
        match key:
            case "type":
                return _types(value)
            case "enum" | "const":
                if key == "enum" and not isinstance(value, list):
                    raise Fault("a list of values expected")
                _check_values(value, path)
                return {key: value} if key == "const" or value else {}
            case "required":
                if value in ([], {}):
                    return {}
                if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                    raise Fault("a list of names expected")
                return {key: value}
            case "pattern":
                return {key: _pattern(value, path)}
            case "format":
                return self._format(value, schema, path)
            case "multipleOf":
                return _multiple(value)
            case "$ref":
                if not isinstance(value, str) or not value.startswith("#"):
                    raise Fault("only references inside the schema are supported, such as #/$defs/Name")
                return {key: value}
            case "$schema":
                draft = _DRAFT.search(str(value))  # lists of items are tuples in drafts 4, 6 and 7
                return {key: f"http://json-schema.org/draft-0{draft[1]}/schema#"} if draft and len(path) == 1 else {}
            case "$id" if len(path) > 1:
                raise Fault("only the whole schema may have a name")
        return {}

    def _list(self, key: str, value: Any, schema: Mapping[str, Any], path: Path) -> dict[str, Any]:
        if not isinstance(value, list):
            raise Fault("a list of schemas expected")
        numbers = key == "anyOf" and any(_kinds(part) & {"integer", "number"} for part in value)
        parts = [
            False if numbers and _is_decimal(part) else self._part(part, (*path, index))
            for index, part in enumerate(value)
        ]
        if key == "oneOf" and self._excluded(value, parts, schema.get("discriminator")):
            return {"anyOf": parts}
        return {key: parts} if parts else {}

    def _excluded(self, value: list[Any], parts: list[Any], discriminator: Any) -> bool:
        """Whether no value fits two alternatives: a discriminator tells them apart, which is then required, since it
        may have a default, or their types do. The library sees neither behind references."""
        followed: list[Any] = [self._followed(part) or part for part in value]
        named = [one.get("properties") or () if isinstance(one, dict) else () for one in followed]
        tag = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
        if isinstance(tag, str) and all(tag in names for names in named):
            for part in parts:
                if isinstance(part, dict) and "$ref" in part:  # beside a reference, the library takes few keywords
                    self.tags.append((part["$ref"], tag))
                else:
                    _require(part, tag)
            return True
        kinds = [{"number" if kind == "integer" else kind for kind in _kinds(one)} for one in followed]
        return bool(kinds) and all(kinds) and sum(map(len, kinds)) == len(set().union(*kinds))

    def _named(self, key: str, value: Any, path: Path) -> dict[str, Any]:
        if value == []:
            return {}
        if not isinstance(value, dict):
            raise Fault("an object of schemas expected")
        named = {}
        for name, part in value.items():
            _check_values(name, path)
            known = _pattern(name, path) if key == "patternProperties" else name
            named[known] = self._part(part, (*path, name))
        return {key: named}

    def _with_listed_names(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Maps with an enum as their names, as pydantic and Zod have them, list them as properties."""
        names = schema.get("propertyNames")
        names = (self._followed(names) or names or {}).get("enum") if isinstance(names, dict) else None
        if not isinstance(names, list) or schema.keys() & {"properties", "patternProperties"}:
            return schema
        value = schema.get("additionalProperties", {})
        listed = {"properties": {name: value for name in names if isinstance(name, str)}, "additionalProperties": False}
        return {key: part for key, part in schema.items() if key != "propertyNames"} | listed

    def _followed(self, part: Any) -> dict[str, Any]:
        """The schema that a reference leads to; empty for what is no reference, or leads nowhere."""
        found: Any = {}
        for _ in range(_MOST_REFERENCES):
            if not isinstance(part, dict) or not str(part.get("$ref")).startswith("#/"):
                break
            part = found = target(self.root, part["$ref"])
        return found if isinstance(found, dict) and "$ref" not in found else {}

    def _format(self, value: Any, schema: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """JSON Schema takes a format that is not known for an annotation."""
        if not isinstance(value, str):
            raise Fault("a string expected")
        if value in FREE_FORMATS or (_kinds(schema) and "string" not in _kinds(schema)):
            return {}
        if value in PATTERNED_FORMATS:
            return {"pattern": _pattern(PATTERNED_FORMATS[value], path)}
        if value in LIBRARY_FORMATS:
            return {"format": value} | ({"maxLength": LONGEST[value]} if value in LONGEST else {})
        return {}


def target(root: Any, reference: str) -> Any:
    """The part of a schema that a JSON pointer names; None if there is none."""
    for step in unquote(reference).split("/")[1:]:
        root = root.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root


def _require(part: Any, name: str) -> None:
    """Make a property of an object required."""
    if isinstance(part, dict) and name in part.get("properties", ()):
        part["required"] = [*dict.fromkeys([*part.get("required", ()), name])]


def _types(value: Any) -> dict[str, Any]:
    """Types in lower case, as Gemini's are not."""
    kinds = [str(kind).lower() for kind in (value if isinstance(value, list) else [value])]
    if unknown := set(kinds) - _TYPES:
        raise Fault(f"{min(unknown)[:SHOWN]} is none of {', '.join(sorted(_TYPES))}")
    return {"type": kinds if isinstance(value, list) else kinds[0]} if kinds else {}


def _pattern(value: Any, path: Path) -> str:
    """A pattern that the library compiles exactly. Fault for look-around and back-references."""
    if not isinstance(value, str):
        raise Fault("a string expected")
    _check_values(value, path)
    pattern = _WITHOUT_LOOK_AHEAD.get(value, value)
    for sign in _SIGN.findall(pattern):
        if sign[0] == "(":
            raise Fault("look-ahead and look-behind are not supported")
        if sign[0] == "\\" and sign[1:] in tuple("123456789k"):
            raise Fault("back-references are not supported")
    # Inside a JSON string, the library lets quotation marks and backslashes through a class that excludes them if it
    # holds all control characters. No answer needs NUL.
    return _NEGATED.sub(lambda found: found[1] or r"[^\x00", pattern)


def _count(key: str, value: Any) -> dict[str, Any]:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise Fault("a whole number from 0 on expected")
    if value < _COUNT_MAX:
        return {key: int(value)}
    if key in LEAST:
        raise Fault(f"at most {_COUNT_MAX} allowed")
    return {}


def _multiple(value: Any) -> dict[str, Any]:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise Fault("a number above 0 expected")
    number = Decimal(str(value)).normalize()
    if value < 1e-9 or number.scaleb(-min(0, int(number.as_tuple().exponent))) > MAX_MULTIPLE:
        raise Fault(f"at most {MAX_MULTIPLE} units of its last digit, and at least 1e-9, allowed")
    return {"multipleOf": value}


def _bound(key: str, value: Any, schema: Mapping[str, Any]) -> dict[str, Any]:
    """A bound that the library reads exactly. Those of a type's whole range are moved inwards."""
    inclusive = "minimum" if key in LOWER else "maximum"
    if isinstance(value, bool) and key != inclusive:  # draft 4 and OpenAPI 3.0
        value = schema.get(inclusive) if value else None
        if value is None:
            return {}
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Fault("a number expected")
    outer = -EDGE if key in LOWER else EDGE
    if abs(value) > EDGE and (value < 0) == (outer < 0):
        return {inclusive: outer}
    if abs(value) > EDGE or float(value) != value or 0 < abs(value) < _SMALLEST:
        raise Fault(f"a number from -{EDGE} to {EDGE} that a double holds expected, and none below {_SMALLEST} but 0")
    return {key: int(value) if value == int(value) else value}


def _check_values(value: Any, path: Path) -> None:
    """Unfit for a value that is too long, or that the library would round."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str) and len(one) > MAX_LITERAL:
            raise Unfit(f"{shown(path)}: a string of {len(one)} characters given, at most {MAX_LITERAL} allowed")
        if isinstance(one, int) and abs(one) > MAX_INTEGER:
            digits = len(str(abs(one)))
            raise Unfit(f"{shown(path)}: an integer of {digits} digits given, at most {MAX_INTEGER} allowed")
        if isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, list):
            waiting += one


def _add(form: dict[str, Any], name: str, made: Any) -> None:
    """Add a keyword that the form may have already: then both are in force."""
    if name not in form:
        form[name] = made
    elif name in LEAST | MOST:
        form[name] = max(form[name], made) if name in LEAST else min(form[name], made)
    elif name == "allOf":
        form[name] = [*made, *form[name]]  # references name those that the schema has
    else:
        form["allOf"] = [*form.get("allOf", ()), {name: made}]


def _kinds(schema: Any) -> set[str]:
    """The types that a schema names; empty if it names none."""
    given = schema.get("type") if isinstance(schema, dict) else None
    return {str(kind).lower() for kind in (given if isinstance(given, list) else [given] if given else [])}


def _is_decimal(schema: Any) -> bool:
    """Whether a schema is pydantic's of a Decimal that is written as a string."""
    return isinstance(schema, dict) and str(schema.get("pattern")).startswith("^(?!^[-+.]*$)")
