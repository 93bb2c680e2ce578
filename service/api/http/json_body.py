"""Decodes JSON to a type. Errors for a value that is not among the choices of a field list the choices."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from service.api.http.errors import OUT_OF_RANGE, bad_request, explain, invalid, kinds, one_of

STEP = re.compile(r"\[[^\]]*\]|[^.\[\]]+")
"""A step of a path like messages[0].content: a field, or an item of a list or object."""

MAX_SIGNS = 1 << 19
"""Commas and opening brackets of a JSON text at most, also within its strings, which may be JSON. The values between
them take many times the memory of their text, and nothing else runs while they are made. A text that fills
the context of a model has fewer."""

OUT_OF_BOUNDS = re.compile(r"Expected `\w+` (?:of length )?[<>]")
"""A value of a type that the field has, but too large, small, long or short."""

NAMES: dict[type[inspect.Type], str] = {
    inspect.IntType: "int",
    inspect.FloatType: "float",
    inspect.StrType: "str",
    inspect.BoolType: "bool",
    inspect.ListType: "array",
    inspect.DictType: "object",
    inspect.StructType: "object",
}
describe = cache(inspect.type_info)


def parse(raw: bytes | str, kind: Any) -> Any:
    """A body or WebSocket message as `kind`, a type or union of types. ApiError or msgspec error if it does not fit."""
    # Tools of Windows write a byte order mark into files; RFC 8259, 8.1, lets it be ignored.
    raw = raw.removeprefix(codecs.BOM_UTF8) if isinstance(raw, bytes) else raw.removeprefix("\ufeff")
    check_values(raw)

    def read() -> Any:
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.ValidationError as error:
            if str(error).startswith(OUT_OF_RANGE):  # taken for infinite, the number is beyond a limit of its field
                msgspec.convert(msgspec.json.Decoder(float_hook=float).decode(raw), kind, str_keys=True)
            raise

    return _listing_choices(kind, read)


def of_texts(fields: Mapping[str, Any], kind: Any) -> Any:
    """The fields of a form as `kind`, whose numbers and booleans are text. Errors are those of `parse`."""
    return _listing_choices(kind, lambda: msgspec.convert(fields, kind, strict=False))


def _listing_choices(kind: Any, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except msgspec.ValidationError as error:
        path, _ = explain(str(error))
        if not OUT_OF_BOUNDS.match(str(error)) and (choices := choices_at(kind, path)):
            raise invalid(path, f"must be {one_of(choices)}") from error
        raise


def check_values(raw: bytes | str) -> None:
    """ApiError 400 for a JSON text of more values than any request needs, before any of them is made."""
    signs = sum(map(raw.count, ",[{") if isinstance(raw, str) else map(raw.count, (b",", b"[", b"{")))
    if signs > MAX_SIGNS:
        message = f"The JSON has too many values: {signs} commas and brackets given, at most {MAX_SIGNS} allowed."
        raise bad_request(message, code="too_many_values")


def choices_at(kind: Any, path: str) -> list[str]:
    """The literal values that `kind` allows at a path, then other types in words; empty if it does not list any."""
    found = list(_alternatives(describe(kind)))
    for step in STEP.findall(path):
        found = [inner for outer in found for part in _inside(outer, step) for inner in _alternatives(part)]
    literals = [str(value) for one in found if isinstance(one, inspect.LiteralType) for value in one.values]
    tags = [str(one.tag) for one in found if isinstance(one, inspect.StructType) and one.tag_field]
    named = [f"an object of type {' or '.join(tags)}"] if tags else []
    others = [NAMES[type(one)] for one in found if type(one) in NAMES and not getattr(one, "tag_field", None)]
    return [*literals, *dict.fromkeys(kinds(others)), *named] if literals else []


def _alternatives(described: inspect.Type) -> Iterator[inspect.Type]:
    match described:
        case inspect.Metadata():
            yield from _alternatives(described.type)
        case inspect.UnionType():
            for one in described.types:
                yield from _alternatives(one)
        case _:
            yield described


def _inside(outer: inspect.Type, step: str) -> Iterator[inspect.Type]:
    match outer:
        case inspect.StructType():
            if step == outer.tag_field:
                yield inspect.LiteralType((outer.tag,))
            yield from (field.type for field in outer.fields if field.encode_name == step)
        case inspect.ListType() if step.startswith("["):
            yield outer.item_type
        case inspect.DictType() if step.startswith("["):
            yield outer.value_type
