"""The API process: uvicorn with its own shutdown, and the banner."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn
from rich.console import Console
from rich.panel import Panel

from service.api.app import create_app, create_context, create_engine, create_metrics
from service.api.context import ServerContext
from service.api.engines.engines import Engines
from service.api.engines.request_stream import EngineError
from service.api.http.connections import BoundedConnection, BoundedSocket
from service.api.sockets import MAX_MESSAGE
from service.hub.catalog import DEMO_NOTICES, Catalog
from service.link.engine_link import EngineStarts
from service.link.messages import EngineState
from service.processes.config import engine_config
from service.processes.listener import url_of
from service.settings.settings import Settings
from service.system.children import keep_freed_memory, possible_connections, raise_descriptor_limit

log = logging.getLogger("reprise")

HEADER_TIMEOUT = 10.0
"""Seconds for a client to send the head of a request."""
SOCKET_POLL = 0.05
IDLE_TIMEOUT = 75
"""Seconds after which a connection without a request is closed. Balancers keep theirs for 60."""
ACCEPTED_AT_ONCE = 1
"""Connections that are accepted in one turn of the event loop. With 1, the less busy ones of several processes accept
more of them. With more, when descriptors or memory are short, asyncio would fail for each of them and schedule an
attempt for each failure a second later, so that the attempts grow in number."""
ERRORS_OF_CLIENTS = (
    "Invalid UTF-8 sequence received from client.",
    "ASGI callable returned without completing handshake.",  # also of one that was refused
)
"""Errors in uvicorn's log that a client can cause as often as it likes."""
ABORT_GRACE = 3.0
"""Seconds for streams that are still running after the drain to send their error event."""


def log_phase(state: EngineState, name: str = "engine") -> None:
    """Logs the phase in words. Without a GPU nothing is captured: each bucket is run once."""
    phase = "warming up" if state.phase == "capturing" and not state.device_memory else state.phase
    log.info("%s: %s%s", name, phase, f" ({state.detail})" if state.detail else "")


