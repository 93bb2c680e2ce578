"""The API process's end of the link: starts an engine process, or follows one that the supervisor starts, and reports
how it ended. Each link stands for one start of an engine; EngineClient makes a new one after a crash.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from models.interfaces import cpus
from service.link import wire
from service.link.config import EngineConfig
from service.link.messages import Attach, Command, Outputs
from service.system.children import python_command, python_environment

SUPERVISOR = "supervisor"
"""Name of the peer that started the engine: only it may stop the engine or report that a peer is gone."""
_MESSAGES_A_TURN = 16
"""Number of messages that are read before other tasks of the event loop run, if the engine sends faster than they are
read."""
_RECONNECT_MS = 10
"""Milliseconds between two attempts to connect to an engine process that has not bound its socket yet."""

OnOutputs = Callable[[Outputs], None]


def discard(command: Command) -> None:
    """The `send` of an engine that has no socket, since it has not been started or has ended: does nothing."""


class EngineSocket:
    """Sends commands, which never blocks, and reads outputs in an event loop."""

    def __init__(self, address: str, peer: str) -> None:
        """address: the engine binds it, now or later. peer: name of this end."""
        self._context = zmq.Context()
        self.zmq: zmq.Socket = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 0), (zmq.RECONNECT_IVL, _RECONNECT_MS)):
            self.zmq.setsockopt(option, value)
        self.zmq.setsockopt(zmq.ROUTING_ID, peer.encode())
        self._look: Callable[[], None] | None = None
        """Has messages read in the next turn of the reader's event loop; None if there is no reader."""
        self.zmq.connect(address)
        self.send(Attach())

    def send(self, command: Command) -> None:
        frames = wire.encode(command)
        with suppress(zmq.Again):  # nobody at the other end: not yet, or not any more
            self.zmq.send_multipart(frames, zmq.NOBLOCK, copy=wire.is_small(frames))
        # The socket's descriptor is edge-triggered, and send has consumed its event: check for messages here.
        if int(self.zmq.getsockopt(zmq.EVENTS)) & zmq.POLLIN and self._look is not None:
            self._look()

    async def read(self, on_outputs: OnOutputs) -> None:
        """Reads messages until cancelled; raises what reading a message raises.

        A message is read in the turn of the event loop in which it arrives. zmq.asyncio would need several futures and
        callbacks per message, and a waiting task one more turn.
        """
        decoder: wire.MessageDecoder[Outputs] = wire.MessageDecoder(Outputs)
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def take() -> None:
            if ended.done():  # after this call was scheduled
                return
            try:
                for _ in range(_MESSAGES_A_TURN):
                    frames = self.zmq.recv_multipart(zmq.NOBLOCK, copy=False)
                    on_outputs(decoder.decode([frame.buffer for frame in frames]))
            except zmq.Again:
                return
            except Exception as error:
                ended.set_exception(error)
                return
            look()

        def look() -> None:
            loop.call_soon(take)

        descriptor: int = self.zmq.FD
        self._look = look
        loop.add_reader(descriptor, take)
        look()
        try:
            await ended
        finally:
            self._look = None
            loop.remove_reader(descriptor)
            ended.cancel()

    def close(self) -> None:
        self.zmq.close()
        self._context.term()


log = logging.getLogger(__name__)

# Threads that compute on the host, and how they wait for each other.
#
# torch's threads synchronise at the end of each operation. By default, waiting OpenMP threads spin, each on a whole
# processor. If the machine has other work, they keep the thread that they wait for from running, and a step takes as
# long as the scheduler's time slices. So here waiting threads sleep.

MAX_THREADS = 16
"""Limit of the default, since each operation waits for its slowest thread."""
SMALL_BYTES = 64 << 20
"""With fewer bytes of weights than this, an operation ends before a second thread has woken up. On two idle processors
an embedded model takes 38 ms for an answer of 16 tokens with two spinning threads, 74 ms with two sleeping ones, and 39
ms with one."""


