"""The sleep of an idle engine: it is stopped, which frees the GPU and the memory of its process, and is started again
for the next request.

    awake -> asleep: Stop is sent, the process ends -> waking: it is started again -> awake

While it is not awake, commands are held, and they are sent in their order once the engine is ready.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from service.link.messages import Abort, ChatRequest, Command, EncodeReference, SpeechRequest
from service.metrics.metrics import Metrics

SleepState = Literal["awake", "asleep", "waking"]


class EngineSleep:
    """The state of one engine, and the commands that are held for it.

    after: seconds without a request after which the engine is stopped; None: never, or another process decides.
    clock: the clock of these seconds.
    metrics: None if another process reports the engine's metrics.
    """

    def __init__(self, after: float | None, clock: Callable[[], float], metrics: Metrics | None) -> None:
        self.state: SleepState = "awake"
        """asleep: from the command to stop until the next start. waking: from that start until it is ready."""
        self.on_call: Callable[[], None] = lambda: None
        """Called when the first request is held for a sleeping engine."""
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
        """Records that requests are in progress, or that the engine has just become ready."""
        self._busy_at = self._clock()

    @property
    def due(self) -> bool:
        """Whether an engine that is awake and ready has been idle for long enough."""
        return self._after is not None and self.awake and self._clock() - self._busy_at >= self._after

    def begin(self) -> None:
        """Starts to hold commands: the engine has been told to stop, or will be."""
        self.state = "asleep"
        self._called.clear()
        self._observe("engine_asleep", 1.0)

    def hold(self, command: Command) -> None:
        """Keeps a command until the engine is ready. A request wakes the engine, and an Abort removes the request that
        it is for; other commands are dropped if no request is held."""
        if isinstance(command, Abort):
            self._held = [held for held in self._held if getattr(held, "request_id", None) != command.request_id]
        elif isinstance(command, ChatRequest | SpeechRequest | EncodeReference):
            self._held.append(command)
            self.call()
        elif self._held:
            self._held.append(command)

    def call(self) -> None:
        """Wakes the engine, since a request needs it."""
        if self.state == "asleep" and not self._called.is_set():
            self._called.set()
            self._called_at = self._clock()
            self.on_call()

    async def called(self) -> None:
        """Waits until a request needs the engine."""
        await self._called.wait()

    def started(self) -> None:
        """Records that the engine is starting."""
        if self.state == "asleep":
            self.state = "waking"

    def end(self) -> list[Command]:
        """The engine is awake: returns the held commands in order. Requests count as arriving now, so that their wait
        for the start does not count as time in the queue."""
        self._observe("engine_wake_duration_seconds", self._clock() - self._called_at)
        return [_arriving(command) for command in self._awake()]

    def give_up(self) -> None:
        """Drops the held commands, since the engine could not be started."""
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
