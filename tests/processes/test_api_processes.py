"""API processes: what they are started with, and the supervisor's page of metrics, for which the test holds the other
ends of its control channels."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn

from service.api.app import threads_of_each
from service.hub.catalog import Catalog, load_catalog
from service.metrics.metrics import Metrics
from service.metrics.page import Families, families, text
from service.processes import supervisor
from service.processes.control import ApiConfig, Collect, ControlChannel, Notice, Report, Snapshot, plain_settings
from service.processes.server import Server
from service.processes.supervisor import ApiProcess, ApiProcesses
from service.settings.settings import Settings, load_settings
from tests.support.waiting import GENEROUS, until

MODELS = {"tiny": "chat"}
COUNTED = 'reprise_requests_total{endpoint="chat",model="tiny",outcome="ok",status="200"}'


@dataclass
class Member:
    """One API process, as far as metrics go: `answer` is what it does when it is asked."""

    process: ApiProcess
    control: ControlChannel[Any]
    metrics: Metrics

    async def asked(self) -> None:
        """Waits until it is asked for its metrics."""
        assert isinstance(await asyncio.wait_for(self.control.receive(), GENEROUS), Collect)

    def answer(self) -> None:
        self.control.send(Snapshot(families(self.metrics.registry)))

    def count(self) -> None:
        self.metrics.observe("requests_total", model="tiny", endpoint="chat", status="200", outcome="ok")

    async def answer_all(self) -> None:
        while True:
            await self.asked()
            self.answer()


class OneEngine:
    def with_metrics(self, page: Families) -> Families:
        return page


@asynccontextmanager
async def pool(count: int) -> AsyncIterator[tuple[ApiProcesses, list[Member]]]:
    template = ApiConfig(0, count, "", -1, -1, -1, 1, "text", {}, ())
    made = ApiProcesses(
        template, Metrics(MODELS), cast(Any, OneEngine()), lambda peer: None, hang_timeout=600, start_timeout=600
    )
    members, readers = [], []
    for index in range(count):
        ours, theirs = socket.socketpair()
        control: ControlChannel[Report] = await ControlChannel.open(ours, Report)
        process = ApiProcess(f"api-{index}", cast(Any, SimpleNamespace(returncode=None)), control)
        process.accepts, made._running[index] = True, process
        readers.append(asyncio.create_task(made._follow(process)))
        members.append(Member(process, await ControlChannel.open(theirs, Notice), Metrics(MODELS)))
        members[-1].count()
    try:
        yield made, members
    finally:
        for member, reader in zip(members, readers, strict=True):
            reader.cancel()
            member.process.control.close()
            member.control.close()


async def test_of_a_process_that_does_not_answer_the_last_figures_count(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pool(2) as (made, [hung, good]):
        answering = asyncio.create_task(good.answer_all())
        first = asyncio.create_task(made.page())
        await hung.asked()
        hung.answer()
        assert f"{COUNTED} 2.0" in (await asyncio.wait_for(first, GENEROUS)).decode()
        hung.count()
        good.count()
        monkeypatch.setattr(supervisor, "COLLECT_SECONDS", 0.01)
        wait_for_good = asyncio.create_task(until(lambda: f"{COUNTED} 2.0".encode() in text(good.process.families)))
        while not wait_for_good.done():
            page = await made.page()
        assert f"{COUNTED} 3.0" in page.decode()
        monkeypatch.setattr(supervisor, "COLLECT_SECONDS", 1e3 * GENEROUS)
        last = asyncio.create_task(made.page())
        await hung.asked()  # once, for all of these pages
        hung.answer()
        assert f"{COUNTED} 4.0" in (await asyncio.wait_for(last, GENEROUS)).decode()
        answering.cancel()


SHARED = {"max_connections", "api_key", "api_key_file"}
"""What differs in an API process."""


def started(settings: Settings, catalog: Catalog) -> ApiConfig:
    values, models = plain_settings(settings), catalog.models
    line = ApiConfig(0, settings.num_api_processes, "api-1", 3, 4, 5, 1, "json", values, models).line()
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    return ApiConfig.read(line)


def test_settings_and_models_arrive_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("from-a-file\n")
    flags = {
        "api_processes": 3,
        "api_key": ["secret"],
        "api_key_file": str(keys),
        "voices_dir": str(tmp_path),
        "max_body": "3M",
        "graphs": False,
        "cors_origin": ["https://a.example", "https://b.example"],
        "max_connections": 10,
        "solver_steps": ["5", "12"],
    }
    settings = load_settings(flags)
    catalog = load_catalog(settings)
    config = started(settings, catalog)
    monkeypatch.setenv("REPRISE_MAX_BODY", "9M")  # what the supervisor made of the variables counts
    keys.unlink()
    arrived = load_settings(config.settings)
    assert arrived.keys() == ("secret", "from-a-file")
    assert arrived.model_dump(exclude=SHARED) == settings.model_dump(exclude=SHARED)
    assert arrived.max_connections == 4
    for ours, theirs in zip(catalog.models, config.models, strict=True):
        assert (ours.names, ours.kind, ours.checkpoint) == (theirs.names, theirs.kind, theirs.checkpoint)
        assert (ours.created, ours.demo) == (theirs.created, theirs.demo)
        assert type(ours.processor) is type(theirs.processor)


def test_threads_are_divided_among_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.interfaces.cpus.available", lambda: 16)
    for processes, threads in ((2, 4), (4, 2), (64, 1)):
        assert threads_of_each(load_settings({"api_processes": processes})) == threads


@pytest.mark.parametrize("supervised", [False, True])
def test_a_second_signal_ends_a_server_at_once_unless_a_supervisor_does(supervised: bool) -> None:
    context: Any = SimpleNamespace(draining=True)
    server = Server(uvicorn.Config("app"), context, supervised=supervised)
    server.handle_exit(signal.SIGTERM, None)
    assert server.force_exit is not supervised
