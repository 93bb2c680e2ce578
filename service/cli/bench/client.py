"""A client process: reads an Assignment from standard input, writes each of its Records to standard output as JSON.

Before them it writes READY when its requests are prepared, and reads the wall-clock time at which all begin. Only then
it opens its connections: servers close idle ones.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import sys
import time
from collections.abc import Callable

import msgspec
import numpy as np

from service.cli.bench.traffic import Assignment, Connection, Record, converse, payload, questions

READY = b"ready\n"


async def run(assignment: Assignment, barrier: Callable[[], bytes], report: Callable[[Record], None]) -> None:
    """Prepare all bodies, open a connection for each lane, then send. barrier: waits for all clients; returns the line
    that the parent then sends."""
    load = assignment.load
    rng = np.random.default_rng(assignment.seed)
    talks = [(msgspec.json.encode(payload(load, rng)), questions(load, rng)) for _ in range(assignment.count)]
    idle = [Connection(load) for _ in range(max(1, assignment.lanes))]
    gc.freeze()  # loaded objects stay: the garbage collector need not scan them while answers come
    begin = float(barrier())
    await asyncio.gather(*(connection.warm_up() for connection in idle))
    end = begin + assignment.until if assignment.until else math.inf
    waiting = iter(talks)

    async def at(offset: float, talk: tuple[bytes, list[str]]) -> None:
        """Send a request at its own time, over a further connection when all are in use."""
        await asyncio.sleep(max(0.0, begin + offset - time.time()))
        connection = idle.pop() if idle else Connection(load)
        async for record in converse(connection, load, *talk):
            if record.turn == 1:
                record.delay = record.start - begin - offset
            report(record)
        idle.append(connection)

    async def lane(connection: Connection) -> None:
        """Send a request as soon as the one before it has been answered."""
        for talk in waiting:
            if time.time() >= end:
                return
            async for record in converse(connection, load, *talk):
                report(record)

    await asyncio.sleep(max(0.0, begin - time.time()))
    if assignment.offsets:
        await asyncio.gather(*map(at, assignment.offsets, talks))
    else:
        await asyncio.sleep(assignment.after)
        await asyncio.gather(*map(lane, idle))
    for connection in idle:
        await connection.close()


def _read() -> bytes:
    if not (line := sys.stdin.buffer.readline()):
        sys.exit("a load client's parent has ended")
    return line


def _write(line: bytes) -> None:
    try:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os._exit(1)  # the parent has ended, and nobody is left to be told


def main() -> None:
    def barrier() -> bytes:
        _write(READY)
        return _read()

    assignment = msgspec.json.decode(_read(), type=Assignment)
    asyncio.run(run(assignment, barrier, lambda record: _write(msgspec.json.encode(record) + b"\n")))


if __name__ == "__main__":
    main()
