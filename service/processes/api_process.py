"""One of several API processes. The supervisor starts the module `service.processes.api_process` with an ApiConfig."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import sys
import threading
from collections.abc import Sequence
from functools import partial

from models.interfaces.errors import CheckpointError
from service.api.app import create_context, create_metrics
from service.api.context import ServerContext
from service.api.engines.engine_client import EngineClient
from service.api.engines.engines import Engines
from service.api.engines.shared_usage import UsageTable
from service.api.health_routes import observe_life
from service.hub.catalog import Catalog
from service.link.engine_link import START_TIMEOUT, AttachedLink, FollowedEngine
from service.metrics.metrics import Metrics
from service.metrics.page import families, of_any_process, text
from service.processes.control import (
    ALIVE_SECONDS,
    WORK_KINDS,
    Accepting,
    Alive,
    ApiConfig,
    Collect,
    ControlChannel,
    EngineNews,
    Notice,
    Page,
    Scrape,
    Snapshot,
    engine_kinds,
)
from service.processes.listener import CONNECTIONS, SharedListener
from service.processes.server import Server, quiet_uvicorn, server_config
from service.settings.reading import SettingsError
from service.settings.settings import Settings
from service.system.children import end_soon, keep_freed_memory, wait_for_end_of_parent
from service.system.logs import configure_logging

log = logging.getLogger("reprise")

CANNOT_START = 2
ANSWER_SECONDS = 4.0
"""Seconds that a supervisor takes at most to answer, unless it is stopped: a page of metrics waits for busy processes
for 2 s, and may come after another one, which has waited for them. Prometheus waits for 5, as deploy/prometheus sets it
up."""


class SupervisorConnection:
    """The connection to the supervisor: follows its notices, and asks it for the page of metrics."""

    def __init__(
        self,
        control: ControlChannel[Notice],
        context: ServerContext,
        engines: Engines,
        followed: Sequence[FollowedEngine],
    ) -> None:
        self._control = control
        self._context = context
        self._engines = engines
        self._followed = followed
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        """Questions that the supervisor has not answered yet, by number."""

    def accepts(self) -> None:
        """Tells the supervisor that this process accepts connections."""
        self._control.send(Accepting())

    async def follow(self) -> None:
        """Does what the supervisor's notices say, until they end."""
        while (notice := await self._control.receive()) is not None:
            match notice:
                case EngineNews():
                    self._on_engine_news(notice)
                case Collect():
                    observe_life(self._context)
                    self._control.send(Snapshot(families(self._context.metrics.registry)))
                case Page() if (asked := self._asked.get(notice.number)) and not asked.done():
                    asked.set_result(notice.text)

    def _on_engine_news(self, news: EngineNews) -> None:
        client = self._engines.clients[news.engine]
        if news.was_ready:
            client.tell_earlier_starts(news.restarts)
        self._followed[news.engine].tell(news.address)

    async def report_alive(self) -> None:
        """Reports until cancelled. The supervisor kills a process whose event loop has stopped (ApiProcesses)."""
        while True:
            self._control.send(Alive())
            await asyncio.sleep(ALIVE_SECONDS)

    async def scrape(self) -> bytes:
        """The metrics of all processes, in Prometheus's text format. Those that any process knows, if the supervisor
        does not answer: sums without the others would look like restarts."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._control.send(Scrape(number))
        try:
            return await asyncio.wait_for(answer, ANSWER_SECONDS)
        except TimeoutError:
            log.error("the supervisor does not answer; /metrics lacks what only all processes know together")
            return text(of_any_process(families(self._context.metrics.registry)))
        finally:
            del self._asked[number]


async def watch(server: Server, connection: SupervisorConnection, followed: Sequence[FollowedEngine]) -> None:
    """Ends the server if the supervisor, which then replaces this process, or an engine can no longer be reached."""
    following = asyncio.create_task(connection.follow())
    broken = [asyncio.create_task(engine.failed()) for engine in followed]
    try:
        await asyncio.wait({following, *broken}, return_when=asyncio.FIRST_COMPLETED)
        problem = next((engine.problem for engine in followed if engine.problem), "")
        server.fail(problem or f"the supervisor's notices have ended: {following.exception()}")
    finally:
        for task in (following, *broken):
            task.cancel()


def attached_engines(
    config: ApiConfig, settings: Settings, metrics: Metrics, followed: Sequence[FollowedEngine], table: UsageTable
) -> Engines:
    """Clients of the engines that the supervisor starts. followed: each of them."""
    clients = [
        EngineClient(
            partial(AttachedLink, engine, config.peer),
            metrics,
            hang_timeout=settings.hang_timeout,
            start_timeout=START_TIMEOUT,
            started_elsewhere=engine.started,
        )
        for engine in followed
    ]
    return Engines(clients, metrics, table.row(config.index, engine_kinds(config.engines)))


async def serve(config: ApiConfig) -> int:
    """Serves until a signal; returns the exit status."""
    for inherited in config.inherited:
        os.set_inheritable(inherited, False)  # not for the decode workers
    control: ControlChannel[Notice] = await ControlChannel.open(socket.socket(fileno=config.control), Notice)
    followed = [FollowedEngine() for _ in range(config.engines)]
    settings = config.server_settings()
    catalog, table = Catalog(config.models), config.table()
    metrics = create_metrics(catalog)
    engines = attached_engines(config, settings, metrics, followed, table)
    context = create_context(settings, catalog, engines, metrics, others=table.row(config.index, WORK_KINDS))
    connection = SupervisorConnection(control, context, engines, followed)
    context.scrape = connection.scrape
    server = Server(server_config(context), context, supervised=True)
    work = watch(server, connection, followed), server.announce(connection.accepts), connection.report_alive()
    tasks = [asyncio.create_task(each) for each in work]
    try:
        row = table.row(config.index, (CONNECTIONS,))
        await server.serve([SharedListener(config.listener, server.num_connections, row)])
    finally:
        for task in tasks:
            task.cancel()
        control.close()
    return server.status


def _exit_with_parent() -> None:
    wait_for_end_of_parent()
    os._exit(0)


def main() -> int:
    config = ApiConfig.read(sys.stdin.buffer.readline())
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    configure_logging(config.settings["log_level"], config.log_format)
    quiet_uvicorn()
    keep_freed_memory()
    try:
        with asyncio.Runner() as runner:
            status = runner.run(serve(config))
            end_soon(status)
            return status
    except (CheckpointError, SettingsError) as error:
        log.error("%s", error)
        return CANNOT_START


if __name__ == "__main__":
    sys.exit(main())
