"""How much freed memory a process keeps for its next pictures."""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD = 32 << 20
"""Bytes of free memory that a thread's heap may keep: a decoded picture of 1024 x 1024 with its copies takes 16 MB."""
MMAP_THRESHOLD = 8 << 20
"""Larger blocks, those of a picture of more than 1920 x 1080, go back to the system when they are freed."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Tells glibc not to give back what the next picture needs again; other C libraries are left as they are.

    glibc learns its thresholds from the blocks that are freed, and what it learns from a picture is less than the
    picture and its copies together: it gave all of them back after each request. The 507 new pages of a JPEG of
    448 x 448 took a third of the time from its bytes to its pixels.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD)
    mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD)
