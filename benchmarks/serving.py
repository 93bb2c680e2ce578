"""A chat server under the loads that it is made for, through HTTP; ours, or any other with OpenAI's API.

    python -m benchmarks.serving closed|template|conversations|arrivals|long|all [MODEL] [--tiny]
    python -m benchmarks.serving closed,template ...                # several against one server
    python -m benchmarks.serving ... --engine vllm                  # `vllm serve` of this environment
    python -m benchmarks.serving ... --engine NAME --url URL        # a server that runs already
    python -m benchmarks.serving directory PATH [MODEL]             # what to start such a server on, and no load

Full size and random weights, a vocabulary and a tokenizer of published size; --tiny takes a miniature of both. Ordinary
words, a new picture for every request or conversation, one system prompt for all, but for `template`. Every engine gets
the same directory and, seed by seed, the same requests.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.checkpoints.published import SIZES
from benchmarks.checkpoints.served import TINY_MODEL, served_directory
from benchmarks.loads.rows import row_of
from benchmarks.measure.command_line import command_line
from benchmarks.measure.record import Row, record, version_of
from benchmarks.servers.footprint import children, processor_seconds
from benchmarks.servers.process import Server, random_weights, serve
from benchmarks.servers.step_metrics import busy_shares, longest, prefill_routes, reached, read
from service.cli.bench.run import Clients, run_load, run_together, warm_up
from service.cli.bench.traffic import ChatLoad, Record


@dataclass(frozen=True)
class Scale:
    """closed: streams to requests. conversations: how many at once to how many in all. rates: conversations of one turn
    a second, each for `seconds`. long: tokens of a prompt to how often, after `lead` seconds beside `streams`, which
    write `stream_tokens` each. side: of a picture, in pixels."""

    closed: Mapping[int, int]
    conversations: Mapping[int, int]
    rates: tuple[float, ...]
    seconds: float
    long: Mapping[int, int]
    lead: float
    streams: int
    stream_tokens: int
    side: int
    words: int
    system_tokens: int
    tokens: int
    turns: int
    processes: int


FULL = Scale(
    closed={1: 40, 8: 160, 32: 512, 64: 1024, 128: 1536},
    conversations={8: 64, 32: 192},
    rates=(8.0, 24.0, 40.0),
    seconds=60.0,
    long={8_000: 8, 30_000: 4},
    lead=4.0,
    streams=32,
    stream_tokens=4_096,
    side=448,
    words=128,
    system_tokens=500,
    tokens=128,
    turns=4,
    processes=6,
)
TINY = Scale(
    closed={1: 2, 2: 4},
    conversations={2: 2},
    rates=(4.0,),
    seconds=1.0,
    long={400: 2},
    lead=0.5,
    streams=2,
    stream_tokens=600,
    side=56,
    words=8,
    system_tokens=40,
    tokens=8,
    turns=4,
    processes=2,
)


def closed(server: Server, model: str, scale: Scale) -> Iterator[Row]:
    """A constant number of open requests."""
    yield from _held(server, model, scale, 1_000)


def template(server: Server, model: str, scale: Scale) -> Iterator[Row]:
    """The same without a system message: the model's chat template puts its own."""
    yield from _held(server, model, scale, 6_000, system_tokens=0, system_message=False)


def _held(server: Server, model: str, scale: Scale, seed: int, **shape: Any) -> Iterator[Row]:
    for streams, requests in scale.closed.items():
        load = _load(server, model, scale, seed=seed + streams, concurrency=streams, requests=requests, **shape)
        yield {"streams": streams, **_measured(server, load, scale)}


def conversations(server: Server, model: str, scale: Scale) -> Iterator[Row]:
    """A constant number of open conversations, each about one picture."""
    for at_once, count in scale.conversations.items():
        load = _load(server, model, scale, seed=2_000 + at_once, concurrency=at_once, requests=count, turns=scale.turns)
        yield {"conversations": at_once, **_measured(server, load, scale)}


def arrivals(server: Server, model: str, scale: Scale) -> Iterator[Row]:
    """Poisson arrivals."""
    for rate in scale.rates:
        requests = max(1, round(rate * scale.seconds))
        load = _load(server, model, scale, seed=3_000 + round(10 * rate), rate=rate, requests=requests)
        yield {"rate": rate, **_measured(server, load, scale)}


