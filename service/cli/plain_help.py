"""`--help` of commands other than `serve`: typer's table, in which a switch has no type."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import getdoc
from typing import Any

from typer.core import TyperCommand, TyperGroup


class PlainCommand(TyperCommand):
    """A command whose switches are shown without the `<bool>` that typer adds."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _hide_type_of_switches(self.get_params(ctx))
        super().format_help(ctx, formatter)


class PlainGroup(TyperGroup):
    """A group of commands, likewise."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _hide_type_of_switches(self.get_params(ctx))
        super().format_help(ctx, formatter)


def summary_of(command: Callable[..., Any]) -> str:
    """The docstring in one line: typer keeps its line breaks."""
    return " ".join((getdoc(command) or "").split())


def _hide_type_of_switches(options: Iterable[Any]) -> None:
    for option in options:
        if getattr(option, "is_flag", False):
            option.metavar = ""
