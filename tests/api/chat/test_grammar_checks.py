"""Grammars are tried in processes that may die of them: the request is refused, and nobody else notices."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import httpx
import pytest

from benchmarks.servers.footprint import children, inspect
from service.api.http.errors import ApiError
from service.api.structured import grammar as grammars
from service.api.structured import grammar_checks
from service.api.structured.grammar import choice_grammar, json_schema_grammar, regex_grammar
from service.api.structured.grammar_checks import GrammarChecks
from service.confined.workers import WorkerLimits
from service.link.grammar_limits import CHECK_LIMITS, CHECK_STACK_BYTES, LIMITS, deep_thread
from service.settings.byte_sizes import MIB
from tests.api.chat.test_grammar import LARGE, REFUSED
from tests.support.processes import stand_still
from tests.support.servers import RunningServer
from tests.support.waiting import GENEROUS, until

COLORS = choice_grammar(["red", "blue"])
OVERFLOWING = {
    "$ref": "#/$defs/a0",
    "$defs": {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(1000)} | {"a1000": {}},
}
"""Within all rules but the one on levels."""


@pytest.fixture
async def checks() -> AsyncIterator[GrammarChecks]:
    checks = GrammarChecks()
    yield checks
    checks.close()


@pytest.fixture
def unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the rules in front did not know of long chains."""
    monkeypatch.setattr(grammars, "MAX_LEVELS", 1_000_000)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first try may take any time: on a slow machine each would otherwise end a process."""
    monkeypatch.setattr(grammar_checks, "QUICK_SECONDS", 60.0)


async def check(checks: GrammarChecks, grammar: str | Callable[[], str]) -> str:
    return await checks.checked(grammar if callable(grammar) else lambda: grammar, "guided")


async def refused(checks: GrammarChecks, grammar: str | Callable[[], str], status: int = 400) -> str:
    with pytest.raises(ApiError) as caught:
        await check(checks, grammar)
    assert caught.value.status == status
    if status == 400:
        assert caught.value.param == "guided" and caught.value.code == "invalid_grammar"
    return caught.value.message


async def test_a_schema_that_has_no_form_is_refused_by_its_field(checks: GrammarChecks) -> None:
    with pytest.raises(ApiError) as caught:
        await checks.checked(lambda: json_schema_grammar({"type": "string", "pattern": "^(?<=a)b"}), "guided_json")
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "guided_json", "invalid_grammar")
    assert str(caught.value) == "guided_json: pattern: look-ahead and look-behind are not supported."


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


async def test_a_grammar_whose_turn_to_be_made_does_not_come_is_not_refused(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checks, "WAIT_SECONDS", 0.1)
    go_on = threading.Event()
    with pytest.raises(ApiError) as caught:
        await checks.checked(lambda: COLORS if go_on.wait(GENEROUS) else "", "guided")
    assert caught.value.status == 503 and "busy" in caught.value.message
    go_on.set()


async def stopped(checks: GrammarChecks) -> int:
    """A worker that answers nothing more; its pid."""
    assert await check(checks, COLORS) == COLORS
    pid = checks.workers._idle[-1].pid
    stand_still(pid)
    return pid


async def test_one_process_tries_all_large_and_hostile_grammars(checks: GrammarChecks, patient: None) -> None:
    for make in LARGE.values():
        assert await check(checks, grammar := make()) == grammar
    for make, reason in REFUSED.values():
        assert reason in await refused(checks, make)
    assert checks.workers.workers_lost == 0 and len(checks.workers._idle) == 1


async def test_a_grammar_that_overflows_the_stack_is_too_complex(
    checks: GrammarChecks, unbounded: None, patient: None
) -> None:
    assert await check(checks, COLORS) == COLORS
    pid = checks.workers._idle[-1].pid
    for lost in (1, 2):
        message = await refused(checks, json_schema_grammar(OVERFLOWING))
        assert message == "guided: too complex: checking it takes more time, memory or stack than allowed."
        assert checks.workers.workers_lost == lost
    other = regex_grammar("[a-z]+")
    assert await check(checks, other) == other
    assert checks.workers._idle[-1].pid != pid and inspect(pid) is None


async def test_a_process_that_is_killed_takes_its_grammar_along(checks: GrammarChecks) -> None:
    pid = await stopped(checks)
    checking = asyncio.ensure_future(refused(checks, regex_grammar("a+")))
    await until(lambda: bool(checks.workers._busy), what="the check has begun")
    os.kill(pid, signal.SIGKILL)
    assert "too complex" in await checking
    assert await check(checks, regex_grammar("a+"))


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
    assert limits["Max address space"] == str(1024 * MIB) and limits["Max core file size"] == "0"
    assert int(limits["Max cpu time"]) < 60


async def test_a_turn_that_does_not_come_is_no_fault_of_the_grammar(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stopped(checks)
    with monkeypatch.context() as patched:
        patched.setattr(grammar_checks, "WAIT_SECONDS", 0.1)
        assert "busy" in await refused(checks, regex_grammar("a+"), 503)
    assert await check(checks, regex_grammar("a+"))


async def test_a_grammar_that_takes_long_is_tried_again_apart(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of processor time ticks every few milliseconds: the grammar takes some ten."""
    monkeypatch.setattr(grammar_checks, "QUICK_SECONDS", 1e-6)
    inner = {"type": "object", "properties": {f"q{number}": {} for number in range(60)}}
    grammar = json_schema_grammar({"type": "object", "properties": {f"p{number}": inner for number in range(60)}})
    assert await check(checks, grammar) == grammar
    assert checks.workers.workers_lost == 1, "the first try ends by its time"
    monkeypatch.setattr(grammar_checks, "SLOW_SECONDS", 1e-6)
    assert checks.is_slow(grammar) and not checks.is_slow(COLORS)


