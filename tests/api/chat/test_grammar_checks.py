"""Grammars are tried in processes that may die of them: the request is refused, and nobody else notices."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import httpx
import pytest

from benchmarks.servers.footprint import children, inspect
from service.api.http.errors import ApiError
from service.api.structured.grammar import (
    GrammarChecks,
    choice_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from service.confined.workers import WorkerLimits
from tests.api.chat.test_grammar import LARGE, REFUSED
from tests.support.processes import stand_still
from tests.support.servers import RunningServer
from tests.support.waiting import GENEROUS, until

COLORS = choice_grammar(["red", "blue"])
OVERFLOWING = {
    "$ref": "#/$defs/a0",
    "$defs": {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(1000)} | {"a1000": {}},
}


@pytest.fixture
async def checks() -> AsyncIterator[GrammarChecks]:
    checks = GrammarChecks()
    yield checks
    checks.close()


async def check(checks: GrammarChecks, grammar: str | Callable[[], str]) -> str:
    return await checks.checked(grammar if callable(grammar) else lambda: grammar, "guided")


async def refused(checks: GrammarChecks, grammar: str | Callable[[], str], status: int = 400) -> str:
    with pytest.raises(ApiError) as caught:
        await check(checks, grammar)
    assert caught.value.status == status
    if status == 400:
        assert caught.value.param == "guided" and caught.value.code == "invalid_grammar"
    return caught.value.message


async def test_clients_take_turns_at_making_grammars(checks: GrammarChecks) -> None:
    begun, go_on, order = threading.Event(), threading.Event(), list[str]()

    def make(name: str) -> str:
        order.append(name)
        begun.set()
        assert go_on.wait(GENEROUS)
        return COLORS

    names = ["hostile 1", "hostile 2", "hostile 3", "other"]
    asked = [checks.checked(partial(make, name), "guided", name.split()[0]) for name in names]
    making = asyncio.gather(*asked)
    await until(begun.is_set, what="the first one is being made")
    go_on.set()
    assert await making == [COLORS] * 4
    assert order == ["hostile 1", "hostile 2", "other", "hostile 3"]


async def stopped(checks: GrammarChecks) -> int:
    """A worker that answers nothing more; its pid."""
    assert await check(checks, COLORS) == COLORS
    pid = checks.workers._idle[-1].pid
    stand_still(pid)
    return pid


async def test_one_process_tries_all_large_and_hostile_grammars(checks: GrammarChecks) -> None:
    for make in LARGE.values():
        assert await check(checks, grammar := make()) == grammar
    for make, reason in REFUSED.values():
        assert reason in await refused(checks, make)
    assert checks.workers.workers_lost == 0 and len(checks.workers._idle) == 1


async def test_a_grammar_that_overflows_the_stack_is_too_complex(checks: GrammarChecks) -> None:
    assert await check(checks, COLORS) == COLORS
    pid = checks.workers._idle[-1].pid
    rules = "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(2500))
    for lost, grammar in enumerate((json_schema_grammar(OVERFLOWING), lark_grammar(rules)), 1):
        message = await refused(checks, grammar)
        assert message == "guided: too complex: checking it takes more time, memory or stack than allowed."
        assert checks.workers.workers_lost == lost
    other = regex_grammar("[a-z]+")
    assert await check(checks, other) == other
    assert checks.workers._idle[-1].pid != pid and inspect(pid) is None


async def test_a_check_has_a_time_limit(checks: GrammarChecks) -> None:
    pid = await stopped(checks)
    checks.workers._idle[-1]._limits = WorkerLimits(wall_seconds=0.1)
    assert "too complex" in await refused(checks, regex_grammar("a+"))
    assert inspect(pid) is None
    assert await check(checks, regex_grammar("a+"))


async def test_a_process_has_limits_on_memory_and_processor_time(checks: GrammarChecks) -> None:
    await check(checks, COLORS)
    lines = Path(f"/proc/{checks.workers._idle[-1].pid}/limits").read_text().splitlines()
    limits = {line[:25].strip(): line[25:].split()[0] for line in lines}
    assert limits["Max address space"] == str(1 << 30) and limits["Max core file size"] == "0"
    assert int(limits["Max cpu time"]) < 60


async def test_what_was_tried_is_not_tried_again(checks: GrammarChecks) -> None:
    wrong = regex_grammar("(?=a)a")
    assert "look-around" in await refused(checks, wrong)
    await stopped(checks)
    assert await check(checks, COLORS) == COLORS and "look-around" in await refused(checks, wrong)


@pytest.mark.slow
async def test_deaths_leave_nothing_behind() -> None:
    await asyncio.to_thread(int)  # the thread and what belongs to it stay
    gc.collect()  # What other tests left open would hide what this one leaves.
    descriptors, processes = len(os.listdir("/proc/self/fd")), set(children(os.getpid()))
    checks = GrammarChecks()
    for _ in range(3):
        await refused(checks, json_schema_grammar(OVERFLOWING))
    await check(checks, COLORS)
    checks.close()
    # Threads of other tests may still open and close files of their own.
    await until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors, what="every descriptor is closed")
    await until(lambda: set(children(os.getpid())) <= processes, what="every process has ended")


def test_a_server_goes_on_after_a_grammar_that_kills(server: RunningServer) -> None:
    def ask(schema: object) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "guided_json": schema}
        return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=600)

    lost = server.context.grammars.workers.workers_lost
    response = ask(OVERFLOWING)
    assert response.status_code == 400 and "too complex" in response.json()["error"]["message"]
    assert server.context.grammars.workers.workers_lost == lost + 1
    assert ask({"type": "integer"}).status_code == 200
