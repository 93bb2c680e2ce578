"""Engines that sleep while several processes use them: all are stopped when there are no requests, and all are started
for the next one.

    no request for long enough -> Doze to every API process, which holds what comes from then on -> all are Dozing
    -> the engines are stopped -> a process holds a request: Wake -> the engines are started
    -> each process sees for itself when an engine is ready, and sends it what it held

A process that has a request answers Doze with Wake, and so does one that gets a request before all have answered: then
the engines stay awake. No request is lost in an engine that stops, since nobody sends anything after Dozing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

LOOK_SECONDS = 0.5
"""Seconds between two checks for requests."""


class Users(Protocol):
    """The API processes (pool.ApiProcesses)."""

    called: asyncio.Event

    def worked(self) -> bool: ...

    async def doze(self) -> bool: ...

    def stay_awake(self) -> None: ...


class Sleepers(Protocol):
    """The engines (engines.EngineProcesses)."""

    @property
    def all_ready(self) -> bool: ...

    def fall_asleep(self) -> None: ...

    def wake(self) -> None: ...


async def sleep_when_idle(
    engines: Sleepers, processes: Users, after: float, clock: Callable[[], float] = time.monotonic
) -> None:
    """Runs until cancelled. after: seconds without a request, in which all engines were ready, until they are
    stopped."""
    busy_at = clock()
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        if processes.worked() or not engines.all_ready:
            busy_at = clock()
        elif clock() - busy_at >= after:
            await sleep_once(engines, processes)
            busy_at = clock()


async def sleep_once(engines: Sleepers, processes: Users) -> None:
    """Returns when a request needs the engines, or came before they could be stopped."""
    if not (await processes.doze() and engines.all_ready):
        processes.stay_awake()
        return
    engines.fall_asleep()
    await processes.called.wait()
    engines.wake()
