"""A mixed load for minutes, after which memory, descriptors, threads and gauges must return to their former values.

    python -m benchmarks.soak --minutes 15 [--clients 3] [--pause 0.5] [--checkpoint NAME ...] [-- server flags]

The requests are those of benchmarks/loads/mixed_traffic.py. Without --checkpoint the models of the package are served.
SIGTERM to this process ends the load early; the result says after how many minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import httpx
import torch

from benchmarks.checkpoints.published import make
from benchmarks.loads.mixed_traffic import MixedTraffic
from benchmarks.measure.record import table, write
from benchmarks.servers.footprint import Footprint, footprint
from benchmarks.servers.process import Server, random_weights, serve

WARM_UP = 45.0
"""Seconds after which pools, caches and decoders have reached their final size."""
SAMPLE_SECONDS = 5.0
SAMPLES_A_LINE = 12
"""Samples for each line of progress."""
SETTLE_SECONDS = 30.0
GROWTH_RATIO = 0.10
"""Allowed growth of resident memory and of threads, from the first to the last third of the run. The server's thread
pools are bounded, but take one more thread when they are busier than ever before: with 16 CPUs the last few of 60 come
after minutes. A leak of a thread for a kind of request would be far larger."""
GROWTH_BYTES = 48 << 20
"""Bytes by which resident memory may grow in addition."""


class Soak:
    """Clients that send requests of random kinds until their time is over."""

    def __init__(self, server: Server, pause: float, seed: int) -> None:
        self.traffic = MixedTraffic(server, seed)
        self.ended = asyncio.Event()
        """Set by a signal, to end the load early."""
        self._url = server.url
        self._pause = pause

    async def client(self, until: float) -> None:
        traffic = self.traffic
        async with httpx.AsyncClient(base_url=self._url, timeout=120) as http:
            while time.monotonic() < until and not self.ended.is_set():
                await traffic.send(traffic.random.choice(traffic.kinds), http)
                await asyncio.sleep(traffic.random.expovariate(1 / self._pause))


async def drive(soak: Soak, server: Server, temporary: Path, minutes: float, clients: int) -> list[Footprint]:
    """Footprints from the end of the warm-up to the end of the load."""
    began = time.monotonic()
    until = began + max(60 * minutes, WARM_UP + 4 * SAMPLE_SECONDS)
    samples: list[Footprint] = []

    async def watch() -> None:
        await asyncio.sleep(WARM_UP)
        while True:
            samples.append(await asyncio.to_thread(footprint, server.pid, server.url, temporary))
            if len(samples) % SAMPLES_A_LINE == 1:
                minutes, requests = (time.monotonic() - began) / 60, sum(map(len, soak.traffic.seconds.values()))
                print(f"{minutes:.1f} min: {requests} requests, {len(soak.traffic.problems)} problems", flush=True)
            await asyncio.sleep(SAMPLE_SECONDS)

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(soak.client(until) for _ in range(clients)))
    watcher.cancel()
    return samples


async def wait_until_idle(server: Server, temporary: Path, seconds: float) -> Footprint:
    """The footprint when no gauge shows work any more, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        await asyncio.sleep(1.5)
        now = await asyncio.to_thread(footprint, server.pid, server.url, temporary)
        if not now.busy or time.monotonic() > deadline:
            return now


def thirds(samples: Sequence[Footprint], kind: Literal["resident_bytes", "threads"]) -> dict[str, list[float]]:
    """Medians of the run's thirds, by role."""
    edges = [len(samples) * part // 3 for part in range(4)]
    parts = [samples[begin : max(begin + 1, end)] for begin, end in pairwise(edges)]
    roles = sorted({role for sample in samples for role in getattr(sample, kind)})
    return {
        role: [statistics.median(getattr(sample, kind).get(role, 0) for sample in part) for part in parts]
        for role in roles
    }


def faults(before: Footprint, samples: Sequence[Footprint], after: Footprint) -> list[str]:
    """What did not return to its former value, or grew all the time. before: idle after a warm-up. after: idle at the
    end."""
    found = after.left_over(before)
    for role, (early, _, late) in thirds(samples, "threads").items():
        if late > early * (1 + GROWTH_RATIO):
            found.append(f"threads of {role}: {early:g} -> {late:g}")
    for role, (early, _, late) in thirds(samples, "resident_bytes").items():
        if late > early * (1 + GROWTH_RATIO) + GROWTH_BYTES:
            found.append(f"resident bytes of {role}: {early:.0f} -> {late:.0f}")
    return found


async def run(server: Server, temporary: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    warm = Soak(server, arguments.pause / 2, seed=1)
    await drive(warm, server, temporary, 0, arguments.clients)
    before = await wait_until_idle(server, temporary, SETTLE_SECONDS)
    soak = Soak(server, arguments.pause, seed=2)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, soak.ended.set)
    began = time.monotonic()
    samples = await drive(soak, server, temporary, arguments.minutes, arguments.clients)
    minutes = (time.monotonic() - began) / 60
    after = await wait_until_idle(server, temporary, SETTLE_SECONDS)
    return {
        "rows": soak.traffic.rows(),
        "minutes": round(minutes, 2),
        "faults": [*faults(before, samples, after), *(f"request: {problem}" for problem in soak.traffic.problems)],
        "underruns": soak.traffic.underruns,
        "restarts": server.metric("reprise_engine_restarts_total"),
        "before": before.facts(),
        "after": after.facts(),
        "threads_in_thirds": thirds(samples, "threads"),
        "peak_resident_bytes": {
            role: max(sample.resident_bytes.get(role, 0) for sample in samples) for role in after.resident_bytes
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.5, help="mean seconds between a client's requests")
    parser.add_argument(
        "--checkpoint", action="append", default=[], help="a name of benchmarks/checkpoints/published.py"
    )
    parser.add_argument("flags", nargs="*", help="of the server, after --")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        temporary = folder / "tmp"
        temporary.mkdir()
        flags = [*arguments.flags, "--voices-dir", str(folder / "voices")]
        if arguments.checkpoint:
            flags += random_weights([make(name, folder / "models") for name in arguments.checkpoint])
        server = stack.enter_context(serve(*flags, environment={"TMPDIR": str(temporary)}))
        result = asyncio.run(run(server, temporary, arguments))
    rows = result.pop("rows")
    facts = {"clients": arguments.clients, "pause": arguments.pause, **result}
    device = "gpu" if torch.cuda.is_available() else "cpu"
    print(write(f"soak_{device}", rows, flags=arguments.flags, checkpoints=arguments.checkpoint, **facts))
    print(table([{key: str(value) for key, value in row.items()} for row in rows]))
    print("\n".join(facts["faults"]) or "nothing is left over")
    return 1 if facts["faults"] or facts["restarts"] else 0


if __name__ == "__main__":
    sys.exit(main())
