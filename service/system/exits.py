"""The end of a process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
