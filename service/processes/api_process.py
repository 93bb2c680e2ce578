"""One of several API processes, `service.processes.api_process`, started by the supervisor with an ApiConfig."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import socket
import sys
import threading

import msgspec

from models.errors import CheckpointError
from service.api.app import create_context
from service.api.context import ServerContext
from service.api.http.shared_usage import UsageTable
from service.api.operations import observe_life
from service.api.request_stream import EngineError
from service.children import wait_for_end_of_parent
from service.heap import keep_freed_memory
from service.link.attached import AttachedLink, EngineLives
from service.logs import configure_logging
from service.metrics_page import families
from service.processes.control import (
    Accepting,
    Collect,
    ControlChannel,
    EngineEnded,
    EngineStarted,
    Notice,
    Page,
    Scrape,
    Snapshot,
)
from service.processes.start import WORK_KINDS, ApiConfig
from service.server import Server, quiet_uvicorn, server_config
from service.settings import SettingsError

log = logging.getLogger("reprise")

CANNOT_START = 2


class InheritedListener(socket.socket):
    """A listening socket that other processes accept from, too."""

    def listen(self, backlog: int = 0, /) -> None:
        """The supervisor has done that, with a backlog for all."""


class Colleague:
    """This process as the supervisor sees it: follows its notices, and asks it for the page of metrics."""

    def __init__(self, control: ControlChannel[Notice], context: ServerContext, lives: EngineLives) -> None:
        self._control = control
        self._context = context
        self._lives = lives
        self._numbers = itertools.count()
        self._pages: dict[int, asyncio.Future[bytes]] = {}

    def accepts(self) -> None:
        self._control.send(Accepting())

    async def follow(self) -> None:
        while (notice := await self._control.receive()) is not None:
            match notice:
                case EngineStarted():
                    self._context.engine.restarts = notice.restarts
                    self._lives.tell(notice.address)
                case EngineEnded():
                    self._lives.tell(None)
                case Collect():
                    observe_life(self._context)
                    self._control.send(Snapshot(notice.number, families(self._context.metrics.registry)))
                case Page() if (page := self._pages.get(notice.number)) is not None and not page.done():
                    page.set_result(notice.text)

    async def scrape(self) -> bytes:
        """The metrics of all processes in Prometheus' text format."""
        number = next(self._numbers)
        page = self._pages[number] = asyncio.get_running_loop().create_future()
        self._control.send(Scrape(number))
        try:
            return await page
        finally:
            del self._pages[number]


async def serve(config: ApiConfig) -> int:
    """Until a signal; the exit status."""
    for inherited in (config.listener, config.control, config.usage):
        os.set_inheritable(inherited, False)  # not for the decode workers
    control: ControlChannel[Notice] = await ControlChannel.open(socket.socket(fileno=config.control), Notice)
    lives = EngineLives()
    usage = UsageTable(config.usage, config.processes, WORK_KINDS)
    context = create_context(
        config.server_settings(),
        config.catalog(),
        lambda: AttachedLink(lives, config.peer),
        engine_started_elsewhere=lives.started,
        others=usage.row(config.index),
    )
    colleague = Colleague(control, context, lives)
    context.scrape = colleague.scrape
    context.makes_voices = config.index == 0
    uvicorn_config = server_config(context)
    # One connection in each turn of the event loop: who has less to do takes more of them.
    uvicorn_config.backlog = 1
    server = Server(uvicorn_config, context)
    failed = False

    async def announce() -> None:
        nonlocal failed
        try:
            await server.wait_ready()
        except EngineError as error:
            log.error("%s", error.message)
            failed = server.should_exit = True
        else:
            gc.freeze()  # as in service.server
            colleague.accepts()

    async def watch() -> None:
        """Ends a process that the supervisor or the engine no longer reaches: another one takes its place."""
        nonlocal failed
        following = asyncio.create_task(colleague.follow())
        broken = asyncio.create_task(lives.failed())
        try:
            await asyncio.wait({following, broken}, return_when=asyncio.FIRST_COMPLETED)
            log.error("%s", lives.problem or f"the supervisor's notices end: {following.exception()}")
            failed = server.should_exit = True
        finally:
            following.cancel()
            broken.cancel()

    tasks = [asyncio.create_task(watch()), asyncio.create_task(announce())]
    try:
        await server.serve([InheritedListener(fileno=config.listener)])
    finally:
        for task in tasks:
            task.cancel()
        control.close()
    return 1 if failed or not server.started else 0


def _exit_with_parent() -> None:
    wait_for_end_of_parent()
    os._exit(0)


def main() -> int:
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=ApiConfig)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    configure_logging(config.settings["log_level"], config.log_format)
    quiet_uvicorn()
    keep_freed_memory()
    try:
        return asyncio.run(serve(config))
    except (CheckpointError, SettingsError) as error:
        log.error("%s", error)
        return CANNOT_START


if __name__ == "__main__":
    sys.exit(main())
