"""`reprise bench --report`: start, served loads and steps of a hosted model, as one JSON and one page."""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread, Timer
from typing import IO, Any, cast
from urllib.parse import urlsplit

import msgspec
import typer

from models.checkpoints.registry import family_of, resolve
from models.interfaces import cpus
from models.interfaces.errors import CheckpointError
from service.cli.bench.run import Clients, run_together, summary, warm_up
from service.cli.bench.traffic import AnyLoad, ChatLoad, SpeechLoad
from service.cli.commands import ApiClient, ScrapedMetrics, ServerError, check_writable, connect
from service.hub import embedded, locate
from service.system.access import is_loopback
from service.system.children import python_command, python_environment

Row = dict[str, Any]

STOP_SECONDS = 30.0
COPY_BYTES = 1 << 28
SEEDS = 1_000_000_000
ROOT = Path(__file__).parents[3]
CHATS = {1: 64, 8: 256, 32: 768}
STREAMS = {1: 16, 8: 64}
"""Requests at a time, to the most in all; on a CPU an eighth of these, but one for each at a time."""
CHAT = {"width": 448, "height": 448, "text_words": 128, "output_tokens": 128}
SPEECH = {"text_words": 30, "seconds": 10.08}
CPU_CHAT = {"width": 112, "height": 112, "text_words": 16, "output_tokens": 16}
CPU_SPEECH = {"text_words": 5, "seconds": 1.6}
SENDING = 1 / 12
"""Share of a report's time in which each of at most six loads sends; the rest is for the start, for captures and for
what a load leaves open."""
HOW_TO_SEND = (
    "To add it to the table of reports, put the JSON into `benchmarks/results/reports` under a name of its own, run "
    "`python -m benchmarks.report` and open a pull request; or attach both files to an issue."
)


def write_report(path: Path, url: str, key: str, model: str, seconds: float) -> None:
    """Measure the server at `url`, or one that is started for `model`, and write PATH.json and PATH.md. Raises
    ServerError, BenchError or OSError."""
    data, page = (path.with_name(path.name + suffix) for suffix in (".json", ".md"))
    check_writable(data, page)
    named = None
    if url:
        with connect(url, key) as client:
            report = _measured(client, model, time.monotonic() + seconds, seconds)
    else:
        try:
            named = locate(model, report=lambda line: typer.echo(line, err=True)).directory if model else None
        except CheckpointError as error:
            raise ServerError(str(error)) from error
        end = time.monotonic() + seconds  # a download does not count
        with started(["--model", model] if model else [], end) as (address, ready), connect(address, key) as client:
            report = _measured(client, "", end, seconds)
        report["start"]["ready"] = ready
    if not url or is_loopback(urlsplit(url).hostname or ""):
        report |= _with_rooflines(report, named)
    else:
        report["no_roofline"] = "the server is on another machine"
    data.write_text(json.dumps(report, indent=1) + "\n")
    page.write_text(page_of(report))
    typer.echo(f"{page}\n{data}\n{HOW_TO_SEND}")


@contextmanager
def started(flags: Sequence[str], end: float) -> Iterator[tuple[str, float]]:
    """A server in a process of its own: its address, and the seconds until it was ready."""
    command = [*python_command("service.cli"), "serve", "--host", "127.0.0.1", "--port", "0", "--log-format", "json"]
    typer.echo("starting a server", err=True)
    began, said = time.monotonic(), deque[str](maxlen=5)
    process = subprocess.Popen([*command, *flags], env=python_environment(), stderr=subprocess.PIPE, text=True)
    late = Timer(end - began, process.terminate)
    late.start()
    try:
        for line in cast("IO[str]", process.stderr):
            said.append(str(json.loads(line)["message"]) if line.startswith("{") else line.rstrip())
            if said[-1].startswith("ready at "):
                break
        else:
            slow = "it was not ready in time (--minutes). " if time.monotonic() >= end else ""
            raise ServerError(f"no server could be started: {slow}" + "\n".join(said))
        late.cancel()
        Thread(target=deque, args=(process.stderr, 0), daemon=True).start()  # a full pipe would stop the server
        yield said[-1].removeprefix("ready at "), time.monotonic() - began
    finally:
        late.cancel()
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        process.kill()