class Server(uvicorn.Server):
    """Drains at the first signal: readiness turns red, after `drain_delay` no more connections are accepted, running
    requests have `drain_timeout` to end, and those that are left get an error. The second signal ends it at once.

    supervised: it is one of several processes, which the supervisor ends at its second signal. The first one may come
    twice: from the supervisor, and from a service manager that sends it to all processes."""

    def __init__(self, config: uvicorn.Config, context: ServerContext, *, supervised: bool = False) -> None:
        super().__init__(config)
        self.context = context
        self._supervised = supervised
        self._failed = False
        self._accepting = asyncio.Event()

    def num_connections(self) -> int:
        """Open connections."""
        return len(self.server_state.connections)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.context.draining:
            self.drain()
        elif not self._supervised:
            self.force_exit = self.should_exit = True

    def drain(self) -> None:
        """Begins to shut down. Any thread may call this, but only once."""
        self.context.draining = True
        # A signal handler may run anywhere in the loop's thread, so the work is handed over to the loop.
        self._loop.call_soon_threadsafe(self._begin_drain)

    async def startup(self, sockets: list | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._accepting.set()

    async def wait_ready(self) -> None:
        """Waits until requests are answered; EngineError if the engine cannot be started."""
        await self.context.engine.wait_ready()
        await self._accepting.wait()

    async def announce(self, ready: Callable[[], None]) -> None:
        """Calls `ready` once requests are answered; ends the server if the engine cannot be started."""
        try:
            await self.wait_ready()
        except EngineError as error:
            self.fail(error.message)
        else:
            # What is loaded by now stays. To scan it in a garbage collection holds up every stream for 0.2 to 0.4 s.
            gc.freeze()
            ready()

    def fail(self, problem: str) -> None:
        """Ends the server, which is of no more use."""
        log.error("%s", problem)
        self._failed = self.should_exit = True

    @property
    def status(self) -> int:
        """The exit status of the process."""
        return 1 if self._failed or not self.started else 0

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:
            # uvicorn would leave the application to be cancelled, which starlette logs with a traceback.
            await self.lifespan.shutdown()

    def _begin_drain(self) -> None:
        self.context.keep_task(self._loop.create_task(self._drain()))

    async def _drain(self) -> None:
        context, settings = self.context, self.context.settings
        running = context.admission.in_flight
        log.info("draining %d %s", running, "request" if running == 1 else "requests")
        await asyncio.sleep(settings.drain_delay)
        end = self._loop.time() + settings.drain_timeout
        context.drain_begun.set()
        # uvicorn cuts off WebSockets as soon as it shuts down, so their current utterances must end before that.
        while context.open_sockets and self._loop.time() < end:  # noqa: ASYNC110 - a second way out beside an event
            await asyncio.sleep(SOCKET_POLL)
        if context.open_sockets:
            await asyncio.wait({asyncio.create_task(context.engine.stop())}, timeout=ABORT_GRACE)
        left = max(0.0, end - self._loop.time())
        self.config.timeout_graceful_shutdown = round(left + ABORT_GRACE)
        self.should_exit = True
        await asyncio.sleep(left)
        await context.engine.stop()


def create_server(settings: Settings, catalog: Catalog, starts: EngineStarts | None = None) -> Server:
    """A server with its own engine; both start when it serves. starts: of begin_engines, if the engine's process has
    already been started."""
    metrics = create_metrics(catalog)
    client = create_engine(settings, metrics, (starts or EngineStarts(engine_config(settings, catalog))).link)
    client.on_state = log_phase
    context = create_context(settings, catalog, Engines([client], metrics), metrics)
    return Server(server_config(context), context)


def server_config(context: ServerContext) -> uvicorn.Config:
    """uvicorn's settings, with our connections."""
    settings = context.settings
    connection = partial(
        BoundedConnection,
        max_connections=possible_connections(settings.max_connections),
        header_timeout=HEADER_TIMEOUT,
        draining=lambda: context.draining,
        idle=OrderedDict(),
    )
    return uvicorn.Config(
        create_app(context),
        http=cast(Any, connection),
        ws=BoundedSocket,
        log_config=None,
        access_log=False,
        lifespan="on",
        backlog=ACCEPTED_AT_ONCE,
        timeout_keep_alive=IDLE_TIMEOUT,
        timeout_graceful_shutdown=round(settings.drain_timeout + ABORT_GRACE),
        ws_max_size=MAX_MESSAGE,
        ws_per_message_deflate=False,  # pictures and audio hardly shrink, and zlib would block the event loop
        server_header=False,
    )


async def serve(
    settings: Settings, catalog: Catalog, listener: socket.socket, starts: Sequence[EngineStarts] = ()
) -> int:
    """Serves until a signal; returns the exit status, 1 if the engine cannot be started. starts: of begin_engines."""
    server = create_server(settings, catalog, *starts)

    def ready() -> None:
        state = server.context.engine.state
        print_banner(catalog, state.device if state is not None else "", url_of(listener), settings.page)

    task = asyncio.create_task(server.announce(ready))
    try:
        # A Ctrl-C that asyncio caught up to here cancels this task now; uvicorn would log a start that was cancelled.
        await asyncio.sleep(0)
        await server.serve([listener])
    finally:
        task.cancel()
    return server.status


def prepare_process() -> None:
    """Sets logging, limits and the allocator of a process that will serve."""
    quiet_uvicorn()
    raise_descriptor_limit()
    keep_freed_memory()


def quiet_uvicorn() -> None:
    """Keep uvicorn from logging its own start and end, and errors of clients as those of the server."""
    logger = logging.getLogger("uvicorn.error")
    logger.setLevel(logging.ERROR)
    logger.addFilter(lambda record: record.msg not in ERRORS_OF_CLIENTS)


def print_banner(catalog: Catalog, device: str, url: str, page: bool) -> None:
    """Shows URLs and models: a box on a terminal, a log line otherwise. device: what the models run on. page: whether
    there is one at /."""
    names = [name for model in catalog.models for name in model.names]
    if not sys.stderr.isatty():
        log.info("ready at %s", url, extra={"models": ",".join(names), "device": device})
        return
    lines = [f"[bold]{url}/v1[/bold]", *([f"page     {url}/"] if page else [])]
    lines += [f"docs     {url}/docs", f"metrics  {url}/metrics", f"device   {device}", ""]
    for model in catalog.models:
        does = "hears" if model.task == "transcription" else {"chat": "sees", "speech": "speaks"}[model.kind]
        lines.append(f"{', '.join(model.names)} [dim]({does})[/dim]")
        if model.demo:
            lines.append(f"  [yellow]{DEMO_NOTICES[model.task]}; serve a real model with --model[/yellow]")
    Console(stderr=True).print(Panel("\n".join(lines), title="Reprise is ready", expand=False, highlight=False))