def long(server: Server, model: str, scale: Scale) -> Iterator[Row]:
    """Prompts of many tokens, one after the other, while streams decode."""
    for place, (tokens, count) in enumerate(scale.long.items()):
        streams = _load(
            server,
            model,
            scale,
            seed=4_000 + place,
            concurrency=scale.streams,
            requests=scale.streams,
            output_tokens=scale.stream_tokens,
            images=0,
        )
        prompts = _load(
            server,
            model,
            scale,
            seed=5_000 + place,
            concurrency=1,
            requests=count,
            output_tokens=1,
            images=0,
            text_words=max(1, tokens - scale.system_tokens),
        )
        before = read(server)
        decoding, prefilled = run_together(Clients(streams, scale.processes), Clients(prompts, after=scale.lead))
        after = read(server)
        yield {
            "long_tokens": tokens,
            "streams": scale.streams,
            **beside(decoding, prefilled),
            **prefill_routes(before, after),
            **longest(before, after),
        }


def _load(server: Server, model: str, scale: Scale, **fields: Any) -> ChatLoad:
    shape: dict[str, Any] = {
        "width": scale.side,
        "height": scale.side,
        "text_words": scale.words,
        "system_tokens": scale.system_tokens,
        "output_tokens": scale.tokens,
    }
    return ChatLoad(url=server.url, model=model, **(shape | fields))


def _measured(server: Server, load: ChatLoad, scale: Scale) -> Row:
    before = read(server)
    warm_up(load)
    spent, begun = processor_seconds(server.pid) if server.pid else {}, read(server)
    began = time.monotonic()
    found = row_of(load, run_load(msgspec.structs.replace(load, warmup=0), processes=scale.processes))
    seconds = time.monotonic() - began
    ended = read(server)
    row: Row = {**found, **prefill_routes(before, ended), **longest(begun, ended)}
    if found["succeeded"]:
        row |= busy_shares(begun, ended, found["seconds"])
    if found["succeeded"] and load.concurrency:
        tokens, rate = found["completion_tokens"], found["tokens_per_s"]
        row |= reached(begun, ended, load.concurrency, found["succeeded"], tokens, rate)
    if spent:
        # The time of the whole call, in which the clients also prepare their requests, so the rate is rather too low.
        now = processor_seconds(server.pid)
        row |= {f"{role}_cores": (now[role] - spent.get(role, 0.0)) / seconds for role in now}
    return row


def beside(streams: Sequence[Record], prompts: Sequence[Record]) -> Row:
    """How streams and long prompts affected each other while all streams were writing: from the first token of the last
    stream to the end of the first one. Prompts outside are counted, and left out.

    rate_kept: events a second during the prompts by those a second before the first of them.
    """
    row: Row = {
        "requests": len(streams) + len(prompts),
        "succeeded": sum(not record.error for record in (*streams, *prompts)),
        "refused": sum(record.error == "refused" for record in (*streams, *prompts)),
        "failed": sum(record.error == "failed" for record in (*streams, *prompts)),
        "long_prompts": 0,
    }
    events = [r.start + r.first + np.cumsum([0.0, *r.gaps]) for r in streams if not r.error]
    if not events or not all(len(times) > 1 for times in events):
        return row
    begin, end = max(times[0] for times in events), min(times[-1] for times in events)
    good = [r for r in prompts if not r.error and r.start > begin and r.start + r.first < end]
    if not good:
        return row
    windows = [(r.start, r.start + r.first) for r in good]
    alone = (begin, windows[0][0])
    rate = _events_within(events, [alone]) / (alone[1] - alone[0])
    kept = _events_within(events, windows) / sum(last - first for first, last in windows)
    first = [1e3 * r.first for r in good]
    row |= {
        "long_prompts": len(good),
        "prompt_tokens": float(np.mean([r.prompt_tokens for r in good])),
        "first_p50_ms": float(np.median(first)),
        "first_max_ms": max(first),
        "rate_kept": kept / rate if rate else 0.0,
    }
    before = [times[(times >= begin) & (times < windows[0][0])] for times in events]
    for name, gaps in (("gap", _gaps_across(events, windows)), ("alone_gap", _gaps_across(before, [alone]))):
        if gaps:
            row |= {f"{name}_p50_ms": float(np.median(gaps)), f"{name}_p99_ms": float(np.quantile(gaps, 0.99))}
            row[f"{name}_max_ms"] = max(gaps)
    return row


Span = tuple[float, float]


def _events_within(events: Sequence[np.ndarray], spans: Sequence[Span]) -> int:
    return sum(int(((times >= first) & (times < last)).sum()) for times in events for first, last in spans)