def _measured(client: ApiClient, model: str, end: float, seconds: float) -> Row:
    """The report of a server, but for what only its machine tells."""
    cards = _cards(client, model)
    began = time.monotonic()
    while any((metrics := client.metrics()).sums("reprise_graph_captures_left").values()):
        if time.monotonic() > began + seconds / 4:
            break
        time.sleep(0.25)
    if not (device := metrics.label("reprise_engine_info", "device")):
        raise ServerError(f"{client.url}/metrics does not answer as Reprise does")
    waited, left_out = time.monotonic() - began, list[str]()
    rows = [row for card in cards for row in _loads(client, card, device == "cpu", seconds * SENDING, end, left_out)]
    metrics = client.metrics()
    versions = {name: metrics.label("reprise_build_info", name) for name in ("version", "python", "torch")}
    return {
        "name": "report",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": versions["version"],
        "device": {"name": device, "memory_bytes": sum(metrics.sums("reprise_gpu_memory_bytes").values())},
        "versions": {"reprise": versions.pop("version"), **versions},
        "models": {card["id"]: card["root"] for card in cards},
        "start": {
            **metrics.sums("reprise_start_phase_seconds", "phase"),
            "wait for captures": waited,
            "captures": int(metrics.sums("reprise_graph_captures_total", "outcome").get("captured", 0)),
            "captures left": int(sum(metrics.sums("reprise_graph_captures_left").values())),
        },
        "left_out": left_out,
        "rows": rows,
    }


def _cards(client: ApiClient, model: str) -> list[Row]:
    """The model, or the first chat and the first speech model, by the names that metrics have."""
    served = client.models()
    if model and model not in (names := [card["id"] for card in served]):
        raise ServerError(f"the server has no model {model!r}; it has {', '.join(names)}")
    kinds: dict[str, Row] = {}
    for card in served:
        if card["kind"] in ("chat", "speech") and model in ("", card["id"]):
            kinds.setdefault(card["kind"], next(one for one in served if one["root"] == card["root"]))
    if not kinds:
        raise ServerError("only chat and speech models have reports, and this is neither")
    return list(kinds.values())


