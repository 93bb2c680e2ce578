"""Thousands of short requests of every kind, one after the other, which must leave nothing behind.

    python -m benchmarks.churn [--requests 30000] [--clients 8] [-- server flags]

The requests are those of benchmarks/loads/mixed_traffic.py, an equal number of each kind: answers, aborts, uploads of
voices, bad media, connections that are cut. Slots, KV blocks, descriptors, tasks, processes, shared memory and files
must be the same as before; resident memory may grow by GROWTH_RATIO, or must not grow in a further round.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx

from benchmarks.loads.mixed_traffic import Kind, MixedTraffic
from benchmarks.measure.command_line import command_line
from benchmarks.measure.record import table, write
from benchmarks.servers.footprint import Footprint, footprint
from benchmarks.servers.process import Server, serve

WARM_REQUESTS = 1280
"""Number of requests after which pools and caches have reached their final size."""
GROWTH_RATIO = 0.05
"""Growth of a process' resident memory during a round that is allowed."""
GROWTH = "resident bytes"
ROUNDS = 4
"""Number of rounds at most. Memory that grew in one round may be a pool that a thread had not filled yet, and more
processors mean more threads; a leak in each request makes it grow in every round."""
SETTLE_SECONDS = 60.0
PROGRESS = 500
"""Number of requests between two lines of progress."""


async def drive(traffic: MixedTraffic, url: str, requests: int, clients: int) -> None:
    """Sends `requests` requests, of each kind in turn."""
    kinds: Iterator[tuple[int, Kind]] = enumerate(islice(cycle(traffic.kinds), requests))
    began = time.monotonic()

    async def client() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            for number, kind in kinds:
                await traffic.send(kind, http)
                if number % PROGRESS == PROGRESS - 1:
                    print(f"{number + 1} requests, {time.monotonic() - began:.0f} s", flush=True)

    await asyncio.gather(*(client() for _ in range(clients)))


async def settled(server: Server, temporary: Path, before: Footprint | None = None) -> Footprint:
    """The footprint once nothing is in progress and nothing is left over compared with `before`, if given; or the one
    after SETTLE_SECONDS."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        os.kill(server.pid, signal.SIGUSR1)  # benchmarks/servers/trimmed.py
        await asyncio.sleep(1.5)  # longer than between two heartbeats, by which gauges are set
        now = await asyncio.to_thread(footprint, server.pid, server.url, temporary)
        if not (now.busy if before is None else now.left_over(before)) or time.monotonic() > deadline:
            return now


def faults(before: Footprint, after: Footprint) -> list[str]:
    """What did not return to its former value. Both footprints are of an idle server."""
    found = after.left_over(before)
    for role, held in before.resident_bytes.items():
        now = after.resident_bytes.get(role, 0)
        if now > held * (1 + GROWTH_RATIO):
            found.append(f"{GROWTH} of {role}: {held} -> {now}")
    return found


async def run(server: Server, temporary: Path, requests: int, clients: int) -> dict[str, Any]:
    """The result of a churn: rows by kind, both footprints, faults."""
    warm = min(WARM_REQUESTS, requests)
    await drive(MixedTraffic(server, 1), server.url, warm, clients)
    await asyncio.to_thread(server.wait_for_captures)
    before = start = await settled(server, temporary)
    problems: list[str] = []
    for seed in range(2, 2 + ROUNDS):
        traffic = MixedTraffic(server, seed)
        began = time.monotonic()
        await drive(traffic, server.url, requests, clients)
        seconds = time.monotonic() - began
        after = await settled(server, temporary, before)
        problems += traffic.problems
        found = faults(replace(before, resident_bytes=start.resident_bytes), after)
        if not any(fault.startswith(GROWTH) for fault in found):
            break
        start = after
    restarts = server.metric("reprise_engine_restarts_total")
    found += [f"request: {problem}" for problem in problems]
    return {
        "rows": traffic.rows(),
        "requests": requests,
        "clients": clients,
        "rounds": seed - 1,
        "seconds": round(seconds, 1),
        "faults": [*found, *([f"the engine was restarted {restarts:g} times"] if restarts else [])],
        "before": before.facts(),
        "before_last_round": start.facts(),
        "after": after.facts(),
    }


def churn(requests: int, clients: int, flags: Sequence[str] = ()) -> dict[str, Any]:
    """`run` on a new server with the embedded models."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        temporary = folder / "tmp"
        temporary.mkdir()
        flags = [*flags, "--voices-dir", str(folder / "voices")]
        program = ("benchmarks.servers.trimmed", "serve")
        server = stack.enter_context(serve(*flags, environment={"TMPDIR": str(temporary)}, program=program))
        return asyncio.run(run(server, temporary, requests, clients))


def main() -> int:
    parser = command_line("benchmarks.churn", __doc__)
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("flags", nargs="*", help="of the server, after --")
    arguments = parser.parse_args()
    result = churn(arguments.requests, arguments.clients, arguments.flags)
    rows = result.pop("rows")
    print(write("churn_cpu", rows, flags=arguments.flags, **result))
    print(table([{key: str(value) for key, value in row.items()} for row in rows]))
    print("\n".join(result["faults"]) or "nothing is left over")
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
