"""`reprise serve` on the command line. Its `--help` has all settings, readable on a terminal of 80 columns,
the most used ones first."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand

from service.cli.setting_texts import panel
from service.settings.settings import Settings

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
    "sleep_after",
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
        console.print(Text(f"\nUsage: {ctx.command_path} [OPTIONS]\n", "bold"))
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
