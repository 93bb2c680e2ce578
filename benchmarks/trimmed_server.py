"""`reprise serve` that gives freed memory back when it gets SIGUSR1, so that what is resident is what it holds.

    python -m benchmarks.trimmed_server serve [server flags]

A server keeps freed memory for the next pictures (service/heap.py). How much depends on how many requests met, which is
chance, and hides what requests leave behind.
"""

from __future__ import annotations

import ctypes
import gc
import signal
from types import FrameType

from service.cli.main import main


def give_back(number: int, frame: FrameType | None) -> None:
    """Only glibc has malloc_trim; with another library nothing is given back."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, give_back)
    main()