def num_threads(config: EngineConfig, environ: Mapping[str, str] = os.environ) -> int:
    """The setting `threads`, else OMP_NUM_THREADS, else one for small models, else one for each usable processor up to
    MAX_THREADS. Several engines divide the processors."""
    if config.threads is not None:
        return config.threads
    named = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if named.isdecimal() and int(named) > 0:
        return int(named)
    return 1 if _are_small(config) else min(MAX_THREADS, max(1, cpus.available() // config.sharers))


def thread_variables(config: EngineConfig, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables for a process that will load torch. Variables that the operator has set are kept.

    GNU's OpenMP reads OMP_WAIT_POLICY, LLVM's and Intel's KMP_BLOCKTIME (milliseconds); OpenBLAS and MKL take their
    number of threads from OMP_NUM_THREADS.
    """
    waiting = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
    if "OMP_WAIT_POLICY" in environ:  # which Intel's library reads only if its own variable is not set
        waiting = {}
    kept = {name: value for name, value in waiting.items() if name not in environ}
    return kept | {"OMP_NUM_THREADS": str(num_threads(config, environ))}


def _are_small(config: EngineConfig) -> bool:
    """Whether the weights of all models together are small; False if there are no files (random weights)."""
    sizes = [path.stat().st_size for model in config.models for path in Path(model.directory).glob("*.safetensors")]
    return 0 < sum(sizes) < SMALL_BYTES


ENTRY = "service.engine.start:serve"
"""The function that an engine process runs."""
CONFIGURATION_ERROR = 3
"""Exit status of an engine that cannot start with its configuration; the log says why."""
PREFIX = "reprise-"
"""Of the directories of sockets."""
START_TIMEOUT = 900.0
"""Seconds of silence after which an engine that loads or captures is restarted."""


def engine_environment(config: EngineConfig) -> dict[str, str]:
    device = {"CUDA_VISIBLE_DEVICES": config.gpu} if config.gpu else {}
    return python_environment() | thread_variables(config) | device


@dataclass(eq=False)
class EngineProcess:
    """The process of an engine, and the private directory of the socket that it binds."""

    process: Process
    directory: tempfile.TemporaryDirectory[str]
    address: str

    @classmethod
    async def start(cls, config: EngineConfig, entry: str) -> EngineProcess:
        """Start `service.link.process ADDRESS ENTRY`, and write the configuration to its standard input. OSError if it
        cannot be started."""
        # Below TMPDIR, unless the path of a socket there would be longer than paths of sockets may be.
        path = os.fsencode(f"{tempfile.gettempdir()}/{PREFIX}01234567/engine")
        parent = "/tmp" if len(path) > zmq.IPC_PATH_MAX_LEN else None
        directory = tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True)
        address = f"ipc://{directory.name}/engine"
        process = await asyncio.create_subprocess_exec(
            *python_command("service.link.process", address, entry),
            env=engine_environment(config),
            stdin=PIPE,
            start_new_session=True,  # Ctrl-C is for the API process, which drains first
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        return cls(process, directory, address)

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()

    async def end(self) -> None:
        """Kill the process if it still runs, and remove the directory."""
        self.kill()
        await self.process.wait()
        self.directory.cleanup()


class EngineStarts:
    """Makes the link of each start of an engine. Every start but the first is a restart."""

    def __init__(self, config: EngineConfig, entry: str = ENTRY) -> None:
        self.config = config
        self._entry = entry
        self._begun: EngineProcess | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Start the process of the first link, which imports torch while this process imports the server. If that
        fails, the link tries again, and reports why it cannot be started."""
        with suppress(OSError):
            self._begun = await EngineProcess.start(self.config, self._entry)
            self._keeper = asyncio.create_task(self._keep(self._begun))

    async def _keep(self, engine: EngineProcess) -> None:
        """End a process that no link has taken when the event loop ends, as where the server cannot start."""
        try:
            await engine.process.wait()
        finally:
            if self._begun is engine:
                await engine.end()

    def link(self, announce: Callable[[str | None], None] = lambda address: None) -> ProcessLink:
        """The link of the next start."""
        link = ProcessLink(self.config, self._entry, begun=self._begun, announce=announce)
        self.config, self._begun = msgspec.structs.replace(self.config, restarted=True), None
        return link


async def begin_engines(configs: Sequence[EngineConfig]) -> list[EngineStarts]:
    """Start the processes of the engines' first starts. The server must run in the same event loop."""
    starts = [EngineStarts(config) for config in configs]
    for each in starts:
        await each.begin()
    return starts


class EngineLink(Protocol):
    """An engine from one start to its end."""

    async def run(self, on_outputs: OnOutputs) -> str:
        """Starts the engine and passes on what it sends, until it ends; returns how it ended. When cancelled, kills
        it."""
        ...

    def send(self, command: Command) -> None:
        """Never blocks. Messages to an engine that has ended are lost."""
        ...

    def kill(self) -> None:
        """Kills it; run() then returns."""
        ...


@dataclass(eq=False)
class ProcessLink:
    """An engine in a child process, over a Unix socket in a private directory. Its peer is the engine's supervisor: it
    may stop it and gets its metric events.

    begun: the process, if it was started already.
    announce: called with the engine's address, at which other processes may attach themselves to it, once its process
        runs, and with None when it has ended.
    """

    config: EngineConfig
    entry: str = ENTRY
    _: KW_ONLY
    begun: EngineProcess | None = None
    announce: Callable[[str | None], None] = lambda address: None
    send: Callable[[Command], None] = field(default=discard, init=False)

    async def run(self, on_outputs: OnOutputs) -> str:
        async with AsyncExitStack() as opened:
            opened.callback(self.announce, None)
            opened.callback(setattr, self, "send", discard)
            try:
                engine = self.begun = self.begun or await EngineProcess.start(self.config, self.entry)
                opened.push_async_callback(engine.end)
                socket = EngineSocket(engine.address, SUPERVISOR)
            except (OSError, zmq.ZMQError) as error:  # e.g. out of memory or descriptors: a later start may succeed
                return f"the engine process could not be started: {error}"
            opened.callback(socket.close)
            self.send = socket.send
            self.announce(engine.address)
            reader = asyncio.create_task(socket.read(on_outputs))
            try:
                return await self._wait_for_end(engine, reader)
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)

    async def _wait_for_end(self, engine: EngineProcess, reader: asyncio.Task[None]) -> str:
        """Wait until the process or the reader of its messages has ended; return how."""
        exited = asyncio.create_task(engine.process.wait())
        await asyncio.wait({reader, exited}, return_when=asyncio.FIRST_COMPLETED)
        if reader.done():
            engine.kill()
            await exited
            return f"its messages could not be read: {reader.exception()}"
        status = exited.result()
        await asyncio.wait({reader}, timeout=0.05)  # for messages that it sent just before it ended
        if status == 0:
            return "stopped"
        if status == CONFIGURATION_ERROR:
            return "it cannot run as it is configured"
        cause = f"signal {-status}" if status < 0 else f"exit status {status}"
        return f"the engine process ended with {cause}"

    def kill(self) -> None:
        if self.begun is not None:
            self.begun.kill()


@dataclass(eq=False)
class AttachedLink:
    """Implements EngineLink for an engine that another process has started; it reads until it is cancelled.

    address: of the engine's socket. peer: name of this process, which no other process has ever had. fail: called with
    the reason if this process cannot communicate with the engine, and so is of no more use.
    """

    address: str
    peer: str
    fail: Callable[[str], None]
    send: Callable[[Command], None] = discard

    async def run(self, on_outputs: OnOutputs) -> str:
        try:
            socket = EngineSocket(self.address, self.peer)
        except (OSError, zmq.ZMQError) as error:  # e.g. out of descriptors
            self.fail(f"the engine could not be reached: {error}")
            return "it could not be reached"
        self.send = socket.send
        try:
            await socket.read(on_outputs)
        except Exception as error:
            self.fail(f"the engine's messages could not be read: {error}")
        finally:
            self.send = discard
            socket.close()
        return "its messages could not be read"

    def kill(self) -> None:
        """The supervising process does that."""
