"""Servers for tests: the application over a fake engine in a thread of this process."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx

from service.api.app import create_context, create_engine, create_metrics
from service.api.context import ServerContext
from service.api.engines.engines import Engines
from service.api.tracing import Tracing
from service.hub.catalog import Catalog
from service.link.config import EngineConfig
from service.link.engine_link import EngineLink
from service.processes.config import engine_config
from service.processes.listener import bind
from service.processes.server import Server, server_config
from service.settings.settings import load_settings
from tests.support import fake_engine
from tests.support.fake_chat import fake_catalog
from tests.support.inline_link import EngineEntry, InlineLink
from tests.support.processes import START_SECONDS
from tests.support.waiting import GENEROUS, wait

MakeLink = Callable[[EngineConfig], EngineLink]


class RunningServer:
    """`url` ends without a slash."""

    def __init__(self, url: str, context: ServerContext, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self.url = url
        self.context = context
        self.server = server
        self.loop = loop

    def metric(self, start: str) -> float:
        """The sum of the metrics whose lines begin so, behind the prefix."""
        lines = httpx.get(f"{self.url}/metrics", timeout=GENEROUS).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"reprise_{start}"))

    def wait_idle(self, seconds: float = GENEROUS) -> None:
        """Waits until no request is in progress: a client may have read an answer a moment before its request is
        released."""
        engine, admission = self.context.engine, self.context.admission
        busy = lambda: engine.in_flight or admission.in_flight or admission.pending_bytes  # noqa: E731 - bytes of a body
        wait(lambda: not busy(), seconds, "every request has ended")


@contextmanager
def running_server(
    catalog: Catalog | None = None,
    make_link: MakeLink | None = None,
    *,
    engine: EngineEntry | str = fake_engine.serve,
    wait: bool = True,
    tracing: Tracing | None = None,
    num_engines: int = 1,
    **flags: Any,
) -> Iterator[RunningServer]:
    """The whole application on a loopback port, stopped at the end. num_engines: each made by `make_link`, by default
    `engine` in a thread of this process.

    Unless flags name another, it has a folder of its own for voices: those of a fake engine are of no use to others.
    pcm has the samples of the model.
    """
    with tempfile.TemporaryDirectory() as voices:
        settings = load_settings({"port": 0, "voices_dir": voices, **flags})
        new_link = make_link or partial(InlineLink, entry=engine)
        catalog = catalog or fake_catalog()
        config = engine_config(settings, catalog)
        listener = bind(settings)
        started = threading.Event()
        holder: list[RunningServer] = []

        async def run() -> None:
            metrics = create_metrics(catalog)
            engines = [create_engine(settings, metrics, lambda: new_link(config)) for _ in range(num_engines)]
            context = create_context(settings, catalog, Engines(engines, metrics), metrics)
            context.tracing, context.pcm_rate = tracing, 48_000
            uvicorn_config = server_config(context)
            uvicorn_config.timeout_graceful_shutdown = 5
            server = Server(uvicorn_config, context)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            holder.append(RunningServer(url, context, server, asyncio.get_running_loop()))
            serving = asyncio.create_task(server.serve([listener]))
            while not server.started and not serving.done():
                await asyncio.sleep(0.01)
            if wait:
                await context.engine.wait_ready()
            started.set()
            await serving

        thread = threading.Thread(target=lambda: asyncio.run(run()), name="server")
        thread.start()
        try:
            assert started.wait(START_SECONDS), "the server did not start"
            yield holder[0]
        finally:
            holder[0].server.should_exit = True
            thread.join(START_SECONDS)
            assert not thread.is_alive(), "the server did not stop"
