"""Measures how the time of some work grows with its size, independent of the machine's speed."""

from __future__ import annotations

import time
from collections.abc import Callable

TIMES_LARGER = 4
LIMIT = 9.0
"""How many times as long TIMES_LARGER times the work may take: linear work takes 4 times as long, quadratic work 16
times."""
TRIES = 8


def is_linear(work: Callable[[int], object], size: int) -> bool:
    """Whether the processor time of `work(size)` grows about linearly. Work that grows faster does so in every attempt;
    the disturbance of a busy machine does not recur."""
    return any(_seconds(work, size) < LIMIT * _seconds(work, size // TIMES_LARGER) for _ in range(TRIES))


def _seconds(work: Callable[[int], object], size: int) -> float:
    began = time.thread_time()
    work(size)
    return time.thread_time() - began
