"""The end of a server's process."""

from __future__ import annotations

import os
import threading

EXIT_GRACE = 2.0
"""Seconds in which threads may end by themselves."""


def end_soon(status: int) -> None:
    """For a process that has served and is about to end: it ends with this status although some of its threads go on,
    such as one that decodes a large picture that nobody waits for any more. Python would wait for them."""
    timer = threading.Timer(EXIT_GRACE, os._exit, (status,))
    timer.daemon = True
    timer.start()
