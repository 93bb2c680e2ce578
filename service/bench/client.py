"""A client process: reads an Assignment from standard input, writes its Records to standard output (both JSON)."""

from __future__ import annotations

import asyncio
import sys
import time

import httpx
import msgspec
import numpy as np

from service.bench.spec import Assignment, Record
from service.bench.traffic import payload, send


async def run(assignment: Assignment) -> list[Record]:
    """All bodies are prepared before `begin`, so that making them costs no measured time."""
    load = assignment.load
    rng = np.random.default_rng(assignment.seed)
    bodies = [payload(load, rng) for _ in range(assignment.count)]
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=load.url, headers=headers, limits=limits, timeout=load.timeout, trust_env=False
    ) as client:
        await asyncio.sleep(max(0.0, assignment.begin - time.time()))
        if assignment.offsets:

            async def at(offset: float, index: int) -> Record:
                await asyncio.sleep(max(0.0, assignment.begin + offset - time.time()))
                return await send(client, load, bodies[index])

            return list(await asyncio.gather(*(at(offset, i) for i, offset in enumerate(assignment.offsets))))
        records: list[Record] = []
        waiting = iter(bodies)

        async def lane() -> None:
            for body in waiting:
                records.append(await send(client, load, body))

        await asyncio.gather(*(lane() for _ in range(assignment.lanes)))
        return records


def main() -> None:
    assignment = msgspec.json.decode(sys.stdin.buffer.read(), type=Assignment)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(run(assignment))))


if __name__ == "__main__":
    main()
