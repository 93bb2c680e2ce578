"""A request's JSON as its type. A choice that there is not is answered with those that there are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from service.api.errors import bad_request

WHERE = re.compile(r" - at `\$\.?([^`]*)`$")
STEP = re.compile(r"\[[^\]]*\]|[^.\[\]]+")
"""Of a path like messages[0].content: a field, or an item of a list or an object."""

describe = cache(inspect.type_info)


def parse(raw: bytes | str, kind: Any) -> Any:
    """A body or a message as `kind`, a type or a union of types. ApiError or a msgspec error when it does not fit."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        path = where[1] if (where := WHERE.search(str(error))) else ""
        if choices := choices_at(kind, path):
            raise bad_request(f"{path}: must be one of {', '.join(choices)}.", path) from error
        raise


def choices_at(kind: Any, path: str) -> list[str]:
    """Values that `kind` allows at a path, none where it does not list them."""
    found = list(_alternatives(describe(kind)))
    for step in STEP.findall(path):
        found = [inner for outer in found for part in _inside(outer, step) for inner in _alternatives(part)]
    return [str(value) for one in found if isinstance(one, inspect.LiteralType) for value in one.values]


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
