"""How the time that something takes grows with its size, whatever the machine needs for either."""

from __future__ import annotations

import time
from collections.abc import Callable

TIMES_LARGER = 4
LIMIT = 9.0
"""Times as long for TIMES_LARGER times as much. What is linear takes 4 times as long, what is quadratic 16 times."""
TRIES = 8


def is_linear(work: Callable[[int], object], size: int) -> bool:
    """Whether `work(size)` takes not much more than its share of processor time. What grows faster does so each time,
    what a busy machine does to a short measurement it does not."""
    return any(_seconds(work, size) < LIMIT * _seconds(work, size // TIMES_LARGER) for _ in range(TRIES))


def _seconds(work: Callable[[int], object], size: int) -> float:
    began = time.thread_time()
    work(size)
    return time.thread_time() - began
