"""`reprise bench`: a load on a server, with progress and a table of the clients' measurements."""

from __future__ import annotations

import inspect
import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import typer
from msgspec.structs import fields
from rich import box
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text
from typer.core import TyperGroup

from service.cli import commands
from service.cli.bench.report import SEEDS, write_report
from service.cli.bench.run import run_load, summary
from service.cli.bench.traffic import AnyLoad, ChatLoad, Load, Record, SpeechLoad

LATE_SECONDS = 0.05
REPORT = "reprise-report"


class _Bench(TyperGroup):
    """--report may have a path."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for at, word in enumerate(args[:]):
            if word == "--report" and (at + 1 == len(args) or args[at + 1].startswith("-")):
                args.insert(at + 1, REPORT)
        return super().parse_args(ctx, args)


bench = typer.Typer(
    name="bench",
    cls=_Bench,
    help="Put a load on a server and time its answers at the client. Every picture and text is new.",
    no_args_is_help=True,
    invoke_without_command=True,
)


@bench.callback()
def report(
    context: typer.Context,
    path: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="[PATH]",
            help=f"Measure start, steps and served loads of a model into PATH.json and PATH.md ({REPORT}).",
        ),
    ] = None,
    url: Annotated[str, typer.Option(help="Server to report on; default: one that is started.")] = "",
    key: commands.Key = "",
    model: Annotated[str, typer.Option(help="Served name at --url; or what to start: a hub id or directory.")] = "",
    minutes: Annotated[float, typer.Option(min=0.01, help="Longest time of a report, without a download.")] = 5.0,
) -> None:
    if (path is None) == (context.invoked_subcommand is None):
        raise typer.BadParameter("give either --report or a load, chat or speech")
    if path is not None:
        write_report(path, url.rstrip("/").removesuffix("/v1"), key, model, 60 * minutes)


@dataclass(frozen=True)
class Options:
    url: commands.Url = commands.DEFAULT_URL
    key: commands.Key = ""
    model: commands.Model = ""
    requests: Annotated[int, typer.Option(min=1, help="Number of requests to measure.")] = 32
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: number of open requests; 4 unless --rate is given.")
    ] = None
    rate: Annotated[float | None, typer.Option(min=0.001, help="Open loop: requests per second, Poisson arrivals.")] = (
        None
    )
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the measurement, one after the other.")] = 2
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Random seed; the same one makes the same contents again. Default: a new one."),
    ] = None
    processes: Annotated[int, typer.Option(min=1, help="Client processes; use more if one is too slow.")] = 1
    timeout: Annotated[float, typer.Option(min=1, help="Longest wait for a byte of an answer (s).")] = 300.0
    out: Annotated[Path | None, typer.Option("--json", help="File for the summary and the data of every request.")] = (
        None
    )

    def __post_init__(self) -> None:
        if self.rate is not None and self.concurrency is not None:
            raise typer.BadParameter("a closed loop (--concurrency) and an open one (--rate) exclude each other")

    def load(self, client: commands.ApiClient, kind: Literal["chat", "speech"]) -> dict[str, Any]:
        """The fields of Load, against the server of `client`."""
        return {
            "url": client.url,
            "model": self.model or client.first(kind),
            "requests": self.requests,
            "seed": secrets.randbelow(SEEDS) if self.seed is None else self.seed,
            "concurrency": 0 if self.rate is not None else self.concurrency or 4,
            "rate": self.rate or 0.0,
            "warmup": self.warmup,
            "api_key": commands.key_for(client.url, self.key),
            "timeout": self.timeout,
        }


def own_options(kind: type[AnyLoad]) -> list[Parameter]:
    """An option for each field that this kind of load has beside those of Load."""
    hints, keyword = get_type_hints(kind, include_extras=True), Parameter.KEYWORD_ONLY
    options = []
    for one in fields(kind)[len(fields(Load)) :]:
        annotation, meta = get_args(hints[one.name])
        flags = filter(None, [meta.extra["flag"]])
        option = typer.Option(*flags, min=meta.ge, max=meta.le, help=meta.description)
        annotation = list[str] if get_origin(annotation) is tuple else annotation
        default = [*one.default] if isinstance(one.default, tuple) else one.default
        options.append(Parameter(one.name, keyword, default=default, annotation=Annotated[annotation, option]))
    return options


def register(name: Literal["chat", "speech"], kind: type[AnyLoad], summary: str) -> None:
    """Registers `reprise bench NAME`, with the shared Options and those of the load."""
    shared = list(inspect.signature(Options, eval_str=True).parameters.values())

    def command(**given: Any) -> None:
        options = Options(**{option.name: given.pop(option.name) for option in shared})
        if given.get("system_tokens") and not given["system_message"]:
            raise typer.BadParameter("a system prompt (--system-tokens) and none (--no-system) exclude each other")
        if given.get("json_schema"):
            given["json_schema"] = _schema_in(given["json_schema"])
        commands.check_writable(options.out)
        with commands.connect(options.url, options.key) as client:
            load = msgspec.convert(options.load(client, name) | given, kind)
            _measure(load, options.processes, options.out)

    # Typer reads the options from this.
    command.__signature__ = inspect.Signature([*shared, *own_options(kind)])  # type: ignore[attr-defined]
    bench.command(name, help=summary)(command)


register("chat", ChatLoad, "Chat: time to first token, time between tokens, tokens per second.")
register("speech", SpeechLoad, "Speech: time to first audio, real-time factor, gaps in playback.")


def _schema_in(file: str) -> str:
    try:
        msgspec.json.decode(schema := Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}", param_hint="--json-schema") from error
    except ValueError as error:
        raise typer.BadParameter(f"{file} is not JSON: {error}", param_hint="--json-schema") from error
    return schema


def _measure(load: AnyLoad, processes: int, out: Path | None) -> None:
    with _progress(load) as report:
        records = run_load(load, processes=processes, report=report)
    result = summary(load, records)
    if out is not None:
        out.write_text(json.dumps({**result, "records": msgspec.to_builtins(records)}, indent=1) + "\n")
    console = Console()
    console.print(results_table(load, result, records))
    if not result["succeeded"]:
        words = next((record.message for record in records if record.message), "")
        raise commands.ServerError(f"no request succeeded ({_failures(records)}). {words}".rstrip())
    if result.get("delay", {}).get("p99", 0.0) > LATE_SECONDS:
        console.print("The clients sent requests late: raise --processes.", style="yellow")


@contextmanager
def _progress(load: AnyLoad) -> Iterator[Callable[[Record], None]]:
    """A line, and on a terminal a bar. Yields the function to call with each record."""
    console = Console(stderr=True)
    how = f"{load.rate:g} a second" if load.rate else f"{load.concurrency} at a time"
    turns = load.turns if isinstance(load, ChatLoad) else 1
    many = commands.counted(load.requests, "request")
    if turns > 1:
        many = f"{commands.counted(load.requests, 'conversation')} of {turns} turns"
    typer.echo(f"{load.model}: {many}, {how}, seed {load.seed}", err=True)
    if not console.is_terminal:
        yield lambda record: None
        return
    # The line above stays; beside it a narrow terminal would have no room for the count and the time.
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=load.requests * turns)
        yield lambda record: progress.advance(task)


def results_table(load: AnyLoad, result: dict[str, Any], records: Sequence[Record]) -> Group:
    """Prints the clients' measurements: counts and rates, then quantiles of times."""
    counts = Table.grid(padding=(0, 2))
    counts.add_row("requests", str(result["requests"]))
    if failures := _failures(records):
        counts.add_row("[red]without an answer[/red]", Text(failures))
    figures = (Column(name, justify="right", overflow="fold") for name in _SHOWN)  # broken rather than cut
    times = Table(Column(overflow="fold"), *figures, box=box.SIMPLE_HEAD)

    def quantiles(label: str, values: dict[str, float], scale: float = 1e3) -> None:
        if values:
            times.add_row(label, *(f"{scale * values[name]:.{1 if scale > 1 else 3}f}" for name in _SHOWN))

    if not result["succeeded"]:
        return Group(counts)
    counts.add_row("requests/s", f"{result['requests_per_second']:.2f}")
    if isinstance(load, ChatLoad):
        counts.add_row("tokens/s", f"{result.get('tokens_per_second', 0.0):.1f}")
        counts.add_row("tokens of a prompt", f"{result.get('prompt_tokens_mean', 0.0):.0f}")
        counts.add_row("prompt tokens from the cache", str(result["cached_tokens"]))
        quantiles("time to first token (ms)", result["first"])
        if load.turns > 1:
            quantiles("first turns (ms)", result["first_by_turn"]["1"])
            quantiles("later turns (ms)", result["first_later"])
        quantiles("between tokens (ms)", result["gap"])
    else:
        known = "audio_seconds_per_second" in result
        rate = f"{result['audio_seconds_per_second']:.2f}" if known else "known only as pcm or with --seconds"
        counts.add_row("audio s/s", rate)
        if load.response_format == "pcm" and "streams_with_underrun" in result:
            silence = (
                f"{result['underrun_seconds']:.2f} s in {commands.counted(result['streams_with_underrun'], 'stream')}"
            )
            counts.add_row("underruns", silence)
        quantiles("time to first audio (ms)", result["first"])
        quantiles("between chunks (ms)", result["gap"])
        quantiles("real-time factor", result.get("realtime_factor", {}), 1.0)
    quantiles("whole answer (ms)", result["duration"])
    return Group(counts, times)


_SHOWN = ("mean", "p50", "p95", "p99", "max")


def _failures(records: Sequence[Record]) -> str:
    """Counts by kind of failure: "503 refused: 3, failed (the server closed the connection): 1"."""
    counts = Counter(map(_failure, (record for record in records if record.error)))
    return ", ".join(f"{what}: {count}" for what, count in counts.most_common())


def _failure(record: Record) -> str:
    reason = f" ({record.message})" if record.error == "failed" and record.message else ""
    return f"{record.status or ''} {record.error}{reason}".strip()
