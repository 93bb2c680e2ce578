"""Confined workers: processes that read untrusted input under limits on memory and time. They are killed and replaced
when they exceed them. Media are decoded in some, grammars are checked in others."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from models.interfaces.errors import InputError
from service.confined.channel import ProtocolError, WorkerChannel
from service.system.children import python_command, python_environment
from service.system.concurrency import shielded

log = logging.getLogger(__name__)


class FairSemaphore:
    """Admits at most `size` holders at a time, of one client at most `each` where that is given. Clients take turns,
    each one's requests in their order. Belongs to one event loop."""

    def __init__(self, size: int, each: int | None = None) -> None:
        self._free = size
        self._each = size if each is None else each
        self._held: Counter[str] = Counter()
        """How often clients hold it."""
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Waiting requests by client; the client that gets it next comes first."""

    @asynccontextmanager
    async def acquire(self, client: str) -> AsyncIterator[None]:
        """Waits for the semaphore, and releases it at the end."""
        await self._wait(client)
        try:
            yield
        finally:
            self._release(client)

    async def _wait(self, client: str) -> None:
        # If it is free, every waiting client holds it as often as one client may.
        if self._free and self._held[client] < self._each:
            self._take(client)
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._release(client)  # It was granted in the same turn of the loop that cancelled it.
            raise

    def _take(self, client: str) -> None:
        self._free -= 1
        self._held[client] += 1

    def _release(self, client: str) -> None:
        """Grants it to the next waiting client that may have it; requests that were cancelled in the meantime are
        skipped."""
        self._free += 1
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        for waiting in tuple(self._waiting):
            if self._held[waiting] < self._each and self._granted(waiting):
                return

    def _granted(self, client: str) -> bool:
        """Whether a request of a waiting client took it."""
        queue = self._waiting.pop(client)
        while queue:
            granted = queue.popleft()
            if not granted.done():
                self._take(client)
                granted.set_result(None)
                if queue:
                    self._waiting[client] = queue  # behind the other clients
                return True
        return False


T = TypeVar("T")
MIB = 1 << 20


@dataclass(frozen=True)
class WorkerLimits:
    """What a job may cost its worker process before it is killed and replaced.

    memory_bytes: address space (RLIMIT_AS). cpu_seconds: processor time of one job (RLIMIT_CPU).
    wall_seconds: time from the job's start to its last byte.
    """

    memory_bytes: int = 3072 * MIB
    cpu_seconds: int = 30
    wall_seconds: float = 60.0


class WorkerLost(Exception):
    """The worker died or exceeded a limit during a job."""


@dataclass(frozen=True)
class Program:
    """What a worker runs: `module <socket fd> <memory bytes> <cpu seconds>`. replies: the union of its messages."""

    module: str
    replies: Any


class Worker:
    """A confined process and the channel to it."""

    def __init__(self, limits: WorkerLimits, program: Program) -> None:
        self._limits, self._module = limits, program.module
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                python_command(program.module, *map(str, (theirs.fileno(), limits.memory_bytes, limits.cpu_seconds))),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=_environment(),
            )
        self.channel = WorkerChannel(ours, program.replies)
        self.lost = False
        """Killed; must not be used again."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, job: Callable[[WorkerChannel], T]) -> T:
        """Runs a job, which talks to the worker, in the calling thread. WorkerLost closes the worker."""
        self.channel.deadline = time.monotonic() + self._limits.wall_seconds
        try:
            return job(self.channel)
        except InputError:
            raise  # raised between messages: the worker is ready for the next job
        except (EOFError, OSError, ProtocolError, msgspec.MsgspecError) as error:
            if not self.lost:  # else it was killed because its client left, or at the end
                log.warning("%s %d died or exceeded a limit, and is replaced: %s", self._module, self.pid, error)
            self.close()
            raise WorkerLost(str(error)) from error
        except BaseException:
            self.close()
            raise

    def kill(self) -> None:
        """Ends the process. A job that runs in another thread then sees its channel closed, and closes the worker."""
        self.lost = True
        self._process.kill()

    def close(self) -> None:
        """Ends the process, and waits for its end. Not while a job runs in another thread."""
        self.kill()
        self._process.wait()
        self.channel.close()


class WorkerPool:
    """Runs at most `size` jobs at a time, each in a worker of its own. Belongs to one event loop."""

    def __init__(self, size: int, limits: WorkerLimits, program: Program) -> None:
        self.size = size
        self._limits = limits
        self._program = program
        self._slots = asyncio.Semaphore(size)
        self._threads = ThreadPoolExecutor(max_workers=size, thread_name_prefix=program.module.rpartition(".")[2])
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self.workers_lost = 0
        """Workers that died or were killed during a job."""

    async def run(self, job: Callable[[WorkerChannel], T]) -> T:
        """Runs `job` in a thread with a worker of its own; waits for a free one first.

        Cancellation kills the worker, so that no work continues for a client that has disconnected. Raises WorkerLost
        when the worker died or exceeded a limit, and what the job raises, such as InputError.
        """
        async with self._slots:
            worker = self._take()
            self._busy.add(worker)
            running = asyncio.get_running_loop().run_in_executor(self._threads, worker.run, job)
            try:
                return await shielded(running)
            except asyncio.CancelledError:
                worker.kill()
                raise
            finally:
                self._busy.discard(worker)
                if worker.lost:
                    self.workers_lost += 1
                else:
                    self._idle.append(worker)

    def close(self) -> None:
        """Ends all workers and threads; running jobs fail with WorkerLost."""
        for worker in tuple(self._busy):  # a copy, since jobs may end meanwhile
            worker.kill()
        for worker in self._idle:
            worker.close()
        self._idle.clear()
        self._threads.shutdown()

    def _take(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            log.warning("%s %d died without a job, and is replaced", self._program.module, worker.pid)
            worker.close()
        return Worker(self._limits, self._program)


def _environment() -> dict[str, str]:
    """The environment without the server's keys and tokens, since the process reads untrusted input."""
    names = ("PATH", "LD_LIBRARY_PATH", "LANG", "PYTHONPATH")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    # One malloc arena: each further one reserves 64 MiB of the address space that RLIMIT_AS counts.
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MALLOC_ARENA_MAX"), "1")
    return python_environment(kept | single)
