"""Puts engines to sleep that several API processes use: all are stopped when there have been no requests for a while,
and all are started again for the next request.

    no request for long enough -> Doze to every API process, which holds new requests from then on -> all are Dozing
    -> the engines are stopped -> a process holds a request: Wake -> the engines are started
    -> each process notices when an engine is ready, and sends it the requests that it held

A process that has a request answers Doze with Wake, and so does one that gets a request before all have answered; then
the engines stay awake. No request is lost in an engine that stops, since no process sends anything after Dozing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from service.processes.api_processes import ApiProcesses
from service.processes.engines import EngineProcesses

LOOK_SECONDS = 0.5
"""Seconds between two checks for requests."""


async def sleep_when_idle(
    engines: EngineProcesses, processes: ApiProcesses, after: float, clock: Callable[[], float] = time.monotonic
) -> None:
    """Runs until cancelled. after: the engines are stopped once they have been ready for this many seconds without a
    request."""
    busy_at = clock()
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        if processes.worked() or not engines.all_ready:
            busy_at = clock()
        elif clock() - busy_at >= after:
            await sleep_once(engines, processes)
            busy_at = clock()


async def sleep_once(engines: EngineProcesses, processes: ApiProcesses) -> None:
    """Stops the engines until a request needs them, and starts them again; does nothing if a request comes before they
    can be stopped."""
    if not (await processes.doze() and engines.all_ready):
        processes.stay_awake()
        return
    engines.fall_asleep()
    await processes.called.wait()
    engines.wake()
