"""One of several API processes. The supervisor starts the module `service.processes.api_process` with an ApiConfig."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading

from models.interfaces.errors import CheckpointError
from service.api.app import create_context, create_engine, create_metrics
from service.api.engines.engines import Engines
from service.api.health_routes import observe_life
from service.hub.catalog import Catalog
from service.link.engine_link import AttachedLink
from service.metrics.page import families
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
from service.settings.settings import load_settings
from service.system.children import end_soon, keep_freed_memory, wait_for_end_of_parent
from service.system.logs import configure_logging

log = logging.getLogger("reprise")

CANNOT_START = 2
ANSWER_SECONDS = 4.0
"""Seconds to wait for the supervisor's page of metrics, which waits for busy processes for 2 s. Prometheus waits for 5,
as deploy/prometheus sets it up."""


class SupervisorConnection:
    """The connection to the supervisor: follows its notices, and asks it for the page of metrics."""

    def __init__(self, control: ControlChannel[Notice], server: Server, peer: str) -> None:
        self._control = control
        self._server = server
        self._peer = peer
        self._page: asyncio.Future[bytes] | None = None
        """The page that the supervisor was asked for and has not sent yet."""

    async def follow(self) -> None:
        """Do what the supervisor's notices say. When they end, it replaces this process, so the server ends."""
        problem = "they have ended"
        try:
            while (notice := await self._control.receive()) is not None:
                match notice:
                    case EngineNews(engine, address, restarts):
                        link = None if address is None else AttachedLink(address, self._peer, self._server.fail)
                        await self._server.context.engine.clients[engine].attach(link, restarts)
                    case Collect():
                        observe_life(self._server.context)
                        self._control.send(Snapshot(families(self._server.context.metrics.registry)))
                    case Page() if self._page is not None:
                        self._page.set_result(notice.text)
                        self._page = None
        except Exception as error:
            problem = str(error)
        self._server.fail(f"the supervisor's notices cannot be followed: {problem}")

    async def report_alive(self) -> None:
        """Reports until cancelled. The supervisor kills a process whose event loop has stopped (ApiProcesses)."""
        while True:
            self._control.send(Alive())
            await asyncio.sleep(ALIVE_SECONDS)

    async def scrape(self) -> bytes:
        """The metrics of all processes, in Prometheus's text format. TimeoutError if the supervisor does not answer:
        sums without the others would look like restarts."""
        if self._page is None:
            self._page = asyncio.get_running_loop().create_future()
            self._control.send(Scrape())
        return await asyncio.wait_for(asyncio.shield(self._page), ANSWER_SECONDS)


async def serve(config: ApiConfig) -> int:
    """Serves until a signal; returns the exit status."""
    for inherited in config.inherited:
        os.set_inheritable(inherited, False)  # not for the decode workers
    control: ControlChannel[Notice] = await ControlChannel.open(socket.socket(fileno=config.control), Notice)
    settings = load_settings(config.settings)
    catalog, table = Catalog(config.models), config.table()
    metrics = create_metrics(catalog)
    clients = [create_engine(settings, metrics, None) for _ in range(config.engines)]
    engines = Engines(clients, metrics, table.row(config.index, engine_kinds(config.engines)))
    context = create_context(settings, catalog, engines, metrics, others=table.row(config.index, WORK_KINDS))
    server = Server(server_config(context), context, supervised=True)
    connection = SupervisorConnection(control, server, config.peer)
    context.scrape = connection.scrape
    work = connection.follow(), server.announce(lambda: control.send(Accepting())), connection.report_alive()
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