async def test_while_slow_ones_are_tried_others_are_too(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    """One client's slow grammars wait for one that does not end; other grammars pass, those of that client too."""
    pid = await stopped(checks)
    monkeypatch.setattr(grammar_checks, "QUICK_SECONDS", 0.0)
    holding = asyncio.ensure_future(check(checks, regex_grammar("a+")))
    await until(lambda: bool(checks.workers._busy), what="the check has begun")
    for client in ("hostile", "other"):
        grammar = regex_grammar(f"b+{client}")
        assert await checks.checked(lambda text=grammar: text, "guided", client) == grammar
    os.kill(pid, signal.SIGCONT)
    assert await holding == regex_grammar("a+")


async def test_what_was_tried_is_not_tried_again(checks: GrammarChecks) -> None:
    wrong = regex_grammar("(?=a)a")
    assert "look-around" in await refused(checks, wrong)
    await stopped(checks)
    assert await check(checks, COLORS) == COLORS and "look-around" in await refused(checks, wrong)


async def test_few_results_are_remembered(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "_MOST_REMEMBERED", 2)
    for number in range(4):
        await check(checks, regex_grammar(f"a{number}"))
    assert len(checks._results) == 2


async def test_deaths_leave_nothing_behind(unbounded: None) -> None:
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


def test_a_check_has_less_than_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, stacks = threading.stack_size(), list[int]()
    monkeypatch.setattr(threading.Thread, "start", lambda thread: stacks.append(threading.stack_size()))
    deep_thread(int, "masks")
    assert stacks[0] >= 2 * CHECK_STACK_BYTES and threading.stack_size() == usual
    fuel = [name for name in LIMITS if type(LIMITS[name]) is int]
    assert "step_lexer_fuel" in fuel and all(2 * CHECK_LIMITS[name] <= LIMITS[name] for name in fuel)


def test_a_server_goes_on_after_a_grammar_that_kills(server: RunningServer, unbounded: None, patient: None) -> None:
    def ask(schema: object) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "guided_json": schema}
        return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=600)

    lost = server.context.grammars.workers.workers_lost
    response = ask(OVERFLOWING)
    assert response.status_code == 400 and "too complex" in response.json()["error"]["message"]
    assert server.context.grammars.workers.workers_lost == lost + 1
    assert ask({"type": "integer"}).status_code == 200
