"""Runs a load in client processes and summarises their measurements."""

from __future__ import annotations

import asyncio
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from service.cli.bench.client import READY
from service.cli.bench.traffic import AnyLoad, Assignment, ChatLoad, Record
from service.system.children import python_command, python_environment

CLIENT = python_command("service.cli.bench.client")
LEAD_SECONDS = 0.6
"""Seconds of head start, in which every client is told the start time and opens its connections."""
LONGEST_LINE = 1 << 26
"""Bytes of a record, which has the gaps of its whole answer."""
_REASONS = 5
QUANTILES = (10, 25, 50, 75, 90, 95, 99)

Report = Callable[[Record], None]


class BenchError(Exception):
    """A client process failed; its error is on standard error."""


@dataclass(frozen=True)
class Clients:
    """A load and the number of processes for it. A closed loop begins `after` seconds later than the other loads, and
    sends nothing from `until` seconds on after their beginning (0: until its requests are used up)."""

    load: AnyLoad
    processes: int = 1
    after: float = 0.0
    until: float = 0.0


def run_load(load: AnyLoad, *, processes: int = 1, report: Report = lambda record: None) -> list[Record]:
    """Every process prepares its requests, then all begin together. report: called with each measured record as it
    arrives. Raises BenchError.
    """
    (records,) = run_together(Clients(load, processes), report=report)
    return records


def run_together(*clients: Clients, report: Report = lambda record: None) -> list[list[Record]]:
    """Several loads at the same time; the records of each. Raises BenchError."""
    for each in clients:
        warm_up(each.load)
    shares = [_assignments(each) for each in clients]
    records = iter(asyncio.run(_run([assignment for share in shares for assignment in share], report)))
    by_load = ((record for _ in share for record in next(records)) for share in shares)
    return [sorted(each, key=lambda record: record.start) for each in by_load]


def warm_up(load: AnyLoad) -> None:
    if load.warmup:
        warm = msgspec.structs.replace(load, requests=load.warmup, concurrency=1, rate=0.0, warmup=0)
        asyncio.run(_run([Assignment(warm, load.seed + 1_000_003, 1, load.warmup)], lambda record: None))


def _assignments(clients: Clients) -> list[Assignment]:
    """One for each process. In a closed loop a process has requests for each of its lanes: with the same number of
    requests, those with fewer lanes would end last, and alone."""
    load = clients.load
    processes = max(1, min(clients.processes, load.requests, load.concurrency or load.requests))
    arrivals: list[float] = []
    if load.rate:  # seconds after the beginning, of a Poisson process
        arrivals = np.random.default_rng(load.seed).exponential(1 / load.rate, load.requests).cumsum().tolist()
    assignments = []
    for index in range(processes):
        offsets = tuple(arrivals[index::processes])
        lanes = range(index, load.concurrency, processes)
        count = len(offsets) if load.rate else sum(len(range(lane, load.requests, load.concurrency)) for lane in lanes)
        seed = load.seed * 1009 + index
        assignments.append(Assignment(load, seed, len(lanes), count, offsets, clients.after, clients.until))
    return assignments


async def _run(assignments: Sequence[Assignment], report: Report) -> list[list[Record]]:
    """Runs each share in its own process, all from the same moment on; returns the records of each. A failure ends the
    others."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(_client()) for _ in assignments]
        for client, assignment in zip(clients, assignments, strict=True):
            _tell(client, msgspec.json.encode(assignment))
        await asyncio.gather(*map(_ready, clients))
        begin = time.time() + LEAD_SECONDS
        for client in clients:
            _tell(client, str(begin).encode())
        return await asyncio.gather(*(_records(client, report) for client in clients))


@asynccontextmanager
async def _client() -> AsyncIterator[Process]:
    """A client process (service/cli/bench/client.py), killed at the end of the context if it has not ended."""
    # In its own process group: Ctrl-C in a terminal goes to this process, which kills the client without noise.
    client = await asyncio.create_subprocess_exec(
        *CLIENT, env=python_environment(), stdin=PIPE, stdout=PIPE, limit=LONGEST_LINE, process_group=0
    )
    try:
        yield client
    finally:
        with suppress(ProcessLookupError):
            client.kill()
        await client.wait()


def _tell(client: Process, line: bytes) -> None:
    assert client.stdin is not None
    client.stdin.write(line + b"\n")


async def _ready(client: Process) -> None:
    assert client.stdout is not None
    if not (line := await client.stdout.readline()):
        raise BenchError(f"a load client ended with status {await client.wait()}")
    assert line == READY, line


async def _records(client: Process, report: Report) -> list[Record]:
    """Records until the end of the process, each reported as it arrives."""
    assert client.stdout is not None
    records = []
    async for line in client.stdout:
        records.append(msgspec.json.decode(line, type=Record))
        report(records[-1])
    if status := await client.wait():
        raise BenchError(f"a load client ended with status {status}")
    return records


def summary(load: AnyLoad, records: list[Record]) -> dict[str, Any]:
    """Counts, rates and quantiles (seconds) over the successful requests, plus every kind of failure. failures: number
    of requests by reason, where there are any."""
    good = [record for record in records if not record.error]
    result: dict[str, Any] = {
        "load": msgspec.to_builtins(msgspec.structs.replace(load, api_key=None)),
        "requests": len(records),
        "succeeded": len(good),
        "refused": sum(record.error == "refused" for record in records),
        "failed": sum(record.error == "failed" for record in records),
    }
    if reasons := Counter(record.message for record in records if record.error == "failed"):
        result["failures"] = dict(reasons.most_common(_REASONS))
    if not good:
        return result
    wall = max(r.start + r.duration for r in good) - min(r.start for r in good)
    result |= {
        "wall_seconds": wall,
        "requests_per_second": len(good) / wall,
        "first": _quantiles([r.first for r in good]),
        "duration": _quantiles([r.duration for r in good]),
        "gap": _quantiles([gap for r in good for gap in r.gaps]),
        "cached_tokens": sum(r.cached_tokens for r in good),
    }
    if load.rate:
        result["delay"] = _quantiles([r.delay for r in good if r.turn == 1])
    if any(r.tokens for r in good):
        result["tokens_per_second"] = sum(r.tokens for r in good) / wall
        result["prompt_tokens_mean"] = float(np.mean([r.prompt_tokens for r in good]))
        result["completion_tokens_mean"] = float(np.mean([r.tokens for r in good]))
    if isinstance(load, ChatLoad) and load.turns > 1:
        turns = range(1, load.turns + 1)
        result["first_by_turn"] = {str(turn): _quantiles([r.first for r in good if r.turn == turn]) for turn in turns}
        result["first_later"] = _quantiles([r.first for r in good if r.turn > 1])
    if any(r.audio for r in good):
        result["audio_seconds"] = sum(r.audio for r in good)
        result["audio_seconds_per_second"] = result["audio_seconds"] / wall
        result["realtime_factor"] = _quantiles([r.duration / r.audio for r in good if r.audio])
        result["streams_with_underrun"] = sum(r.underrun > 0 for r in good)
        result["underrun_seconds"] = sum(r.underrun for r in good)
    return result


def _quantiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    found = zip(QUANTILES, np.quantile(values, [level / 100 for level in QUANTILES]), strict=True)
    quantiles = {f"p{level}": float(value) for level, value in found}
    return {"mean": float(np.mean(values)), **quantiles, "max": float(np.max(values))}
