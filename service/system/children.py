"""Processes of the server: how they start Reprise's own code, end, are watched, and hold descriptors and memory.

Children run nothing from the current directory, and no other packages of the same name.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

EXIT_GRACE = 2.0
"""Seconds in which threads may end by themselves."""


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """For a process that imports: Ctrl-C ends it at once. A KeyboardInterrupt may be lost in a callback of Python's
    imports, after which a server would start, or come out of them as another error. A SIGINT that is ignored, as in the
    background of a shell, stays so."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end_soon(status: int) -> None:
    """For a process that has served and is about to end: it ends with this status although some of its threads go on,
    such as one that decodes a large picture that nobody waits for any more. Python would wait for them."""
    timer = threading.Timer(EXIT_GRACE, os._exit, (status,))
    timer.daemon = True
    timer.start()


MAX_DESCRIPTORS = 1 << 16
DESCRIPTORS_PER_CONNECTION = 1.25
OWN_DESCRIPTORS = 32
"""Uploads, decoding, the engine and its restarts take some, too."""


def attainable_limit() -> int:
    """The limit on open files after raise_descriptor_limit; resource.RLIM_INFINITY if there is none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return soft
    return max(soft, MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS))


def raise_descriptor_limit() -> None:
    """Raises the soft limit on open files towards the hard one: it is often 1024, fewer than max_connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if (limit := attainable_limit()) != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def connections_within(limit: int, wanted: int) -> int:
    """How many of the wanted connections a limit on open files has room for; at least one."""
    if limit == resource.RLIM_INFINITY:
        return wanted
    return min(wanted, max(1, min(int(limit / DESCRIPTORS_PER_CONNECTION), limit - OWN_DESCRIPTORS)))


def possible_connections(wanted: int) -> int:
    """At most as many as the limit on open files has room for. At that limit, asyncio would try to accept a connection
    thousands of times a second and log each failure, and an engine that died could not be started again."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if (most := connections_within(limit, wanted)) < wanted:
        log.warning("%d open files are allowed, so at most %d connections (max_connections: %d)", limit, most, wanted)
    return most


PACKAGE_ROOT = Path(__file__).resolve().parents[2]
"""Holds `models` and `service`: the checkout, or where the package is installed."""
LAUNCHER = PACKAGE_ROOT / "service" / "launch.py"


def python_command(module: str, *arguments: str) -> list[str]:
    """`python -m MODULE ARGUMENT ...` without the current directory, with the packages of this process. Start it with
    `python_environment`."""
    return [sys.executable, "-P", str(LAUNCHER), module, *arguments]


def python_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`environ` without the entries of PYTHONPATH that depend on the current directory: empty and relative paths."""
    kept = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(path)]
    others = {name: value for name, value in environ.items() if name != "PYTHONPATH"}
    return others | ({"PYTHONPATH": os.pathsep.join(kept)} if kept else {})


def leave_signals_to_parent() -> None:
    """Ignores the signals that ask the server to end. A service manager may send them to all of its processes, and this
    one still has work while the server drains. It ends with its parent, or is killed by it."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def wait_for_end_of_parent() -> None:
    """Waits until standard input, a pipe that only the parent process writes to, is closed."""
    # Not through sys.stdin.buffer: a thread that waits in it holds a lock that the interpreter needs to exit.
    while os.read(0, 4096):
        pass


CHECK_SECONDS, MAX_COUNTED = 0.5, 1.0
"""Seconds between two checks of a silence, and those that count of them: after a longer gap this process was paused or
busy."""


class Silence:
    """Seconds of silence of another process, counted by frequent checks. Time in which this process itself was paused
    (a frozen container, a suspended machine) does not count: messages sent meanwhile are read afterwards."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._looked = clock()
        self._seconds = 0.0

    def end(self) -> None:
        """Ends the silence: the process sent something."""
        self._looked = self._clock()
        self._seconds = 0.0

    def look(self) -> float:
        """Checks, and returns the seconds so far."""
        now = self._clock()
        self._seconds += min(now - self._looked, MAX_COUNTED)
        self._looked = now
        return self._seconds

    async def exceeds(self, limit: Callable[[], float]) -> float:
        """Wait until the silence is longer than `limit`, and return its seconds."""
        while self.look() <= limit():  # noqa: ASYNC110 - it is about time
            await asyncio.sleep(CHECK_SECONDS)
        return self._seconds


TRIM_THRESHOLD = 32 << 20
"""Bytes of free memory that a heap may keep: a decoded picture of 1024 x 1024 with its copies takes 16 MB."""
MMAP_THRESHOLD = 8 << 20
"""Larger blocks (pictures of more than 1920 x 1080) are returned to the system when they are freed."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Makes glibc keep memory that the next picture will need again. Does nothing with other C libraries.

    By default glibc adapts its thresholds to the sizes of freed blocks. That is less than a picture and its copies
    together, so it returned all of them after each request; the page faults for a JPEG of 448 x 448 (507 pages) then
    took a third of its decoding time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD)
    mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD)


def give_back_freed_memory() -> None:
    """Returns all free memory to the system. Only glibc has malloc_trim; with another library this does nothing."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