def _gaps_across(events: Sequence[np.ndarray], spans: Sequence[Span]) -> list[float]:
    """Milliseconds of each gap of a stream that overlaps a span."""
    return [
        1e3 * float(until - since)
        for times in events
        for since, until in pairwise(times)
        if any(since < last and until > first for first, last in spans)
    ]


RUNS: dict[str, Callable[[Server, str, Scale], Iterator[Row]]] = {
    "closed": closed,
    "template": template,
    "conversations": conversations,
    "arrivals": arrivals,
    "long": long,
}
SETTINGS = ("--max-in-flight", "1024", "--max-waiting", "1024", "--max-running", "128")
CONTEXT = "32768"
"""Tokens of a sequence that vLLM makes room for: a long prompt, or a stream beside it."""


@contextmanager
def started(engine: str, url: str, directory: Path) -> Iterator[Server]:
    """The server under load, its model named after the directory."""
    if url:
        yield Server(url.rstrip("/"), 0.0, Path(), 0)
    elif engine == "vllm":
        flags = [str(directory), "--load-format", "dummy", "--served-model-name", directory.name]
        program = ("vllm.entrypoints.cli.main", "serve")
        with serve(*flags, "--max-model-len", CONTEXT, program=program, ready="/health") as server:
            yield server
    else:
        with serve(*random_weights([directory]), *SETTINGS) as server:
            server.wait_until_idle()
            yield server


def api_processes(pid: int) -> int:
    """Number of API processes of a server of ours: its own process is the only one, or has started them."""
    commands = (Path(f"/proc/{child}/cmdline").read_bytes() for child in children(pid))
    return max(1, sum(b"service.processes.api_process" in command for command in commands))


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """kinds: of load; none where `directory` is the path of a checkpoint for another server."""
    parser = command_line("benchmarks.serving", __doc__)
    parser.add_argument("kind", help=f"{', '.join(RUNS)}, several with commas between them, all, or directory")
    parser.add_argument("arguments", nargs="*", metavar="MODEL", help="directory: PATH [MODEL]")
    parser.add_argument("--engine", default="reprise", help="reprise, vllm, or a name for the server at --url")
    parser.add_argument("--url", default="", help="of a server that runs already, without /v1")
    parser.add_argument("--tiny", action="store_true", help="a miniature and few requests, to try the script")
    given = parser.parse_args(words)
    arguments: list[str] = given.arguments
    given.directory = Path(arguments.pop(0)) if given.kind == "directory" and arguments else None
    given.model = TINY_MODEL if given.tiny else (arguments or ["qwen2_vl_2b"])[0]
    known = [name for name, (source, _, _) in SIZES.items() if source.startswith("qwen") and "asr" not in source]
    if given.model not in (*known, TINY_MODEL) or len(arguments) > 1:
        parser.error(f"one model of {', '.join(known)}")
    if given.engine not in ("reprise", "vllm") and not given.url:
        parser.error(f"--engine {given.engine} needs --url")
    if given.kind == "directory" and given.directory is None:
        parser.error("directory needs a path")
    given.kinds = list(RUNS) if given.kind == "all" else [] if given.kind == "directory" else given.kind.split(",")
    if unknown := [kind for kind in given.kinds if kind not in RUNS]:
        parser.error(f"unknown load {unknown[0]!r}; known are {', '.join(RUNS)}")
    return given


def run(given: argparse.Namespace) -> Path:
    """Measures each kind of load; returns the file of the last result. Each row has the facts beside it that our own
    server reports at that time."""
    ours = given.engine == "reprise"
    ours_started, ending = ours and not given.url, "" if ours else f"_{given.engine}"
    facts: dict[str, Any] = {
        "model": given.model,
        "engine": given.engine,
        "engine_version": None if ours else version_of(given.engine),
        "flags": list(SETTINGS) if ours_started else [],
    }
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) if given.url else served_directory(given.model, Path(folder))
        with started(given.engine, given.url, directory) as server:
            facts["api_processes"] = api_processes(server.pid) if ours_started else None
            for kind in given.kinds:
                rows = RUNS[kind](server, server.models()[0], TINY if given.tiny else FULL)
                measured = ((row, server.facts() if ours else {}) for row in rows)
                path = record(f"serving_{kind}_{'tiny' if given.tiny else given.model}{ending}", measured, **facts)
    return path


def main(words: Sequence[str] | None = None) -> Path:
    given = parse(words)
    if given.directory is None:
        return run(given)
    given.directory.mkdir(parents=True, exist_ok=True)
    print(served_directory(given.model, given.directory))
    return Path(given.directory)


if __name__ == "__main__":
    main()
