"""An engine in a thread of the test's process."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable

from models.checkpoints.registry import resolve
from models.interfaces.errors import CheckpointError
from service.link.config import Channel, ConfigurationError, EngineConfig
from service.link.engine_link import ENTRY, OnOutputs
from service.link.messages import Command, Outputs, Stop

EngineEntry = Callable[[EngineConfig, Channel], None]
THREAD_END_SECONDS = 60.0
"""How long to wait for the thread, which may be loading a model. An interpreter that exits while the thread runs C++
code crashes."""


class InlineLink:
    """Implements EngineLink for an engine in a thread of this process."""

    def __init__(self, config: EngineConfig, entry: EngineEntry | str = ENTRY) -> None:
        self._config = config
        self._entry = entry
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()

    async def run(self, on_outputs: OnOutputs) -> str:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[str] = loop.create_future()

        def finish(exit: str) -> None:
            if not ended.done():
                ended.set_result(exit)

        def post(callback: Callable[..., None], *arguments: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(callback, *arguments)

        channel = InlineChannel(self._commands, lambda outputs: post(on_outputs, outputs))

        def live() -> None:
            exit = "the engine thread failed; its traceback is on stderr"
            try:
                entry = resolve(self._entry) if isinstance(self._entry, str) else self._entry
                entry(self._config, channel)
                exit = "stopped"
            except Abandoned:
                exit = "stopped"
            except (CheckpointError, ConfigurationError) as error:
                exit = str(error)
            finally:
                post(finish, exit)

        thread = threading.Thread(target=live, name="engine", daemon=True)
        thread.start()
        try:
            return await ended
        finally:
            channel.abandoned = True
            self.send(Stop())
            await asyncio.to_thread(thread.join, THREAD_END_SECONDS)

    def send(self, command: Command) -> None:
        self._commands.put(command)

    def kill(self) -> None:
        """Asks the engine to stop, since a thread cannot be killed."""
        self.send(Stop())


class Abandoned(Exception):
    """Raised when nobody listens to the engine any more."""


class InlineChannel:
    """Implements Channel for an engine in a thread: `send` calls `on_outputs` in that thread."""

    def __init__(self, commands: queue.SimpleQueue[Command], on_outputs: OnOutputs) -> None:
        self.abandoned = False
        self._commands = commands
        self._on_outputs = on_outputs

    def send(self, outputs: Outputs) -> None:
        """Raises Abandoned, which ends an engine that is loading or capturing and so reads no commands."""
        if self.abandoned:
            raise Abandoned
        self._on_outputs(outputs)

    def receive(self, timeout: float | None) -> list[Command]:
        commands: list[Command] = []
        try:
            commands.append(self._commands.get(timeout != 0, timeout))
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands
