"""`reprise serve` on the command line. Its `--help` has all settings, readable on a terminal of 80 columns,
the most used ones first."""

from __future__ import annotations

import ast
import json
import typing
from collections.abc import Callable
from functools import cache
from inspect import getdoc, getfile
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import yaml
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand

from service.settings.reading import BYTES, GIB, MIB
from service.settings.settings import PANELS, Settings


def summary_of(command: Callable[..., Any]) -> str:
    """The docstring in one line: typer keeps its line breaks."""
    return " ".join((getdoc(command) or "").split())


def describe(settings: Settings) -> str:
    """The effective settings as YAML, secrets masked."""
    values = json.loads(settings.model_dump_json())
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


@cache
def descriptions() -> dict[str, str]:
    """What each setting does: the docstrings of the fields. pydantic would read them at each start, in 50 ms."""
    classes = ast.parse(Path(getfile(Settings)).read_text("utf-8")).body
    fields = next(node.body for node in classes if isinstance(node, ast.ClassDef))
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(fields)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def panel(field: str) -> str:
    """The group that a setting is listed under."""
    names = list(Settings.model_fields)
    return next(PANELS[name] for name in reversed(names[: names.index(field) + 1]) if name in PANELS)


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


MOST_USED = (
    "model",
    "served_model_name",
    "host",
    "port",
    "api_key_file",
    "gpus",
    "api_processes",
    "memory_share",
    "max_running",
    "quantization",
    "media_urls",
)
"""Settings that come first, in this order."""
_INDENT = " " * 6


class ServeCommand(TyperCommand):
    """Each option on its own line with its description below, since typer's table leaves only 20 of 80 columns for
    it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take models as arguments, too, as vLLM does: `serve OWNER/NAME` is `serve --model OWNER/NAME`."""
        ctx.allow_extra_args = True
        rest = super().parse_args(ctx, args)
        for name in ctx.args:
            if "/" not in name:
                ctx.fail(f"{name!r}: a model is OWNER/NAME or ./PATH, and a switch takes no value")
        ctx.params["model"] = [*(ctx.params["model"] or ()), *ctx.args] or None
        return rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """formatter is not used: the help is printed as it is generated."""
        console = Console(highlight=False)
        console.print(Text(f"\nUsage: {ctx.command_path} [OPTIONS] [MODEL]...\n", "bold"))
        console.print(self.help or "")
        console.print(
            "\nEach setting is also an environment variable, REPRISE_ and its name in capitals, and a key of the YAML "
            "file that --config names."
        )
        for title, options in groups(self.params).items():
            console.print(Text(f"\n{title}", "bold"))
            for option in options:
                console.print(_names(option))
                for line in Text.from_markup(option.help or "").wrap(console, console.width - len(_INDENT)):
                    console.print(Text(_INDENT) + line)


def groups(options: list[Any]) -> dict[str, list[Any]]:
    """Title -> options: those that are not settings, the most used settings, then the others by panel. Each option is
    in one group."""
    by_name = {option.name: option for option in options}
    found = {
        "Options": [option for option in options if option.name not in Settings.model_fields],
        "Settings that most servers need": [by_name[name] for name in MOST_USED],
    }
    for name in Settings.model_fields:
        if name not in MOST_USED:
            found.setdefault(panel(name), []).append(by_name[name])
    return found


def _names(option: Any) -> Text:
    """`--port INTEGER`, or `--page / --no-page` for a switch."""
    line = Text("  ")
    line.append(" / ".join((*option.opts, *option.secondary_opts)), "bold cyan")
    if option.metavar:
        line.append(f" {option.metavar}", "yellow")
    return line
