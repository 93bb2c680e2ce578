"""Several API processes of one server, and a way to ask a certain one."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from benchmarks.servers.footprint import children
from tests.support.processes import stand_still


def api_pids(supervisor: int) -> list[int]:
    """The API processes that run now, in the order in which they were started."""
    return sorted(pid for pid in children(supervisor) if _is_api_process(pid))


def _is_api_process(pid: int) -> bool:
    try:
        return b"service.processes.api_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@contextlib.contextmanager
def only(pid: int, supervisor: int) -> Iterator[None]:
    """Stops all other API processes meanwhile, so that they accept no connections."""
    others = [other for other in api_pids(supervisor) if other != pid]
    try:
        for other in others:
            with contextlib.suppress(ProcessLookupError):  # it was killed a moment ago
                stand_still(other)
        yield
    finally:
        for other in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(other, signal.SIGCONT)
