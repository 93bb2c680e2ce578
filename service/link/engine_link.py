"""The API process's end of the link: starts an engine process, or follows one that the supervisor starts, and reports
how it ended. Each link stands for one start of an engine; EngineClient makes a new one after a crash.

Standby processes have imported what an engine imports, above all torch, before they become the engine at its next
start. The one for the first start imports while the server itself does. Those for restarts are started beside an engine
on a GPU, which they do not touch. Each ends with the process that started it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from models.interfaces import cpus
from service.link import wire
from service.link.config import EngineConfig
from service.link.messages import Attach, Command, Outputs
from service.system.children import python_command, python_environment, working_directory

SUPERVISOR = "supervisor"
"""Name of the peer that started the engine: only it may stop the engine or report that a peer is gone."""
_MESSAGES_A_TURN = 16
"""Number of messages that are read before other tasks of the event loop run, if the engine sends faster than they are
read."""
_RECONNECT_MS = 10
"""Milliseconds between two attempts to connect to an engine process that has not bound its socket yet."""

_DESCRIPTORS = 16
"""Descriptors that must be free; a socket and its context open about ten."""

OnOutputs = Callable[[Outputs], None]


def discard(command: Command) -> None:
    """The `send` of an engine that has no socket, since it has not been started or has ended: does nothing."""


def _nothing() -> None:
    """The callback of a socket that nobody reads."""


def _require_descriptors() -> None:
    """Raises OSError if there are too few free descriptors, for which ZeroMQ would end the whole process."""
    with ExitStack() as opened:
        for _ in range(_DESCRIPTORS):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))


class EngineSocket:
    """Sends commands, which never blocks, and reads outputs in an event loop. OSError without enough descriptors."""

    def __init__(self, address: str, peer: str) -> None:
        """address: the engine binds it, now or later. peer: name of this end."""
        _require_descriptors()
        self._context = zmq.Context()
        self.zmq: zmq.Socket = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 0), (zmq.RECONNECT_IVL, _RECONNECT_MS)):
            self.zmq.setsockopt(option, value)
        self.zmq.setsockopt(zmq.ROUTING_ID, peer.encode())
        self._look: Callable[[], None] = _nothing
        """Has messages read in the next turn of the reader's event loop, if there is a reader."""
        self.zmq.connect(address)
        self.send(Attach())

    def send(self, command: Command) -> None:
        frames = wire.encode(command)
        with suppress(zmq.Again):  # nobody at the other end: not yet, or not any more
            self.zmq.send_multipart(frames, zmq.NOBLOCK, copy=wire.is_small(frames))
        # The socket's descriptor is edge-triggered, and send has consumed its event: check for messages here.
        if int(self.zmq.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
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
            self._look = _nothing
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
STANDBY = "standby"
"""First argument of a standby process, in place of the engine's address, which it reads later from a second line."""
CONFIGURATION_ERROR = 3
"""Exit status of an engine that cannot start with its configuration; the log says why."""
PREPARE_AFTER = 5.0
"""Seconds from an engine's readiness until the standby process is started, so that it does not delay the first
requests."""
PREFIX = "reprise-"
"""Of the directories of sockets."""
START_TIMEOUT = 900.0
"""Seconds of silence after which an engine that loads or captures is restarted."""


async def start_engine_process(config: EngineConfig, address: str, entry: str) -> Process:
    """Starts `service.link.process ADDRESS ENTRY` and writes the configuration to its standard input. OSError if it
    cannot be started."""
    process = await asyncio.create_subprocess_exec(
        *python_command("service.link.process", address, entry),
        env=engine_environment(config),
        cwd=working_directory(),
        stdin=PIPE,
        start_new_session=True,  # Ctrl-C is for the API process, which drains first
    )
    _write_line(process, msgspec.json.encode(config))
    return process


def engine_environment(config: EngineConfig) -> dict[str, str]:
    device = {"CUDA_VISIBLE_DEVICES": config.gpu} if config.gpu else {}
    return python_environment() | thread_variables(config) | device


def _write_line(process: Process, line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line + b"\n")


class Standby:
    """Makes the link of each start of an engine, and keeps at most one standby process for the next. It belongs to one
    event loop and ends with it."""

    def __init__(self, config: EngineConfig, entry: str = ENTRY) -> None:
        self.config = config
        self._entry = entry
        self._keeper: asyncio.Task[None] | None = None
        self._process: Process | None = None

    def link(self, announce: Callable[[str | None], None] = lambda address: None) -> ProcessLink:
        """The link of the next start. A first start that fails is not repeated, so every later one is a restart."""
        config, self.config = self.config, msgspec.structs.replace(self.config, restarted=True)
        return ProcessLink(config, self._entry, standby=self, announce=announce)

    async def begin(self) -> None:
        """Starts the standby process for the engine's first start. If that fails, the engine's process is started
        later, which reports why it cannot be."""
        with suppress(OSError):
            process = self._process = await start_engine_process(self.config, STANDBY, self._entry)
            self._keeper = asyncio.create_task(self._watch(process), name="engine-standby")

    def prepare(self, device: str) -> None:
        """Starts the standby process for the next start of an engine that has become ready on `device`. An engine on a
        CPU starts fast without."""
        if self._keeper is None and device != "cpu":
            self._keeper = asyncio.create_task(self._keep(), name="engine-standby")

    async def _keep(self) -> None:
        await asyncio.sleep(PREPARE_AFTER)
        restart = msgspec.structs.replace(self.config, restarted=True)
        try:
            process = self._process = await start_engine_process(restart, STANDBY, self._entry)
        except OSError as error:
            log.warning("no process can stand by for the next start of the engine: %s", error)
            return
        await self._watch(process)

    async def _watch(self, process: Process) -> None:
        """Watches the process until it is taken. If it ends by itself, it is not replaced before the engine's next
        start."""
        try:
            status = await process.wait()
            if self._process is process:
                log.warning("the process that stood by for the engine has ended (%d)", status)
        finally:
            if self._process is process:
                self._process = None
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    async def take(self, address: str) -> Process | None:
        """Turns the standby process into the engine at this address and returns it; None if there is none."""
        process, self._process = self._process, None
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        if process is None or process.returncode is not None:
            return None
        _write_line(process, msgspec.json.encode(address))
        return process


async def begin_engines(configs: Sequence[EngineConfig]) -> list[Standby]:
    """Starts the standby processes for the engines' first starts. The server must run in the same event loop."""
    standbys = [Standby(config) for config in configs]
    for standby in standbys:
        await standby.begin()
    return standbys


class EngineLink(Protocol):
    """An engine from one start to its end."""

    on_launch: Callable[[], None]
    """Called once the engine's process runs. It loads afterwards."""

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


class ProcessLink:
    """An engine in a child process, over a Unix socket in a private directory. Its peer is the engine's supervisor: it
    may stop it and gets its metric events.

    standby: the standby processes, which all starts of the engine share; None: there are none.
    announce: called with the engine's address, at which other processes may attach themselves to it, once its process
        runs, and with None when it has ended.
    """

    def __init__(
        self,
        config: EngineConfig,
        entry: str = ENTRY,
        *,
        standby: Standby | None = None,
        announce: Callable[[str | None], None] = lambda address: None,
    ) -> None:
        self.on_launch: Callable[[], None] = lambda: None
        self.send: Callable[[Command], None] = discard
        self._standby = standby
        self._announce = announce
        self._config = config
        self._entry = entry
        self._process: Process | None = None

    async def run(self, on_outputs: OnOutputs) -> str:
        with ExitStack() as opened:
            opened.callback(self._announce, None)
            opened.callback(setattr, self, "send", discard)
            try:
                directory = _directory_of_a_socket()
                opened.callback(shutil.rmtree, directory, ignore_errors=True)
                address = f"ipc://{directory}/engine"
                socket = EngineSocket(address, SUPERVISOR)
                opened.callback(socket.close)
                self.send = socket.send
                process = self._process = await self._start(address)
            except (OSError, zmq.ZMQError) as error:  # e.g. out of memory or descriptors: a later start may succeed
                return f"the engine process could not be started: {error}"
            self._announce(address)
            self.on_launch()
            return await self._wait_for_end(process, socket, self._prepare_next(on_outputs))

    async def _start(self, address: str) -> Process:
        waiting = None if self._standby is None else await self._standby.take(address)
        return waiting or await start_engine_process(self._config, address, self._entry)

    def _prepare_next(self, on_outputs: OnOutputs) -> OnOutputs:
        """A callback that calls `on_outputs` and prepares a standby process once the engine is ready."""
        standby = self._standby
        if standby is None:
            return on_outputs

        def heard(outputs: Outputs) -> None:
            on_outputs(outputs)
            if outputs.state is not None and outputs.state.phase == "ready":
                standby.prepare(outputs.state.device)

        return heard

    async def _wait_for_end(self, process: Process, socket: EngineSocket, on_outputs: OnOutputs) -> str:
        """Passes on what the process sends, until it ends; returns how it ended."""
        reader = asyncio.create_task(socket.read(on_outputs))
        try:
            exited = asyncio.create_task(process.wait())
            await asyncio.wait({reader, exited}, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                if process.returncode is None:  # it may have ended in the same moment
                    process.kill()
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
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            if process.returncode is None:
                process.kill()
                await process.wait()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()


def _directory_of_a_socket() -> Path:
    """A new directory, mode 0700: below TMPDIR, unless the path of a socket there would be longer than paths of sockets
    may be."""
    path = f"{tempfile.gettempdir()}/{PREFIX}01234567/engine"
    too_long = len(os.fsencode(path)) > zmq.IPC_PATH_MAX_LEN
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp" if too_long else None))


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

    async def run(self, on_outputs: OnOutputs) -> str:
        address = self._engine.address
        if address is None:
            return "it had ended already"
        try:
            socket = EngineSocket(address, self._peer)
        except (OSError, zmq.ZMQError) as error:  # e.g. out of descriptors
            self._engine.fail(f"the engine could not be reached: {error}")
            return "it could not be reached"
        self.send = socket.send
        reader = asyncio.create_task(socket.read(on_outputs), name="engine-reader")
        tasks = {reader, asyncio.create_task(self._engine.ended(address))}
        try:
            self.on_launch()
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                self._engine.fail(f"the engine's messages could not be read: {reader.exception()}")
            return "its process has ended"
        finally:
            self.send = discard
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            socket.close()

    def kill(self) -> None:
        """The supervising process does that."""
