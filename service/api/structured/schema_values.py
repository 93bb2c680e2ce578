"""Values of a schema's keywords as llguidance reads them exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from service.api.structured.closed_objects import Path
from service.api.structured.string_formats import known_pattern

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
