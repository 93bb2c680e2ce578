"""The `reprise` command and its subcommands."""

from __future__ import annotations

import errno
import inspect
import logging
import os
import signal
import sys
import typing
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from models.interfaces.errors import CheckpointError
from service.cli import doctor as checks
from service.cli.bench.command import bench
from service.cli.bench.run import BenchError
from service.cli.commands import ServerError, ask, chat, hear, models, ps, pull, say
from service.cli.serve_help import ServeCommand, describe, descriptions, placeholder, shown_default, summary_of
from service.link.config import ConfigurationError
from service.settings.reading import SettingsError
from service.settings.settings import Settings, load_settings, unknown_variables
from service.system import packages
from service.system.logs import configure_logging

log = logging.getLogger("reprise")

app = typer.Typer(
    name="reprise",
    help="An OpenAI-compatible server for models that see, hear and speak.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(packages.server_version())
        raise typer.Exit()


@app.callback()
def command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _settings_command(command: Any) -> Any:
    """Gives `command(config, print_config, ..., **flags)` an option for each setting beside its own, with the
    description from Settings."""
    parameters = [*inspect.signature(command, eval_str=True).parameters.values()][:-1]
    for name, field in Settings.model_fields.items():
        # Settings converts strings; None: not given.
        several = typing.get_origin(field.annotation) is tuple
        kind: Any = list[str] if several else bool if field.annotation is bool else str
        shown = shown_default(name)
        option = typer.Option(
            help=escape(f"{descriptions()[name]} [{shown}]" if shown else descriptions()[name]),
            metavar="" if field.annotation is bool else placeholder(name),
        )
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
            )
        )
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


@app.command(cls=ServeCommand)
@_settings_command
def serve(
    config: Annotated[Path | None, typer.Option(metavar="PATH", help="YAML file of settings.")] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", metavar="", help="Print the effective settings and exit.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar="", help="Print how much of a GPU a start would use, and exit.")
    ] = False,
    gpu_memory: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="With --dry-run: memory of the GPU, e.g. 24G; default: this GPU's."),
    ] = None,
    **flags: Any,
) -> None:
    """Serve models: those that arguments or --model name, or the embedded ones."""
    given = {name: value for name, value in flags.items() if value not in (None, [])}
    # Loading the settings may already log, so the format is taken from the flag or the environment.
    configure_logging("info", given.get("log_format") or os.environ.get("REPRISE_LOG_FORMAT", "text"))
    try:
        if gpu_memory is not None and not dry_run:
            raise SettingsError("gpu_memory: goes with --dry-run; --memory-share is what a server takes of its GPU")
        settings = load_settings(given, config)
    except SettingsError as error:
        _refuse(error)
    configure_logging(settings.log_level, settings.log_format)
    for variable in unknown_variables(os.environ):
        log.warning("unknown variable %s", variable)
    if print_config:
        typer.echo(describe(settings), nl=False)
        return
    if dry_run:
        _dry_run(settings, gpu_memory)
        return
    try:
        status = _serve(settings)
    except (CheckpointError, packages.PackageError, SettingsError) as error:
        _refuse(error)
    except ImportError as error:
        if packages.is_ours(error):
            raise
        _refuse(packages.PackageError(packages.unusable(error.name or "?", error)))
    raise typer.Exit(status)


def _serve(settings: Settings) -> int:
    """Serves until a signal; returns the exit status. Raises CheckpointError, PackageError or SettingsError for what
    cannot be served."""
    import asyncio

    from service.hub.catalog import load_catalog
    from service.link.engine_link import begin_engines
    from service.processes.config import api_process_count, engine_configs, engine_gpus, supervised, with_count
    from service.processes.listener import bind
    from service.system.children import end_soon, ended_by_ctrl_c

    _heed_signals_as_process_1()
    with asyncio.Runner() as runner:
        with ended_by_ctrl_c():
            packages.check_installed()
            listener = bind(settings)
            catalog = load_catalog(settings, log.info)
            starts = runner.run(begin_engines(engine_configs(settings, catalog, engine_gpus(settings))))
            # The engine processes import torch while this one imports the rest of the server.
            from service.processes.server import prepare_process, serve
            from service.processes.supervisor import Supervisor

            packages.check_importable()
        processes = api_process_count(settings)
        if settings.api_processes == "auto":
            log.log(logging.INFO if processes.number > 1 else logging.DEBUG, "API processes: %s", processes)
            settings = with_count(settings, processes)
        prepare_process()
        if supervised(settings):
            status = runner.run(Supervisor(settings, catalog, listener, starts).run())
        else:
            status = runner.run(serve(settings, catalog, listener, starts))
        end_soon(status)
        return status


def _heed_signals_as_process_1() -> None:
    """Lets SIGTERM and SIGHUP end a container's process 1 while it downloads and loads, as they end any other: for it,
    the kernel drops signals without a handler."""
    if os.getpid() == 1:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: os._exit(128 + number))


def _dry_run(settings: Settings, gpu_memory: str | None) -> None:
    """Prints how much of a GPU a start would use; exits with status 2 if it would fail."""
    from service.sizing import size

    try:
        found = size(settings, gpu_memory)
    except (CheckpointError, ConfigurationError, SettingsError) as error:
        _refuse(error)
    for line in found.lines():
        typer.echo(line)
    if found.refusal is not None:
        _refuse(SettingsError(found.refusal))


@app.command()
def doctor() -> None:
    """Check this machine: what it has, and what is missing."""
    marks = {True: "[green]ok[/green]", False: "[red]no[/red]", None: "[yellow]--[/yellow]"}
    console = Console(soft_wrap=True)
    findings = checks.examine()
    for finding in findings:
        console.print(f"{marks[finding.good]}  {escape(finding.subject)}: {escape(finding.found)}", highlight=False)
        if finding.advice:
            console.print(f"      [dim]{escape(finding.advice)}[/dim]", highlight=False)
    console.print(f"\n{checks.verdict(findings)}", highlight=False)
    raise typer.Exit(1 if any(finding.good is False for finding in findings) else 0)


# The help lists commands in the order of their registration: `serve` and `doctor` come first.
for subcommand in (ask, chat, say, hear, models, ps, pull):
    app.command(help=summary_of(subcommand))(subcommand)
app.add_typer(bench)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(packages.server_version())


def _refuse(error: Exception) -> typing.NoReturn:
    for line in str(error).splitlines():
        log.error("%s", line)
    raise typer.Exit(2)


def main() -> None:
    """The `reprise` command, once it is imported (service.cli.__main__)."""
    if not os.environ.get("HOME", "unset"):
        del os.environ["HOME"]  # an empty one would make / the home of voices and models
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # it may be a file on a full disk
    except (ServerError, BenchError) as error:
        typer.echo(f"reprise: {error}", err=True)
        sys.exit(1)
    except OSError as error:  # of a file that the command line names, or of the output
        if error.errno != errno.EPIPE:
            named = f"{error.filename}: " if error.filename is not None else ""
            typer.echo(f"reprise: {named}{error.strerror or error}", err=True)
        _drop_output()
        sys.exit(1)


def _drop_output() -> None:
    """Forgets what cannot be written to standard output: Python would try it again at its end, and say so."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):  # it has no descriptor
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
