"""`reprise serve` that gives freed memory back when it gets SIGUSR1, so that what is resident is what it holds.

    python -m benchmarks.servers.trimmed serve [server flags]

A server keeps freed memory for the next pictures (service/system/children.py). How much depends on how many requests
met, which is chance, and hides what requests leave behind.
"""

from __future__ import annotations

import signal

from service.cli.main import main
from service.system.children import give_back_freed_memory

if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda number, frame: give_back_freed_memory())
    main()
