"""An idle engine is stopped, which gives back the GPU and the process' memory, and started again for a request.

    awake -> asleep: what comes is held; Stop is sent, the process ends -> waking: it is started again -> awake

While it is not awake commands are held, in their order, and sent once the engine is ready.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from service.link.messages import Abort, ChatRequest, Command, EncodeReference, SpeechRequest
from service.metrics import Metrics

SleepState = Literal["awake", "asleep", "waking"]


class EngineSleep:
    """after: seconds without a request until the engine is stopped; None: never, or others decide. clock: what they are
    measured by. metrics: None where another process tells of the engine."""

    def __init__(self, after: float | None, clock: Callable[[], float], metrics: Metrics | None = None) -> None:
        self.state: SleepState = "awake"
        """asleep: from when it is told to stop until it is started; waking: until it is ready."""
        self.on_call: Callable[[], None] = lambda: None
        """Called when a request is held for an engine that nobody has called yet."""
        self._after = after
        self._clock = clock
        self._metrics = metrics
        self._busy_at = clock()
        self._called = asyncio.Event()
        self._called_at = 0.0
        self._held: list[Command] = []

    @property
    def awake(self) -> bool:
        return self.state == "awake"

    def note_work(self) -> None:
        """Requests are in progress, or the engine has just become ready."""
        self._busy_at = self._clock()

    @property
    def due(self) -> bool:
        """An engine that is awake and ready has been idle for long enough."""
        return self._after is not None and self.awake and self._clock() - self._busy_at >= self._after

    def begin(self) -> None:
        """The engine is told to stop, or will be."""
        self.state = "asleep"
        self._called.clear()
        self._observe("engine_asleep", 1.0)

    def hold(self, command: Command) -> None:
        """Keeps a command for the engine that will be started. A request calls for it, and an Abort takes it back;
        anything else is of no use without requests."""
        if isinstance(command, Abort):
            self._held = [held for held in self._held if getattr(held, "request_id", None) != command.request_id]
        elif isinstance(command, ChatRequest | SpeechRequest | EncodeReference):
            self._held.append(command)
            self.call()
        elif self._held:
            self._held.append(command)

    def call(self) -> None:
        """A request wants the engine."""
        if self.state == "asleep" and not self._called.is_set():
            self._called.set()
            self._called_at = self._clock()
            self.on_call()

    async def called(self) -> None:
        """Until a request wants the engine."""
        await self._called.wait()

    def started(self) -> None:
        """A life of the engine begins."""
        if self.state == "asleep":
            self.state = "waking"

    def end(self) -> list[Command]:
        """The engine is awake: what was held for it, in order. Requests arrive at the engine now: their wait for it is
        not one in its queue."""
        self._observe("engine_wake_duration_seconds", self._clock() - self._called_at)
        return [_arriving(command) for command in self._awake()]

    def give_up(self) -> None:
        """The engine could not be started: what was held is dropped."""
        self._awake()

    def _awake(self) -> list[Command]:
        self.state = "awake"
        self.note_work()
        self._observe("engine_asleep", 0.0)
        held, self._held = self._held, []
        return held

    def _observe(self, name: str, value: float) -> None:
        if self._metrics is not None:
            self._metrics.observe(name, value)


def _arriving(command: Command) -> Command:
    if isinstance(command, ChatRequest | SpeechRequest | EncodeReference):
        return msgspec.structs.replace(command, arrival=time.monotonic())
    return command
