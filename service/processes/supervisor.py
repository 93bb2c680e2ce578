"""The process that owns the port, the engine and several API processes, and serves no request itself."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable

from rich.console import Console

from service.api.engine_client import EngineClient
from service.api.http.shared_usage import UsageTable
from service.api.request_stream import EngineError
from service.catalog import Catalog
from service.engine_config import configs_of_lives, engine_config
from service.link.config import EngineConfig
from service.link.engine_socket import OnOutputs
from service.link.messages import Command, Detach
from service.link.supervisor import EngineExit, ProcessLink
from service.logs import chosen_format
from service.metrics import Metrics
from service.processes.control import EngineEnded, EngineStarted
from service.processes.pool import ApiProcesses, StartError
from service.processes.start import WORK_KINDS, ApiConfig, model_starts, plain_settings
from service.progress import StartProgress, log_phase
from service.server import ABORT_GRACE, print_banner, url_of
from service.settings import Settings

log = logging.getLogger("reprise")

ENGINE_GRACE = 10.0
"""Seconds that the engine has to end its step."""
DRAIN_MARGIN = 10.0
"""Seconds beyond those that an API process needs at most to drain, until it is killed."""


def shared_link(config: EngineConfig) -> ProcessLink:
    return ProcessLink(config, shared=True)


class AnnouncedLink:
    """A shared engine, whose begin and end are told. announce: given its address, and None when it has ended."""

    def __init__(self, link: ProcessLink, announce: Callable[[str | None], None]) -> None:
        self.on_launch: Callable[[], None] = lambda: None
        self._link = link
        self._announce = announce

    async def run(self, on_outputs: OnOutputs) -> EngineExit:
        self._link.on_launch = self._launched
        try:
            return await self._link.run(on_outputs)
        finally:
            self._announce(None)

    def _launched(self) -> None:
        self._announce(self._link.address)
        self.on_launch()

    def send(self, command: Command) -> None:
        self._link.send(command)

    def kill(self) -> None:
        self._link.kill()


class Supervisor:
    """Runs on a bound socket, which it passes on to the API processes."""

    def __init__(self, settings: Settings, catalog: Catalog, listener: socket.socket) -> None:
        self._settings = settings
        self._catalog = catalog
        self._listener = listener
        log_format = chosen_format(settings.log_format)
        metrics = Metrics({model.name: model.kind for model in catalog.models})
        config = engine_config(settings, catalog, log_format)
        configs = configs_of_lives(config)
        self._engine = EngineClient(
            lambda: AnnouncedLink(shared_link(next(configs)), self._announce),
            metrics,
            hang_timeout=settings.hang_timeout,
            start_timeout=settings.start_timeout,
        )
        template = ApiConfig(
            index=0,
            processes=settings.api_processes,
            peer="",
            listener=listener.fileno(),
            control=-1,
            usage=-1,
            log_format=log_format,
            settings=plain_settings(settings),
            models=model_starts(catalog.models),
        )
        usage = UsageTable.make_file(settings.api_processes, WORK_KINDS)
        self._processes = ApiProcesses(template, usage, metrics, lambda peer: self._engine.send(Detach(peer)))
        self._draining: asyncio.Task[None] | None = None
        self._forced = False

    async def run(self) -> int:
        """Until a signal; the exit status. 1 when the engine or the API processes cannot be started."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        progress = StartProgress(Console(stderr=True)) if sys.stderr.isatty() else None
        self._engine.on_state = progress or log_phase
        self._engine.start()
        starting = asyncio.create_task(self._wait_started())
        serving = asyncio.create_task(self._processes.run())
        try:
            await asyncio.wait({starting, serving}, return_when=asyncio.FIRST_COMPLETED)
            failed = starting.done() and starting.exception() is not None
            if progress is not None:
                progress.end(good=starting.done() and not failed)
            if failed:
                self._processes.end(signal.SIGKILL)
            elif starting.done():
                print_banner(self._catalog, self._engine.state, url_of(self._listener))
            await serving
            if failed:
                await starting
            return 0
        except (EngineError, StartError) as error:
            log.error("%s", error)
            return 1
        finally:
            for task in (starting, serving, self._draining):
                if task is not None:
                    task.cancel()
            await self._engine.stop(0.0 if self._forced else ENGINE_GRACE)

    async def _wait_started(self) -> None:
        await self._engine.wait_ready()
        await self._processes.wait_accepting()

    def _announce(self, address: str | None) -> None:
        self._processes.tell(EngineEnded() if address is None else EngineStarted(address, self._engine.restarts))

    def _on_signal(self) -> None:
        """The first signal drains all processes; the second ends them at once."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        else:
            self._forced = True
            self._processes.end(signal.SIGKILL)

    async def _drain(self) -> None:
        """They stop to accept connections on their own; what they need at most is what one alone would need."""
        settings = self._settings
        self._listener.close()
        self._processes.end()
        await asyncio.sleep(settings.drain_delay + 2 * (settings.drain_timeout + ABORT_GRACE) + DRAIN_MARGIN)
        log.error("an API process does not end; it is killed")
        self._processes.end(signal.SIGKILL)


async def serve_several(settings: Settings, catalog: Catalog, listener: socket.socket) -> int:
    """Serve with several API processes until a signal; the exit status."""
    return await Supervisor(settings, catalog, listener).run()
