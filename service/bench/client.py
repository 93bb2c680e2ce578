"""A client process: reads an Assignment from standard input, writes its Records to standard output, a line of JSON each
as soon as its request has ended."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

import httpx
import msgspec
import numpy as np

from service.bench.spec import Assignment, Record
from service.bench.traffic import payload, send


async def run(assignment: Assignment, report: Callable[[Record], None]) -> None:
    """All bodies are prepared before `begin`, so that making them costs no measured time."""
    load, begin = assignment.load, assignment.begin
    rng = np.random.default_rng(assignment.seed)
    bodies = [payload(load, rng) for _ in range(assignment.count)]
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=load.url, headers=headers, limits=limits, timeout=load.timeout, trust_env=False
    ) as client:
        await asyncio.sleep(max(0.0, begin - time.time()))
        if assignment.offsets:

            async def at(offset: float, index: int) -> None:
                await asyncio.sleep(max(0.0, begin + offset - time.time()))
                record = await send(client, load, bodies[index])
                record.delay = record.start - begin - offset
                report(record)

            await asyncio.gather(*(at(offset, index) for index, offset in enumerate(assignment.offsets)))
            return
        waiting = iter(bodies)

        async def lane() -> None:
            for body in waiting:
                report(await send(client, load, body))

        await asyncio.gather(*(lane() for _ in range(assignment.lanes)))


def _write(record: Record) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(record) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    assignment = msgspec.json.decode(sys.stdin.buffer.read(), type=Assignment)
    asyncio.run(run(assignment, _write))


if __name__ == "__main__":
    main()
