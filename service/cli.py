"""The command line: serve, ask, say, models, bench, doctor, version."""

from __future__ import annotations

import inspect
import os
import sys
import typing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from models.errors import CheckpointError
from service import doctor as checks
from service.api.operations import server_version
from service.bench.command import bench
from service.bench.run import BenchError
from service.client import ServerSaid
from service.options import DEFAULT_URL, Key, Local, Model, Url, connect
from service.settings import (
    Settings,
    SettingsError,
    describe,
    load_settings,
    panel,
    placeholder,
    shown_default,
    unknown_variables,
)

app = typer.Typer(
    name="reprise",
    help="A small server that sees and speaks, over the OpenAI protocol.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

app.add_typer(bench)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(server_version())
        raise typer.Exit()


@app.callback()
def command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


def _settings_command(command: Any) -> Any:
    """Give `command(config, print_config, **flags)` one option for each setting, documented where it is defined."""
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, default, annotation in (
            ("config", None, Annotated[Path | None, typer.Option(help="YAML file of settings.")]),
            (
                "print_config",
                False,
                Annotated[bool, typer.Option("--print-config", help="Print the effective settings and leave.")],
            ),
        )
    ]
    for name, field in Settings.model_fields.items():
        kind = _flag_type(field.annotation)
        shown = shown_default(name)
        option = typer.Option(
            help=f"{escape(field.description or '')}{escape(f' [{shown}]') if shown else ''}",
            metavar=None if field.annotation is bool else placeholder(name),
            rich_help_panel=panel(name),
        )
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])
        )
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _flag_type(annotation: Any) -> Any:
    """The settings know their types: a flag is a switch, a text, or several texts. None: it is not given."""
    if typing.get_origin(annotation) is tuple:
        return list[str] | None
    return bool | None if annotation is bool else str | None


@app.command()
@_settings_command
def serve(config: Path | None = None, print_config: bool = False, **flags: Any) -> None:
    """Serve models: those of --model, or the small untrained ones that come with the package."""
    given = {name: value for name, value in flags.items() if value not in (None, [])}
    try:
        settings = load_settings(given, config)
    except SettingsError as error:
        _fail(str(error))
    for variable in unknown_variables(os.environ):
        typer.echo(f"reprise: unknown variable {variable}", err=True)
    if print_config:
        typer.echo(describe(settings), nl=False)
        return
    from service.catalog import load_catalog
    from service.server import bind, run

    try:
        listener = bind(settings)
        catalog = load_catalog(settings, lambda line: typer.echo(f"reprise: {line}", err=True))
        status = run(settings, catalog, listener)
    except (CheckpointError, SettingsError) as error:
        _fail(str(error))
    raise typer.Exit(status)


@app.command()
def ask(
    files: Annotated[list[Path], typer.Argument(help="Picture and video files.", exists=True, dir_okay=False)],
    question: Annotated[str, typer.Argument(help="What to ask about them.")],
    url: Url = DEFAULT_URL,
    key: Key = "none",
    model: Model = "",
    max_tokens: Annotated[int, typer.Option(help="Length of the answer.")] = 256,
    local: Local = False,
) -> None:
    """Ask a server about pictures and videos and print the answer as it comes; reasoning goes to standard error."""
    with connect(url, key, local) as client:
        for reasoning, answer in client.ask(files, question, model, max_tokens):
            typer.echo(reasoning, nl=False, err=True)
            typer.echo(answer, nl=False)
        typer.echo()


@app.command()
def say(
    text: Annotated[str, typer.Argument(help="What to say.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write; its ending is the format.")] = Path(
        "out.wav"
    ),
    voice: Annotated[str, typer.Option(help="Name of a voice.")] = "default",
    instructions: Annotated[str, typer.Option(help="What the voice is like, or how it speaks.")] = "",
    speed: Annotated[float, typer.Option(help="1 is the model's own; 0.25 to 4.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same audio.")] = None,
    url: Url = DEFAULT_URL,
    key: Key = "none",
    model: Model = "",
    local: Local = False,
) -> None:
    """Have a text spoken and write the audio to a file."""
    with connect(url, key, local) as client:
        size = client.say(text, out, model, voice, instructions, speed, seed)
    typer.echo(f"{out}: {size} bytes")


@app.command()
def models(url: Url = DEFAULT_URL, key: Key = "none", local: Local = False) -> None:
    """List the models of a server."""
    table = Table("name", "kind", "context", "notice")
    with connect(url, key, local) as client:
        for card in client.models():
            table.add_row(card["id"], card["kind"], str(card["max_model_len"]), card.get("notice", ""))
    Console().print(table)


@app.command()
def doctor() -> None:
    """Say what this machine has and what is missing."""
    marks = {True: "[green]ok[/green]", False: "[red]no[/red]", None: "[yellow]--[/yellow]"}
    console = Console(soft_wrap=True)
    findings = checks.examine()
    for finding in findings:
        console.print(f"{marks[finding.good]}  {escape(finding.subject)}: {escape(finding.found)}", highlight=False)
        if finding.advice:
            console.print(f"      [dim]{escape(finding.advice)}[/dim]", highlight=False)
    missing = sum(finding.good is False for finding in findings)
    console.print(f"\n{missing} missing." if missing else "\nReady to serve: reprise serve", highlight=False)
    raise typer.Exit(1 if missing else 0)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(server_version())


def _fail(message: str) -> typing.NoReturn:
    for line in message.splitlines():
        typer.echo(f"reprise: {line}", err=True)
    raise typer.Exit(2)


def main() -> None:
    """Entry point of the `reprise` command."""
    try:
        app()
    except (ServerSaid, BenchError) as error:
        typer.echo(f"reprise: {error}", err=True)
        sys.exit(1)
    except OSError as error:  # a file that the command line names
        if error.filename is None:
            raise
        typer.echo(f"reprise: {error.filename}: {error.strerror}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
