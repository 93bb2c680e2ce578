"""A client process: reads an Assignment from standard input, writes its Records to standard output, a line of JSON each
as soon as its request has ended."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Callable

import msgspec
import numpy as np

from service.bench.connection import Connection, peer_of
from service.bench.spec import Assignment, Record
from service.bench.traffic import payload, send

WARM_UP_SECONDS = 1.0
"""Before the beginning; servers close a connection that is idle for some seconds."""


async def run(assignment: Assignment, report: Callable[[Record], None]) -> None:
    """All bodies are prepared and a connection for each lane is opened before `begin`, so that neither costs measured
    time. An open loop opens more when all it has are taken."""
    load, begin = assignment.load, assignment.begin
    rng = np.random.default_rng(assignment.seed)
    bodies = [msgspec.json.encode(payload(load, rng)) for _ in range(assignment.count)]
    peer = peer_of(load.url, load.api_key)
    idle = [Connection(peer, load.timeout) for _ in range(max(1, assignment.lanes))]
    gc.freeze()  # what is loaded stays, and need not be looked through while answers come
    await asyncio.sleep(max(0.0, begin - WARM_UP_SECONDS - time.time()))
    await asyncio.gather(*(connection.warm_up() for connection in idle))
    await asyncio.sleep(max(0.0, begin - time.time()))
    if assignment.offsets:

        async def at(offset: float, index: int) -> None:
            await asyncio.sleep(max(0.0, begin + offset - time.time()))
            connection = idle.pop() if idle else Connection(peer, load.timeout)
            record = await send(connection, load, bodies[index])
            idle.append(connection)
            record.delay = record.start - begin - offset
            report(record)

        await asyncio.gather(*(at(offset, index) for index, offset in enumerate(assignment.offsets)))
    else:
        waiting = iter(bodies)

        async def lane(connection: Connection) -> None:
            for body in waiting:
                report(await send(connection, load, body))

        await asyncio.gather(*(lane(connection) for connection in idle))
    for connection in idle:
        connection.close()


def _write(record: Record) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(record) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    assignment = msgspec.json.decode(sys.stdin.buffer.read(), type=Assignment)
    asyncio.run(run(assignment, _write))


if __name__ == "__main__":
    main()