def _loads(
    client: ApiClient, card: Row, on_cpu: bool, seconds: float, end: float, left_out: list[str]
) -> Iterator[Row]:
    """A row for each load, which sends for at most `seconds`. left_out: gets those that might not end before `end`."""
    chat = card["kind"] == "chat"
    kind: Any = ChatLoad if chat else SpeechLoad
    streams = CHATS if chat else STREAMS
    shape = (CPU_CHAT if on_cpu else CHAT) if chat else (CPU_SPEECH if on_cpu else SPEECH)
    fields = {"url": client.url, "api_key": client.key, "model": card["id"], "timeout": 4 * seconds, "warmup": 0}
    alone = rate = 0.0
    for at_once in (*streams, *([0] if chat else [])):  # 0: arrivals
        name = f"{at_once} at a time" if at_once else "arrivals at half that rate"
        if time.monotonic() + seconds + at_once * alone > end:
            left_out.append(f"{card['id']}, {name}")
            continue
        typer.echo(f"{card['id']}: {name}", err=True)
        most = streams[at_once] if at_once else max(1, min(max(streams.values()), round(rate / 2 * seconds)))
        requests = max(at_once, most // 8) if on_cpu and at_once else most
        given: Row = {"requests": requests, "seed": secrets.randbelow(SEEDS)}
        given |= {"concurrency": at_once} if at_once else {"rate": rate / 2}
        load: AnyLoad = msgspec.convert(fields | shape | given, kind)
        if not alone:
            warm_up(msgspec.structs.replace(load, warmup=1))
        before = client.metrics()
        (records,) = run_together(Clients(load, min(4, cpus.available()), until=seconds))
        row = {"model": card["id"], "name": name, **summary(load, records)}
        if not row["succeeded"]:
            said = next((record.message for record in records if record.message), "")
            raise ServerError(f"{card['id']}, {name}: no request succeeded. {said}")
        del row["load"]["url"]
        alone, rate = alone or row["duration"]["p50"], row["requests_per_second"]
        yield row | {"steps": list(_steps(before, client.metrics(), card["id"]))}


def _steps(before: ScrapedMetrics, after: ScrapedMetrics, model: str) -> Iterator[Row]:
    """By kind: number, share of replays, mean rows of a replay, and mean time in ms."""

    def more(name: str, **wanted: str) -> dict[str, float]:
        old, new = (found.sums(f"reprise_{name}", "kind", model=model, **wanted) for found in (before, after))
        return {kind: value - old.get(kind, 0.0) for kind, value in new.items()}

    steps, replays, rows = more("steps_total"), more("steps_total", route="replay"), more("replayed_rows_total")
    seconds, timed = more("step_duration_seconds_sum"), more("step_duration_seconds_count")
    for kind, count in timed.items():
        if count and steps.get(kind):
            replayed = replays.get(kind, 0.0)
            each = rows.get(kind, 0.0) / replayed if replayed else None
            share, ms = replayed / steps[kind], 1e3 * seconds[kind] / count
            yield {"step": kind, "number": int(steps[kind]), "replayed": share, "rows": each, "ms": ms}


def _with_rooflines(report: Row, named: Path | None) -> Row:
    """Facts of this machine, which is the server's. Sets `roofline` (ms) in decode steps, or `no_roofline`, the reason.
    named: the checkpoint of all models, if the server was started for it."""
    import torch

    device, commit = report["device"], ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    processor = _in_file(r"model name\s*: (.*)", "/proc/cpuinfo")
    facts: Row = {"processor": f"{processor}, {cpus.available()} processors"}
    if (ROOT / ".git").exists():
        facts["commit"] = subprocess.run(commit, capture_output=True, text=True, check=False).stdout.strip()
    on_cpu = device["name"] == "cpu"
    if not on_cpu:
        device["driver"] = _in_file(r"Module\D*([\d.]+)", "/proc/driver/nvidia/version")
        if not torch.cuda.is_available() or torch.cuda.get_device_name() != device["name"]:
            return facts | {"no_roofline": "the server's GPU is not the first one here"}
    try:
        facts["bytes_per_second"] = rate = _copied_per_second("cpu" if on_cpu else "cuda")
        for name, root in report["models"].items():
            if (directory := named or _directory(root)) is None:
                facts["no_roofline"] = f"{name} is in no cache here; with --model DIRECTORY it is known"
                continue
            needed = _step_bytes(directory, torch.float32 if on_cpu else torch.bfloat16)
            for row in (row for row in report["rows"] if row["model"] == name):
                context = row.get("prompt_tokens_mean", 0.0) + row.get("completion_tokens_mean", 0.0) / 2
                for step in (step for step in row["steps"] if step["step"] == "decode" and step["rows"]):
                    step["roofline"] = 1e3 * needed(step["rows"], context) / rate
    except (RuntimeError, CheckpointError) as error:  # no memory is left, or a snapshot is incomplete
        facts["no_roofline"] = str(error).splitlines()[0]
    return facts


def _step_bytes(directory: Path, dtype: Any) -> Callable[[float, float], float]:
    """Bytes that a decode step of a checkpoint reads, by rows and mean context. The model is built without memory."""
    import torch

    from models.protocol import decode_bytes

    family = family_of(directory)
    with torch.inference_mode():
        model = resolve(family.model)(directory, torch.device("meta"), dtype, "random")
    if family.kind == "speech":
        return lambda rows, context: model.step_weight_bytes(model.solver_steps[0])
    return lambda rows, context: decode_bytes(model.decoder, rows, context, dtype)


def _copied_per_second(device: str) -> float:
    """Bytes read and written by the fastest copies within its memory. RuntimeError if none is left."""
    import torch

    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    copies = 8 if device == "cuda" else 1  # one launch would take a tenth of a copy's time
    fastest, end = 0.0, time.perf_counter() + 1
    while (began := time.perf_counter()) < end:
        for _ in range(copies):
            target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        fastest = max(fastest, 2 * copies * COPY_BYTES / (time.perf_counter() - began))
    return fastest


def _directory(root: str) -> Path | None:
    """A checkpoint on this machine by its name in /v1/models: of an embedded model, or in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(root, "config.json") if root.count("/") == 1 else None
    return embedded().get(root) or (Path(found).parent if isinstance(found, str) else None)


def _in_file(pattern: str, file: str) -> str:
    found = re.search(pattern, Path(file).read_text()) if Path(file).exists() else None
    return found[1] if found else "unknown"


def page_of(report: Mapping[str, Any]) -> str:
    device, versions = report["device"], ", ".join(map(" ".join, report["versions"].items()))
    rate, reason = report.get("bytes_per_second"), report.get("no_roofline")
    speed = f"{rate / 1e9:,.0f} GB/s, of a copy within the memory" if rate else "the speed of the memory"
    gpu = f", {device['memory_bytes'] / 1e9:.0f} GB, driver {device.get('driver', 'unknown')}"
    steps = [{"model": row["model"], "load": row["name"], **step} for row in report["rows"] for step in row["steps"]]
    for step in steps:
        step["replayed"] = f"{step['replayed']:.0%}"
        if "roofline" in step:
            step["x roofline"] = step["ms"] / step["roofline"]
    parts = [
        f"# Reprise on {device['name']}",
        f"- device: {device['name']}{gpu if device['memory_bytes'] else ''}\n"
        f"- processor: {report.get('processor', 'unknown')}\n"
        f"- versions: {versions}, commit {report['commit'][:12]}\n"
        f"- models: {', '.join(report['models'])}\n"
        f"- time: {report['time']}",
        "## Start\n\nSeconds, and numbers of captures.",
        _table([report["start"]]),
        "## Served loads\n\nTimes in ms; first: to the first token or sound; gap: between tokens or pieces of sound.",
        _table(map(_load_row, report["rows"])),
        *([f"Left out for lack of time: {'; '.join(report['left_out'])}."] if report["left_out"] else []),
        "## Steps\n\nMeans in ms from launch, or the end of the step before, to results. Roofline of a decode step: "
        f"its weights, as the checkpoint has them, and cached keys at {speed}.",
        *([f"Without a roofline: {reason}."] if reason else []),
        _table(steps),
        HOW_TO_SEND,
    ]
    return "\n\n".join(parts) + "\n"


def _load_row(row: Row) -> Row:
    shown = {"model": row["model"], "load": row["name"], "requests": row["requests"]}
    shown |= {"without an answer": row["requests"] - row["succeeded"], "requests/s": row["requests_per_second"]}
    rates = {"tokens/s": "tokens_per_second", "audio-s/s": "audio_seconds_per_second"}
    shown |= {name: row.get(key) for name, key in rates.items()}
    shown |= {f"first {name}": 1e3 * row["first"][name] for name in ("p50", "p95")}
    shown |= {f"gap {name}": 1e3 * row["gap"][name] for name in ("p50", "p99") if row["gap"]}
    return shown | {"underruns": row.get("streams_with_underrun")}


def _table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows of cells by heading; numbers are formatted, and what a row has not is empty."""
    rows = list(rows)
    head = list(dict.fromkeys(name for row in rows for name in row))

    def cell(value: Any) -> str:
        return number(value) if isinstance(value, float) else "" if value is None else str(value)

    return markdown(head, ([cell(row.get(name)) for name in head] for row in rows))


def number(value: float) -> str:
    """Three significant digits, whole numbers from a hundred on."""
    if value == 0:
        return "0"
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    digits = 1 if abs(value) >= 9.995 else 2 if abs(value) >= 0.9995 else 3
    return f"{value:.{digits}f}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(head), ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
