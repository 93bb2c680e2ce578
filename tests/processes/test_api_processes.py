"""The supervisor's page of metrics: many ask for it at a time, or a process does not answer. The test holds the other
ends of its control channels."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from service.metrics.metrics import Metrics
from service.metrics.page import Families, families
from service.processes import supervisor
from service.processes.control import ApiConfig, Collect, ControlChannel, Notice, Report, Snapshot
from service.processes.supervisor import ApiProcess, ApiProcesses
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
        members[-1].metrics.observe("requests_total", model="tiny", endpoint="chat", status="200", outcome="ok")
    try:
        yield made, members
    finally:
        for member, reader in zip(members, readers, strict=True):
            reader.cancel()
            member.process.control.close()
            member.control.close()


async def test_all_who_ask_while_a_page_is_collected_get_the_next_one() -> None:
    async with pool(2) as (made, members):
        first = asyncio.create_task(made.page())
        for member in members:
            await member.asked()
        others = [asyncio.create_task(made.page()) for _ in range(50)]
        await asyncio.sleep(0)  # They have asked now.
        for member in members:
            member.answer()
        assert f"{COUNTED} 2.0" in (await asyncio.wait_for(first, GENEROUS)).decode()
        for member in members:
            await member.asked()
            member.metrics.observe("requests_total", model="tiny", endpoint="chat", status="200", outcome="ok")
            member.answer()
        pages = await asyncio.wait_for(asyncio.gather(*others), GENEROUS)
        assert len(set(pages)) == 1 and f"{COUNTED} 4.0" in pages[0].decode()


async def test_a_process_that_does_not_answer_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pool(2) as (made, [hung, good]):
        answering = asyncio.create_task(good.answer_all())
        monkeypatch.setattr(supervisor, "COLLECT_SECONDS", 0.01)
        await made.page()
        await until(lambda: not good.process.asked, what="the other one has answered")
        monkeypatch.setattr(supervisor, "COLLECT_SECONDS", 1e3 * GENEROUS)
        assert f"{COUNTED} 1.0" in (await asyncio.wait_for(made.page(), GENEROUS)).decode()
        hung.answer()
        await until(lambda: not hung.process.asked, what="it answers after all")
        last = asyncio.create_task(made.page())
        for _ in range(2):
            await hung.asked()  # the first time was long ago
        hung.answer()
        assert f"{COUNTED} 2.0" in (await asyncio.wait_for(last, GENEROUS)).decode()
        answering.cancel()
