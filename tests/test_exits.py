"""A process that has served ends although its threads do not."""

from __future__ import annotations

import subprocess
import sys

from tests.support.waiting import GENEROUS

BUSY = """
import threading
from concurrent.futures import ThreadPoolExecutor

from service import exits

exits.EXIT_GRACE = 0.01
began = threading.Event()


def decode():
    began.set()
    threading.Event().wait()


ThreadPoolExecutor(1).submit(decode)
began.wait()
print("served", flush=True)
exits.end_soon(3)
"""

IDLE = """
import atexit

from service import exits

exits.EXIT_GRACE = 600.0
atexit.register(print, "tidied")
exits.end_soon(3)
"""


def test_nobody_waits_for_a_thread_that_goes_on() -> None:
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=GENEROUS)
    assert (done.returncode, done.stdout) == (3, "served\n")


def test_a_process_without_such_threads_ends_as_usual() -> None:
    done = subprocess.run([sys.executable, "-c", IDLE], capture_output=True, text=True, timeout=GENEROUS)
    assert (done.returncode, done.stdout) == (0, "tidied\n")
