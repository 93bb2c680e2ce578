"""`--help` of commands other than `serve`: typer's table, in which switches and arguments have no type."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import getdoc
from typing import Any

from typer.core import TyperCommand, TyperGroup


class PlainCommand(TyperCommand):
    """A command whose switches and arguments are shown without the `<bool>` and `<list[str]>` that typer adds."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _hide_types(self.get_params(ctx))
        super().format_help(ctx, formatter)


class PlainGroup(TyperGroup):
    """A group of commands, likewise."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _hide_types(self.get_params(ctx))
        super().format_help(ctx, formatter)


def summary_of(command: Callable[..., Any]) -> str:
    """The docstring in one line: typer keeps its line breaks."""
    return " ".join((getdoc(command) or "").split())


def _hide_types(parameters: Iterable[Any]) -> None:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        elif parameter.param_type_name == "argument":
            parameter.display_type_rich = lambda ctx: None
