"""Says in plain English what msgspec found wrong with a value, and where."""

from __future__ import annotations

import re
import sys

import msgspec

WHERE = re.compile(r" - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`$")
VALUE = "[...]"
"""The end of the path of an object's value, whose key the message leaves out."""
MISSING = re.compile(r"^Object missing required field `(\w+)`")
UNKNOWN = re.compile(r"^Object contains unknown field `(\w{1,64})`$")
LIMIT = re.compile(r"^Expected `\w+` (<=|>=|<|>) (\S+)$")
LENGTH = re.compile(r"^Expected `(\w+)` of length (<=|>=) (\d+)$")
KIND = re.compile(r"^Expected `([^`]+)`, got `(\w+)`$")
TRUNCATED = "Input data was truncated"
"""msgspec's message of a text that ends within a value."""

KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
GIVEN = KINDS | {"float": "a decimal number", "bool": "a boolean"}
UNBOUNDED = {
    "Integer value out of range": "must have at most 4300 digits",
    "Number out of range": f"must be between {-sys.float_info.max:.1e} and {sys.float_info.max:.1e}",
}
"""msgspec's messages of numbers that it cannot hold, whatever the field allows."""
BOUNDS = {"<=": "at most", ">=": "at least", "<": "less than", ">": "more than"}
ITEMS = {"str": "character", "array": "item", "object": "entry"}
PLURAL = {"entry": "entries"}


def explain(text: str) -> tuple[str, str]:
    """The path of a value, empty for the whole body, and what is wrong with it, of a message of
    msgspec.ValidationError. Neither repeats the value."""
    where = WHERE.search(text)
    path, problem = (where["path"], text[: where.start()]) if where else ("", text)
    if named := MISSING.match(problem) or UNKNOWN.match(problem):
        words = "this field is required" if named.re is MISSING else "there is no such field"
        return (f"{path}.{named[1]}" if path else named[1]), words
    words = _words(problem)
    if path.endswith(VALUE):
        return path.removesuffix(VALUE), f"each value {words}"
    return path, f"each key {words}" if where and where["key"] else words


def _words(problem: str) -> str:
    if limit := LIMIT.match(problem):
        return f"must be {BOUNDS[limit[1]]} {limit[2].removesuffix('.0')}"
    if length := LENGTH.match(problem):
        item = ITEMS.get(length[1], "item")
        return f"must have {BOUNDS[length[2]]} {length[3]} {item if length[3] == '1' else PLURAL.get(item, item + 's')}"
    if kind := KIND.match(problem):
        return f"must be {one_of(kinds(kind[1].split(' | ')))}; {GIVEN.get(kind[2], kind[2])} was given"
    if problem.startswith("Object contains unknown field"):
        return "has a field that is not known"
    return UNBOUNDED.get(problem, problem)


def unreadable(error: msgspec.DecodeError | RecursionError | UnicodeDecodeError) -> str:
    """Why a text could not be read as JSON, and where; nothing of the text itself."""
    match error:
        case RecursionError():
            return "it is nested too deeply"
        case UnicodeDecodeError():
            return "it is not UTF-8"
        case _:
            problem = str(error)
            return "it ends too early" if problem == TRUNCATED else problem.removeprefix("JSON is malformed: ")


def kinds(names: list[str]) -> list[str]:
    """msgspec's names of types in words. null, which is the same as leaving a field out, is not offered."""
    return [KINDS.get(name, name) for name in names if name != "null" or names == ["null"]]


def one_of(choices: list[str]) -> str:
    """`a`, `a or b`, `one of a, b, c`."""
    return " or ".join(choices) if len(choices) < 3 else f"one of {', '.join(choices)}"
