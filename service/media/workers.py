"""Decode workers: processes that touch hostile video and audio, bounded in memory and time, killed and replaced."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from models.errors import InputError
from service.media.channel import Channel, ProtocolError, Reply
from service.media.limits import WorkerLimits

T = TypeVar("T")

PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class WorkerLost(Exception):
    """The worker died or ran into a limit during a job."""


class Worker:
    """One decode process and the channel to it."""

    def __init__(self, limits: WorkerLimits) -> None:
        self._limits = limits
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "service.media.decode_worker"),
                    *(str(theirs.fileno()), str(limits.memory_bytes), str(limits.cpu_seconds)),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=_environment(),
            )
        self.channel = Channel(ours, Reply)
        self.lost = False
        """Killed: not to be used again."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, job: Callable[[Channel], T]) -> T:
        """Runs a job's conversation in the calling thread. Raises WorkerLost; the worker is closed then."""
        self.channel.deadline = time.monotonic() + self._limits.wall_seconds
        try:
            return job(self.channel)
        except InputError:
            raise  # said between messages: the worker is ready for the next job
        except (EOFError, OSError, ProtocolError, msgspec.MsgspecError) as error:
            self._close()
            raise WorkerLost(str(error)) from error
        except BaseException:
            self._close()
            raise

    def kill(self) -> None:
        """Ends the process; a job under way in another thread sees its channel close, and closes the worker."""
        self.lost = True
        self._process.kill()

    def _close(self) -> None:
        self.kill()
        self._process.wait()
        self.channel.close()

    def retire(self) -> None:
        """Ends an idle worker."""
        self._close()


class WorkerPool:
    """At most `size` jobs at a time, each alone in its worker. Belongs to one event loop."""

    def __init__(self, size: int, limits: WorkerLimits) -> None:
        self.size = size
        self._limits = limits
        self._slots = asyncio.Semaphore(size)
        self._threads = ThreadPoolExecutor(max_workers=size, thread_name_prefix="decode")
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self.workers_lost = 0
        """Workers that died or were killed during a job."""

    def start(self) -> None:
        """Starts the processes ahead of the first job; otherwise each starts with the first job that needs it."""
        while len(self._idle) < self.size:
            self._idle.append(Worker(self._limits))

    async def run(self, job: Callable[[Channel], T]) -> T:
        """Runs `job` in a thread with a worker of its own; waits for a free one first.

        Cancellation kills the worker, so that nothing goes on for a client that has left. Raises WorkerLost when the
        worker died or a limit was hit, and what the job raises (InputError among it).
        """
        async with self._slots:
            worker = self._take()
            self._busy.add(worker)
            running = asyncio.get_running_loop().run_in_executor(self._threads, worker.run, job)
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                worker.kill()
                running.add_done_callback(_forget)
                raise
            finally:
                self._busy.discard(worker)
                if worker.lost:
                    self.workers_lost += 1
                else:
                    self._idle.append(worker)

    def close(self) -> None:
        """Ends all workers and threads; jobs under way fail with WorkerLost."""
        for worker in tuple(self._busy):  # a copy: jobs may end meanwhile in the event loop
            worker.kill()
        for worker in self._idle:
            worker.retire()
        self._idle.clear()
        self._threads.shutdown()

    def _take(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            worker.retire()
        return Worker(self._limits)


def _forget(running: asyncio.Future[T]) -> None:
    """Takes the outcome of a job that nobody waits for, so that asyncio does not log it."""
    if not running.cancelled():
        running.exception()


def _environment() -> dict[str, str]:
    """The server's keys and tokens stay out of a process that reads hostile files."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "LANG") if name in os.environ}
    # One malloc arena: each further one reserves 64 MiB of the address space that RLIMIT_AS counts.
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MALLOC_ARENA_MAX"), "1")
    paths = [str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return kept | single | {"PYTHONPATH": os.pathsep.join(paths)}
