"""When an engine counts as hung: by a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from service.api.engines.engine_client import EngineClient
from service.link.engine_link import OnOutputs
from service.link.messages import Command, EngineState, Outputs
from service.metrics.metrics import Metrics
from service.system import children
from tests.support.inline_engine import InlineEngine


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class QuietLink:
    """An engine that says what the test has it say, until it is killed."""

    def __init__(self) -> None:
        self.killed = asyncio.Event()
        self.started = asyncio.Event()

    async def run(self, on_outputs: OnOutputs) -> str:
        self.say = on_outputs
        self.started.set()
        await self.killed.wait()
        return "killed"

    def send(self, command: Command) -> None: ...

    def kill(self) -> None:
        self.killed.set()


def state(phase: str, *, occupied: bool = False) -> Outputs:
    return Outputs(state=EngineState(phase, "", (), 0, occupied=occupied))


class Watched:
    """A client at a clock of its own, whose engine is ready and has been ready."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.link = QuietLink()
        self.client = EngineClient(
            lambda: self.link, Metrics(), hang_timeout=30.0, start_timeout=900.0, clock=self.clock
        )

    async def passes(self, seconds: float, step: float) -> None:
        """Time passes; the watchdog looks after each step."""
        for _ in range(round(seconds / step)):
            self.clock.now += step
            for _ in range(3):
                await asyncio.sleep(0)


@pytest.fixture
async def watched(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    monkeypatch.setattr(children, "CHECK_SECONDS", 0)
    made = Watched()
    made.client.start()
    await made.link.started.wait()
    made.link.say(state("ready"))
    yield made
    await made.client.stop(grace=0.0)


async def test_a_silent_engine_is_killed(watched: Watched) -> None:
    await watched.passes(29, 0.5)
    assert watched.client.alive and not watched.link.killed.is_set()
    await watched.passes(2, 0.5)
    assert watched.link.killed.is_set()


async def test_an_own_absence_does_not_count(watched: Watched) -> None:
    await watched.passes(20, 0.5)
    await watched.passes(3600, 3600)
    assert watched.client.alive and not watched.link.killed.is_set()
    watched.link.say(state("ready"))
    await watched.passes(29, 0.5)
    assert not watched.link.killed.is_set()


async def test_a_capture_is_no_hang(watched: Watched) -> None:
    watched.link.say(state("ready", occupied=True))
    await watched.passes(600, 0.5)
    assert watched.client.alive and watched.client.ready and not watched.link.killed.is_set()
    watched.link.say(state("ready"))
    await watched.passes(31, 0.5)
    assert watched.link.killed.is_set()


async def test_a_capture_that_never_ends_is_one(watched: Watched) -> None:
    watched.link.say(state("ready", occupied=True))
    await watched.passes(901, 0.5)
    assert watched.link.killed.is_set()


@torch.inference_mode()
def test_captures_are_announced_before_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = InlineEngine()
    rig.engine._busy_at = float("-inf")
    last: list[bool] = []

    def capture(*, idle: bool) -> bool:
        (said,) = [outputs.state for outputs in rig.channel.outputs[-1:]]
        last.append(said is not None and said.phase == "ready" and said.occupied)
        raise RuntimeError("the device failed")

    monkeypatch.setattr(rig.engine._runners[0], "capture_next", capture)
    with pytest.raises(RuntimeError, match="the device failed"):
        rig.turn()
    assert last == [True]
    said = rig.channel.outputs[-1].state
    assert said is not None and not said.occupied
