"""Settings of malloc: how much freed memory the process keeps for the next pictures, and returning it."""

from __future__ import annotations

import ctypes
import gc

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
