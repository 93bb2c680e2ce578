"""A client process: reads an Assignment from standard input, writes its Records to standard output, a line of JSON each
as soon as its request has ended.

Before them it writes READY twice, and reads a line each time: when its requests are prepared, and, once every client
is that far, when its connections are warm. They come second because servers close a connection that is idle for some
seconds. The second line is the wall-clock time at which all clients begin.
"""

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

READY = b"ready\n"


async def run(assignment: Assignment, meet: Callable[[], bytes], report: Callable[[Record], None]) -> None:
    """All bodies are prepared and a connection for each lane is opened before the beginning, so that neither costs
    measured time. An open loop opens more when all it has are taken.

    meet: blocks until every client has called it as often, and gives the line that they are told then.
    """
    load = assignment.load
    rng = np.random.default_rng(assignment.seed)
    bodies = [msgspec.json.encode(payload(load, rng)) for _ in range(assignment.count)]
    peer = peer_of(load.url, load.api_key)
    idle = [Connection(peer, load.timeout) for _ in range(max(1, assignment.lanes))]
    gc.freeze()  # what is loaded stays, and need not be looked through while answers come
    meet()
    await asyncio.gather(*(connection.warm_up() for connection in idle))
    begin = float(meet())
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


def _read() -> bytes:
    if not (line := sys.stdin.buffer.readline()):
        sys.exit("a load client's parent has ended")
    return line


def _write(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def _meet() -> bytes:
    _write(READY)
    return _read()


def main() -> None:
    assignment = msgspec.json.decode(_read(), type=Assignment)
    asyncio.run(run(assignment, _meet, lambda record: _write(msgspec.json.encode(record) + b"\n")))


if __name__ == "__main__":
    main()
