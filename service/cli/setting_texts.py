"""Texts about settings for the command line and docs/settings.md: panels, defaults, choices, effective values."""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any, Literal

import yaml

from service.settings.byte_sizes import GIB, MIB
from service.settings.settings import Settings
from service.settings.types import BYTES


def describe(settings: Settings) -> str:
    """The effective settings as YAML, secrets masked."""
    values = json.loads(settings.model_dump_json())
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def panel(field: str) -> str:
    """The group that a setting is listed under."""
    extra = Settings.model_fields[field].json_schema_extra
    assert isinstance(extra, dict)
    return str(extra["panel"])


def shown_default(field: str) -> str:
    """The default as an operator writes it: 512M, on, 0.75; empty if there is none."""
    info = Settings.model_fields[field]
    value = info.get_default()
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and BYTES in info.metadata:
        return next(
            (f"{value // size}{unit}" for size, unit in ((GIB, "G"), (MIB, "M")) if value % size == 0), f"{value}"
        )
    return f"{value:g}" if isinstance(value, float) else str(value)


def choices(annotation: Any) -> tuple[str, ...]:
    """The values of a Literal, which may be part of a union; none for any other type."""
    if typing.get_origin(annotation) is Literal:
        return tuple(str(value) for value in typing.get_args(annotation))
    return next((found for part in typing.get_args(annotation) if (found := choices(part))), ())


def placeholder(field: str) -> str:
    """The placeholder of a value in `--help`: its choices, or its kind in capitals."""
    info = Settings.model_fields[field]
    if values := choices(info.annotation):
        number = int in typing.get_args(info.annotation)
        return "|".join([*values, "INTEGER"] if number else values)
    if BYTES in info.metadata:
        return "BYTES"
    inner = [part for part in typing.get_args(info.annotation) if part not in (type(None), ...)]
    kind: Any = inner[0] if inner else info.annotation
    kind = next(iter(typing.get_args(kind)), kind)  # of Annotated
    return {int: "INTEGER", float: "NUMBER", Path: "PATH"}.get(kind, "TEXT")
