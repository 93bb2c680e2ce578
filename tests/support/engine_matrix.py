"""One engine process with the clients of two API processes, all in the test's process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from service.api.engine_client import EngineClient
from service.link.attached import AttachedLink, EngineLives
from service.link.config import EngineConfig, ModelConfig
from service.link.supervisor import ProcessLink
from service.metrics import Metrics
from service.processes.engines import AnnouncedLink
from tests.support.waiting import GENEROUS

CONFIG = EngineConfig((ModelConfig("tiny", "/nowhere"),))
FAKE = "tests.support.fake_engine:serve"


@dataclass
class Matrix:
    """Two clients of one engine, as two API processes have them, and the client that supervises it."""

    supervisor: EngineClient
    clients: list[EngineClient]

    async def wait_ready(self) -> None:
        async with asyncio.timeout(GENEROUS):
            for client in (self.supervisor, *self.clients):
                await client.wait_ready()


@asynccontextmanager
async def matrix() -> AsyncIterator[Matrix]:
    lives = EngineLives()
    supervisor = EngineClient(
        lambda: AnnouncedLink(ProcessLink(CONFIG, FAKE, shared=True), lives.tell), Metrics({"tiny": "chat"})
    )

    def client(peer: str) -> EngineClient:
        metrics = Metrics({"tiny": "chat"})
        return EngineClient(lambda: AttachedLink(lives, peer), metrics, started_elsewhere=lives.started)

    made = Matrix(supervisor, [client("api-1"), client("api-2")])
    for each in (supervisor, *made.clients):
        each.start()
    try:
        await made.wait_ready()
        yield made
    finally:
        for each in (*made.clients, supervisor):
            await each.stop()
