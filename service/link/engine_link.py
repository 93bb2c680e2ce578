"""The API process's end of the link: starts an engine in a process or a thread, and reports how it ended. Each link
stands for one start of an engine; EngineClient makes a new one after a crash.
"""

from __future__ import annotations

import asyncio
import os
import queue
import shutil
import tempfile
import threading
from asyncio.subprocess import Process
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import zmq

from models.checkpoints.registry import resolve
from models.interfaces.errors import CheckpointError
from service.link.config import ConfigurationError, EngineConfig, EngineEntry
from service.link.engine_socket import EngineSocket, OnOutputs, discard
from service.link.messages import Command, Outputs, Stop
from service.link.process import CONFIGURATION_ERROR, SHARED
from service.link.shared import SUPERVISOR
from service.link.standby import ENTRY, EngineAddress, Standby, start_engine_process


class FollowedEngine:
    """What is known of an engine that another process supervises: where it runs, or that it does not run."""

    def __init__(self) -> None:
        self.address: str | None = None
        """Address of its current process; None if there is none."""
        self.problem = ""
        """Why this process cannot communicate with the engine; empty if it can."""
        self._changed = asyncio.Event()

    def tell(self, address: str | None) -> None:
        """Records what the supervising process reports."""
        self.address = address
        self._changed.set()

    async def started(self) -> None:
        """Waits until there is an engine process."""
        await self._until(lambda: self.address is not None)

    async def ended(self, address: str | None) -> None:
        """Waits until the engine process of that address is no longer the current one."""
        await self._until(lambda: self.address != address)

    def fail(self, problem: str) -> None:
        """Treats the engine as ended, so that its requests in this process fail at once."""
        self.problem = problem
        self.tell(None)

    async def failed(self) -> None:
        """Waits until this process cannot communicate with the engine, and so is of no more use."""
        await self._until(lambda: bool(self.problem))

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()


class AttachedLink:
    """Implements EngineLink for one start of an engine that another process supervises. Make it once `engine` has an
    address. peer: name of this process, which no other process has ever had."""

    def __init__(self, engine: FollowedEngine, peer: str) -> None:
        self.on_launch: Callable[[], None] = lambda: None
        self._engine = engine
        self._peer = peer
        self.send: Callable[[Command], None] = discard

    async def run(self, on_outputs: OnOutputs) -> EngineExit:
        address = self._engine.address
        if address is None:
            return EngineExit("it had ended already")
        try:
            socket = EngineSocket.attached(address, self._peer)
        except (OSError, zmq.ZMQError) as error:  # e.g. out of descriptors
            self._engine.fail(f"the engine could not be reached: {error}")
            return EngineExit("it could not be reached")
        self.send = socket.send
        reader = asyncio.create_task(socket.read(on_outputs), name="engine-reader")
        tasks = {reader, asyncio.create_task(self._engine.ended(address))}
        try:
            self.on_launch()
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                self._engine.fail(f"the engine's messages could not be read: {reader.exception()}")
            return EngineExit("its process has ended")
        finally:
            self.send = discard
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            socket.close()

    def kill(self) -> None:
        """The supervising process does that."""


PREFIX = "reprise-"
"""Of the directories of sockets."""
THREAD_END_SECONDS = 60.0
"""How long the end of an inline engine waits for its thread, which may be loading a model. An interpreter that exits
while the thread runs C++ code crashes."""


@dataclass(frozen=True)
class EngineExit:
    """How an engine ended."""

    reason: str


class EngineLink(Protocol):
    """An engine from one start to its end."""

    on_launch: Callable[[], None]
    """Called once the engine's process or thread runs. It loads afterwards."""

    async def run(self, on_outputs: OnOutputs) -> EngineExit:
        """Starts the engine and passes on what it sends, until it ends. When cancelled, kills it."""
        ...

    def send(self, command: Command) -> None:
        """Never blocks. Messages to an engine that has ended are lost."""
        ...

    def kill(self) -> None:
        """Kills it; run() then returns."""
        ...


def _nothing() -> None:
    """The default of on_launch."""


