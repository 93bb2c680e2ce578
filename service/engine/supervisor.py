"""The API process' end of the link: starts an engine in a process or a thread and says when it ends.

One object is one life of an engine; client.py makes a new one after a crash.
"""

from __future__ import annotations

import asyncio
import queue
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from models.errors import CheckpointError
from models.registry import resolve
from service.engine import wire
from service.engine.config import ConfigurationError, EngineConfig, EngineEntry
from service.engine.messages import Command, Outputs, Stop
from service.engine.process import CONFIGURATION_ERROR

ENTRY = "service.engine.engine:serve"

THREAD_END_SECONDS = 60.0
"""A thread that loads a model ends when it has loaded it. One that a dying interpreter meets in C++ takes it down."""

_MESSAGES_A_TURN = 16
"""Of an engine that sends faster than they are read, between two looks at the sockets of clients."""

OnOutputs = Callable[[Outputs], None]


class EngineExit(msgspec.Struct, frozen=True):
    """How an engine ended."""

    reason: str


class EngineLink(Protocol):
    """One life of an engine."""

    async def run(self, on_outputs: OnOutputs) -> EngineExit:
        """Start the engine and hand over what it sends, until it ends. When cancelled, the engine is killed."""
        ...

    def send(self, command: Command) -> None:
        """Never blocks. What is sent to an engine that has ended is lost."""
        ...

    def kill(self) -> None:
        """End it without ceremony; run() then returns."""
        ...


class ProcessLink:
    """An engine in a child process, over a ZeroMQ pair on a Unix socket in a private directory."""

    def __init__(self, config: EngineConfig, entry: str = ENTRY) -> None:
        self._config = config
        self._entry = entry
        self._process: asyncio.subprocess.Process | None = None
        self._socket: zmq.Socket | None = None
        self._news = asyncio.Event()
        """There may be something to read."""

    async def run(self, on_outputs: OnOutputs) -> EngineExit:
        directory = Path(tempfile.mkdtemp(prefix="reprise-"))  # mode 0700
        address = f"ipc://{directory}/engine"
        context = zmq.Context()
        socket = context.socket(zmq.PAIR)
        try:
            for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 0)):
                socket.setsockopt(option, value)
            socket.bind(address)
            self._socket = socket
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "service.engine.process", address, self._entry,
                    stdin=asyncio.subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C is for the API process, which drains first
                )  # fmt: skip
            except OSError as error:  # For want of memory, too: a later start may succeed.
                return EngineExit(f"the engine process could not be started: {error}")
            self._process = process
            return await self._live(process, socket, on_outputs)
        finally:
            self._socket = None
            socket.close()
            context.term()
            shutil.rmtree(directory, ignore_errors=True)

    async def _live(self, process: asyncio.subprocess.Process, socket: zmq.Socket, on_outputs: OnOutputs) -> EngineExit:
        """From the configuration that the process reads first to its end."""
        reader = asyncio.create_task(self._read(socket, on_outputs))
        try:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(self._config) + b"\n")
            exited = asyncio.create_task(process.wait())
            await asyncio.wait({reader, exited}, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
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

    async def _read(self, socket: zmq.Socket, on_outputs: OnOutputs) -> None:
        """zmq.asyncio does the same with several futures and callbacks for each message, sent or received."""
        decoder = wire.outputs_decoder()
        loop = asyncio.get_running_loop()
        descriptor: int = socket.FD
        loop.add_reader(descriptor, self._news.set)
        try:
            while True:
                self._news.clear()
                with suppress(zmq.Again):
                    for _ in range(_MESSAGES_A_TURN):
                        frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                        on_outputs(decoder.decode([frame.buffer for frame in frames]))
                    self._news.set()
                    await asyncio.sleep(0)
                await self._news.wait()
        finally:
            loop.remove_reader(descriptor)

    async def _drain(self, reader: asyncio.Task[None]) -> None:
        """Let the reader take what a process sent just before it ended."""
        await asyncio.wait({reader}, timeout=0.05)

    def send(self, command: Command) -> None:
        if self._socket is not None:
            with suppress(zmq.Again):  # nobody at the other end: not yet, or not any more
                self._socket.send_multipart(wire.encode(command), zmq.NOBLOCK, copy=False)
            # The descriptor tells of a message once: what sending has seen of it nobody will hear of again.
            if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._news.set()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()


class InlineLink:
    """The same engine in a thread of this process: for tests, debugging and the command line."""

    def __init__(self, config: EngineConfig, entry: EngineEntry | str = ENTRY) -> None:
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
        try:
            return await ended
        finally:
            channel.abandoned = True
            self.send(Stop())
            await asyncio.to_thread(thread.join, THREAD_END_SECONDS)

    def send(self, command: Command) -> None:
        self._commands.put(command)

    def kill(self) -> None:
        """A thread cannot be killed: it is asked to stop."""
        self.send(Stop())


class Abandoned(Exception):
    """Nobody listens to the engine any more."""


class InlineChannel:
    def __init__(self, commands: queue.SimpleQueue[Command], on_outputs: OnOutputs) -> None:
        self.abandoned = False
        self._commands = commands
        self._on_outputs = on_outputs

    def send(self, outputs: Outputs) -> None:
        """Abandoned ends an engine that loads or captures, and so reads no commands, between two of its steps."""
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
