"""What the engine process itself uses, from Linux's /proc/self/stat (proc(5))."""

from __future__ import annotations

import os
import time
from pathlib import Path

from service.link.messages import ProcessUsage

STAT = Path("/proc/self/stat")
_UTIME, _STIME, _THREADS, _START, _RSS = 11, 12, 17, 19, 21
"""Indexes of the fields 14, 15, 20, 22 and 24 of proc(5), counted after the name, which may hold spaces and
brackets."""


def process_usage(stat: Path = STAT) -> ProcessUsage | None:
    """Usage of this process, all threads together; None if there is no /proc."""
    if (fields := _fields(stat)) is None:
        return None
    seconds = (int(fields[_UTIME]) + int(fields[_STIME])) / os.sysconf("SC_CLK_TCK")
    return ProcessUsage(seconds, int(fields[_RSS]) * os.sysconf("SC_PAGE_SIZE"), int(fields[_THREADS]))


def process_age(stat: Path = STAT) -> float | None:
    """Seconds since this process was started, including what ran before Python's first line; None without /proc."""
    if (fields := _fields(stat)) is None:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_START]) / os.sysconf("SC_CLK_TCK")


def _fields(stat: Path) -> list[str] | None:
    try:
        text = stat.read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()
