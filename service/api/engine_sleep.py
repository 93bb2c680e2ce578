"""An idle engine is stopped, which gives back the GPU and the process' memory, and started again for a request.

    awake -> asleep: Stop was sent, the process ends or has ended -> waking: it is started again -> awake

While it is not awake commands are held, in their order, and sent once the engine is ready.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from service.link.messages import Abort, ChatRequest, Command, EncodeReference, SpeechRequest


class EngineSleep:
    """after: seconds without a request until the engine is stopped; None: never. clock: what they are measured by."""

    def __init__(self, after: float | None, clock: Callable[[], float]) -> None:
        self.state: Literal["awake", "asleep", "waking"] = "awake"
        self._after = after
        self._clock = clock
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
        """The engine is told to stop."""
        self.state = "asleep"
        self._called.clear()

    def hold(self, command: Command) -> None:
        """Keeps a command for the engine that will be started. A request calls for it, and an Abort takes it back;
        anything else is of no use without requests."""
        if isinstance(command, Abort):
            self._held = [held for held in self._held if getattr(held, "request_id", None) != command.request_id]
        elif isinstance(command, ChatRequest | SpeechRequest | EncodeReference):
            self._held.append(command)
            if not self._called.is_set():
                self._called.set()
                self._called_at = self._clock()
        elif self._held:
            self._held.append(command)

    async def called(self) -> None:
        """Until a request wants the engine."""
        await self._called.wait()
        self.state = "waking"

    def end(self) -> float:
        """The engine is awake, or could not be started. Seconds since it was called."""
        self.state = "awake"
        self.note_work()
        return self._clock() - self._called_at

    def take(self) -> list[Command]:
        """What was held, in order. Requests arrive at the engine now: their wait for it is not one in its queue."""
        held, self._held = self._held, []
        return [_arriving(command) for command in held]


def _arriving(command: Command) -> Command:
    if isinstance(command, ChatRequest | SpeechRequest | EncodeReference):
        return msgspec.structs.replace(command, arrival=time.monotonic())
    return command
