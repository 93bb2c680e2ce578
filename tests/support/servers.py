"""Servers for tests: the application over a fake engine in a thread of this process."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from service.api.app import create_app, create_context
from service.api.context import ServerContext
from service.catalog import Catalog, engine_config
from service.engine.config import EngineConfig
from service.engine.supervisor import EngineLink, InlineLink
from service.settings import Settings, load_settings
from tests.support import fake_engine
from tests.support.fake_chat import fake_catalog

MakeLink = Callable[[EngineConfig], EngineLink]


class RunningServer:
    """`url` ends without a slash."""

    def __init__(
        self, url: str, context: ServerContext, server: uvicorn.Server, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.url = url
        self.context = context
        self.server = server
        self.loop = loop

    def wait_idle(self, seconds: float = 5.0) -> None:
        """Until no request is in progress; an answer is read a moment before its request is given back."""
        deadline = time.monotonic() + seconds
        while self.context.engine.in_flight or self.context.admission.in_flight:
            assert time.monotonic() < deadline, "requests are still in progress"
            time.sleep(0.01)
        assert self.context.admission.pending_bytes == 0


def inline(config: EngineConfig) -> EngineLink:
    return InlineLink(config, fake_engine.serve)


@contextmanager
def running_server(
    catalog: Catalog | None = None, make_link: MakeLink = inline, *, wait: bool = True, **flags: Any
) -> Iterator[RunningServer]:
    """The whole application on a loopback port, stopped at the end."""
    settings: Settings = load_settings({"port": 0, **flags})
    catalog = catalog or fake_catalog()
    config = engine_config(settings, catalog, "text")
    listener = socket.create_server(("127.0.0.1", 0))
    started = threading.Event()
    holder: list[RunningServer] = []

    async def run() -> None:
        context = create_context(settings, catalog, lambda: make_link(config))
        server = uvicorn.Server(
            uvicorn.Config(create_app(context), log_level="warning", timeout_graceful_shutdown=5, lifespan="on")
        )
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
        assert started.wait(20), "the server did not start"
        yield holder[0]
    finally:
        holder[0].server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"
