"""An open loop at several times the capacity of a chat server: how much of its rate remains, and how fast it refuses
the rest.

    python -m benchmarks.overload embedded                 # the model of the package, on a CPU or a GPU
    python -m benchmarks.overload qwen2_vl_2b              # full size, random weights
    python -m benchmarks.overload ... [--factor 3] [--seconds 60] [--limit 10] [-- server flags]

A closed loop measures the capacity: answers a second. Then requests arrive as a Poisson process at --factor times that.
An answer is good when it was complete and its first token came within --limit seconds; the server refuses what would
wait longer (`--queue-timeout` below the limit) and what its queues cannot hold. Good answers per second are counted
from the time when the queue is first full to the last arrival, so that neither filling nor emptying the queue counts.
The time of a refusal is measured twice: in the API process, from its access log, and at the client, which shares the
processors with the server. `load_average_before` shows what else the machine did.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checkpoints.served import served_directory
from benchmarks.measure.record import Row, write
from benchmarks.servers.process import Server, random_weights, serve
from service.cli.bench.run import run_load, summary
from service.cli.bench.spec import ChatLoad, Record

EMBEDDED = "embedded"
GOODPUT_SHARE = 0.95
REFUSAL_SERVER_SECONDS = 0.005
REFUSAL_CLIENT_SECONDS = 0.05
QUEUE_SHARE = 0.8
"""Share of the limit that a request may wait in the queue; the rest is for its prefill."""
SHAPES: dict[str, dict[str, Any]] = {
    EMBEDDED: {"width": 56, "height": 56, "text_characters": 32, "output_tokens": 16},
    "": {"width": 448, "height": 448, "text_words": 128, "system_tokens": 500, "output_tokens": 128},
}
"""Sizes of a request, for the embedded model and for all others."""


def capacity(server: Server, shape: dict[str, Any], arguments: argparse.Namespace) -> float:
    """Answers a second in a closed loop of as many streams as the server runs at a time."""
    load = ChatLoad(
        url=server.url,
        model=server.models()[0],
        seed=1,
        concurrency=arguments.streams,
        requests=arguments.streams * arguments.rounds,
        **shape,
    )
    result = summary(load, run_load(load, processes=arguments.processes))
    if result["succeeded"] < result["requests"]:
        raise RuntimeError(f"{result['requests'] - result['succeeded']} requests of the closed loop failed")
    return float(result["requests_per_second"])


def overload(server: Server, shape: dict[str, Any], rate: float, arguments: argparse.Namespace) -> list[Record]:
    load = ChatLoad(
        url=server.url,
        model=server.models()[0],
        seed=2,
        rate=rate,
        requests=max(1, round(rate * arguments.seconds)),
        **shape,
    )
    return run_load(load, processes=arguments.processes)


def row_of(records: Sequence[Record], limit: float, capacity: float) -> Row:
    """The clients' measurements. Good answers count if they ended between `limit` seconds after the first arrival and
    the last arrival."""
    begin, end = min(r.start for r in records), max(r.start for r in records)
    begin += min(limit, (end - begin) / 2)
    answered = [r for r in records if not r.error]
    good = [r for r in answered if r.first <= limit]
    counted = [r for r in good if begin <= r.start + r.duration <= end]
    goodput = len(counted) / (end - begin) if end > begin else 0.0
    return {
        "capacity_per_s": capacity,
        "offered_per_s": len(records) / max(end - min(r.start for r in records), 1e-9),
        "goodput_per_s": goodput,
        "goodput_share": goodput / capacity,
        "requests": len(records),
        "good": len(good),
        "late": len(answered) - len(good),
        "refused": sum(r.error == "refused" for r in records),
        "failed": sum(r.error == "failed" for r in records),
        **quantiles("first", [r.first for r in answered]),
        **quantiles("refusal_client", at_once(records)),
        **quantiles("send_delay", [r.delay for r in records]),
    }


def at_once(records: Iterable[Record]) -> list[float]:
    """Seconds of the refusals that were not made after a wait in the queue."""
    return [r.duration for r in records if r.error == "refused" and "timed out" not in r.message]


def refusals_logged(log: Path, waited: float) -> list[float]:
    """Seconds of the same in the API process, from its access log. waited: those of a request that timed out."""
    entries = (json.loads(line) for line in log.read_text().splitlines() if line.startswith("{"))
    seconds = (entry["ms"] / 1e3 for entry in entries if entry.get("outcome") == "overloaded")
    return [taken for taken in seconds if taken < waited]


def quantiles(name: str, seconds: Sequence[float]) -> Row:
    if not seconds:
        return {}
    p50, p99 = np.quantile(seconds, (0.5, 0.99))
    return {f"{name}_p50_ms": 1e3 * float(p50), f"{name}_p99_ms": 1e3 * float(p99)}


def missed(row: Row) -> list[str]:
    """Targets that a row misses."""
    found = [f"{row['failed']} requests failed"] if row["failed"] else []
    if row["goodput_share"] < GOODPUT_SHARE:
        found.append(f"goodput is {row['goodput_share']:.0%} of the capacity")
    for name, limit in (("server", REFUSAL_SERVER_SECONDS), ("client", REFUSAL_CLIENT_SECONDS)):
        if (p99 := row.get(f"refusal_{name}_p99_ms", 0.0)) > 1e3 * limit:
            found.append(f"p99 of a refusal is {p99:.1f} ms ({name}), {1e3 * limit:g} wanted")
    return found


def measure(server: Server, shape: dict[str, Any], arguments: argparse.Namespace) -> Row:
    most = capacity(server, shape, arguments)
    records = overload(server, shape, arguments.factor * most, arguments)
    reasons = server.samples("reprise_admission_rejections_total", "reason")
    return row_of(records, arguments.limit, most) | {"reasons": {name: n for name, n in reasons.items() if n}}


@contextmanager
def started(model: str, limit: float, flags: Sequence[str]) -> Iterator[Server]:
    settings = ("--queue-timeout", str(QUEUE_SHARE * limit), "--log-format", "json", *flags)
    with tempfile.TemporaryDirectory() as folder:
        weights = () if model == EMBEDDED else random_weights([served_directory(model, Path(folder))])
        with serve(*weights, *settings) as server:
            server.wait_until_idle()
            yield server


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overload", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help=f"{EMBEDDED}, or a name of benchmarks/checkpoints/published.py")
    parser.add_argument("--factor", type=float, default=3.0, help="arrivals by capacity")
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds to the first token of a good answer")
    parser.add_argument("--streams", type=int, default=64, help="of the closed loop that measures the capacity")
    parser.add_argument("--rounds", type=int, default=6, help="requests of each of them")
    parser.add_argument("--processes", type=int, default=min(6, os.cpu_count() or 1), help="of clients")
    given = list(sys.argv[1:] if words is None else words)
    own = given.index("--") if "--" in given else len(given)
    arguments = parser.parse_args(given[:own])
    arguments.flags = given[own + 1 :]
    shape = SHAPES.get(arguments.model, SHAPES[""])
    before = os.getloadavg()[0]
    with started(arguments.model, arguments.limit, arguments.flags) as server:
        row = measure(server, shape, arguments)
        row |= quantiles("refusal_server", refusals_logged(server.log, QUEUE_SHARE * arguments.limit))
        facts = server.facts()
    options = {name: value for name, value in vars(arguments).items() if name != "model"}
    name = f"overload_{arguments.model}"
    print(write(name, [row], model=arguments.model, shape=shape, load_average_before=before, **options, server=facts))
    print(json.dumps(row, indent=1))
    problems = missed(row)
    print("\n".join(problems) or "all targets are met")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