class ProcessLink:
    """An engine in a child process, over a Unix socket in a private directory.

    shared: once it is launched, other processes may attach themselves to the engine at `address` (attached.py); this
        one supervises it, and gets only metric events and the state.
    standby: the standby processes, which all starts of the engine share; None: there are none.
    """

    def __init__(
        self, config: EngineConfig, entry: str = ENTRY, *, shared: bool = False, standby: Standby | None = None
    ) -> None:
        self.on_launch: Callable[[], None] = _nothing
        self.send: Callable[[Command], None] = discard
        self.address = ""
        self._shared = shared
        self._standby = standby
        self._config = config
        self._entry = entry
        self._process: Process | None = None

    async def run(self, on_outputs: OnOutputs) -> EngineExit:
        with ExitStack() as opened:
            opened.callback(setattr, self, "send", discard)
            try:
                socket = self._open(opened)
                process = self._process = await self._start(self.address)
            except (OSError, zmq.ZMQError) as error:  # e.g. out of memory or descriptors: a later start may succeed
                return EngineExit(f"the engine process could not be started: {error}")
            self.on_launch()
            return await self._wait_for_end(process, socket, self._prepare_next(on_outputs))

    def _open(self, opened: ExitStack) -> EngineSocket:
        """The server's end of the connection, whose address the engine process gets."""
        directory = _directory_of_a_socket()
        opened.callback(shutil.rmtree, directory, ignore_errors=True)
        self.address = f"ipc://{directory}/engine"
        socket = EngineSocket.attached(self.address, SUPERVISOR) if self._shared else EngineSocket.bound(self.address)
        opened.callback(socket.close)
        self.send = socket.send
        return socket

    async def _start(self, address: str) -> Process:
        waiting = None if self._standby is None else await self._standby.take(EngineAddress(address, self._shared))
        if waiting is not None:
            return waiting
        return await start_engine_process(self._config, address, self._entry, *([SHARED] if self._shared else []))

    def _prepare_next(self, on_outputs: OnOutputs) -> OnOutputs:
        """A callback that calls `on_outputs` and prepares a standby process once the engine is ready."""
        standby = self._standby
        if standby is None:
            return on_outputs

        def heard(outputs: Outputs) -> None:
            on_outputs(outputs)
            if outputs.state is not None and outputs.state.phase == "ready":
                standby.prepare(self._config, self._entry, outputs.state.device)

        return heard

    async def _wait_for_end(self, process: Process, socket: EngineSocket, on_outputs: OnOutputs) -> EngineExit:
        """Passes on what the process sends, until it ends; returns how it ended."""
        reader = asyncio.create_task(socket.read(on_outputs))
        try:
            exited = asyncio.create_task(process.wait())
            await asyncio.wait({reader, exited}, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                if process.returncode is None:  # it may have ended in the same moment
                    process.kill()
                await exited
                return EngineExit(f"its messages could not be read: {reader.exception()}")
            status = exited.result()
            await self._drain(reader)
            if status == 0:
                return EngineExit("stopped")
            if status == CONFIGURATION_ERROR:
                return EngineExit("it cannot run as it is configured")
            cause = f"signal {-status}" if status < 0 else f"exit status {status}"
            return EngineExit(f"the engine process ended with {cause}")
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _drain(self, reader: asyncio.Task[None]) -> None:
        """Gives the reader time for messages that the process sent just before it ended."""
        await asyncio.wait({reader}, timeout=0.05)

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()


class InlineLink:
    """The same engine in a thread of this process: for tests, debugging and the command line."""

    def __init__(self, config: EngineConfig, entry: EngineEntry | str = ENTRY) -> None:
        self.on_launch: Callable[[], None] = _nothing
        self._config = config
        self._entry = entry
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()

    async def run(self, on_outputs: OnOutputs) -> EngineExit:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[EngineExit] = loop.create_future()

        def finish(exit: EngineExit) -> None:
            if not ended.done():
                ended.set_result(exit)

        def post(callback: Callable[..., None], *arguments: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(callback, *arguments)

        channel = InlineChannel(self._commands, lambda outputs: post(on_outputs, outputs))

        def live() -> None:
            exit = EngineExit("the engine thread failed; its traceback is on stderr")
            try:
                entry = resolve(self._entry) if isinstance(self._entry, str) else self._entry
                entry(self._config, channel)
                exit = EngineExit("stopped")
            except Abandoned:
                exit = EngineExit("stopped")
            except (CheckpointError, ConfigurationError) as error:
                exit = EngineExit(str(error))
            finally:
                post(finish, exit)

        thread = threading.Thread(target=live, name="engine", daemon=True)
        thread.start()
        self.on_launch()
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


def _directory_of_a_socket() -> Path:
    """A new directory, mode 0700: below TMPDIR, unless the path of a socket there would be longer than paths of sockets
    may be."""
    path = f"{tempfile.gettempdir()}/{PREFIX}01234567/engine"
    too_long = len(os.fsencode(path)) > zmq.IPC_PATH_MAX_LEN
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp" if too_long else None))


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
