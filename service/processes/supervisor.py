"""The process that owns the port, the engines and the API processes, and serves no request itself."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable, Sequence

from service.api.engines.request_stream import EngineError
from service.hub.catalog import Catalog
from service.link.messages import Detach
from service.link.silence import START_TIMEOUT
from service.link.standby import EngineStart
from service.metrics.metrics import Metrics
from service.processes.api_config import ApiConfig, located_models, plain_settings
from service.processes.api_process_count import num_api_processes
from service.processes.api_processes import ApiProcesses, StartError
from service.processes.control import EngineNews
from service.processes.engines import EngineProcesses
from service.processes.listener import url_of
from service.processes.progress import start_progress
from service.processes.server import ABORT_GRACE, print_banner
from service.settings.settings import Settings

log = logging.getLogger("reprise")

# Puts engines to sleep that several API processes use: all are stopped when there have been no requests for a while,
# and all are started again for the next request.
#
#     no request for long enough -> Doze to every API process, which holds new requests from then on -> all are Dozing
#     -> the engines are stopped -> a process holds a request: Wake -> the engines are started
#     -> each process notices when an engine is ready, and sends it the requests that it held
#
# A process that has a request answers Doze with Wake, and so does one that gets a request before all have answered;
# then the engines stay awake. No request is lost in an engine that stops, since no process sends anything after Dozing.

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


ENGINE_GRACE = 10.0
"""Seconds that an engine may take to stop."""
DRAIN_MARGIN = 10.0
"""Seconds after the longest possible drain after which an API process is killed."""


class Supervisor:
    """Owns the listening socket, which it passes on to the API processes, and starts and watches all other
    processes."""

    def __init__(
        self, settings: Settings, catalog: Catalog, listener: socket.socket, starts: Sequence[EngineStart]
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._listener = listener
        kinds = {model.name: model.kind for model in catalog.models}
        metrics = Metrics(kinds)
        self._engines = EngineProcesses(starts, settings, metrics, kinds, self._announce)
        template = ApiConfig(
            index=0,
            processes=num_api_processes(settings),
            peer="",
            listener=listener.fileno(),
            control=-1,
            usage=-1,
            loads=-1,
            connections=-1,
            engines=len(starts),
            log_format=settings.log_format,
            settings=plain_settings(settings),
            models=located_models(catalog.models),
        )
        self._processes = ApiProcesses(
            template,
            metrics,
            self._engines,
            lambda peer: self._engines.send(Detach(peer)),
            hang_timeout=settings.hang_timeout,
            start_timeout=START_TIMEOUT,
        )
        self._draining: asyncio.Task[None] | None = None
        self._forced = False

    async def run(self) -> int:
        """Serves until a signal; returns the exit status, 1 if an engine or the API processes cannot be started."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        progress = start_progress()
        if progress is not None:
            self._engines.show_phases(progress)
        self._engines.start()
        starting = asyncio.create_task(self._wait_started())
        serving = asyncio.create_task(self._processes.run())
        after = self._settings.sleep_after
        sleeping = (
            None if after is None else asyncio.create_task(sleep_when_idle(self._engines, self._processes, after))
        )
        try:
            await asyncio.wait({starting, serving}, return_when=asyncio.FIRST_COMPLETED)
            failed = starting.done() and starting.exception() is not None
            if progress is not None:
                progress.end(good=starting.done() and not failed)
            if failed:
                self._processes.end(signal.SIGKILL)
            elif starting.done():
                print_banner(self._catalog, self._engines.device, url_of(self._listener), self._settings.page)
            await serving
            if failed:
                await starting
            return 0
        except (EngineError, StartError) as error:
            log.error("%s", error)
            return 1
        finally:
            for task in (starting, serving, sleeping, self._draining):
                if task is not None:
                    task.cancel()
            await self._engines.stop(0.0 if self._forced else ENGINE_GRACE)

    async def _wait_started(self) -> None:
        await self._engines.wait_ready()
        await self._processes.wait_accepting()

    def _announce(self, news: EngineNews) -> None:
        self._processes.tell(news)

    def _on_signal(self) -> None:
        """Drains all processes at the first signal; ends them at once at the second."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        else:
            self._forced = True
            self._processes.end(signal.SIGKILL)

    async def _drain(self) -> None:
        """Drains the API processes, which stop accepting connections by themselves, and kills those that take longer
        than a drain can."""
        settings = self._settings
        self._listener.close()
        self._processes.end()
        await asyncio.sleep(settings.drain_delay + settings.drain_timeout + 2 * ABORT_GRACE + DRAIN_MARGIN)
        log.error("an API process does not end; it is killed")
        self._processes.end(signal.SIGKILL)


async def serve_several(
    settings: Settings, catalog: Catalog, listener: socket.socket, starts: Sequence[EngineStart]
) -> int:
    """Serves with several engines or API processes until a signal; returns the exit status. starts: of
    begin_engines."""
    return await Supervisor(settings, catalog, listener, starts).run()
