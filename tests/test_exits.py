"""A process that has served ends although its threads do not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.waiting import GENEROUS

BUSY = """
import threading
from concurrent.futures import ThreadPoolExecutor

from service.system import children as exits

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

from service.system import children as exits

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


CTRL_C = """
import signal, sys, weakref

from service.system.children import ended_by_ctrl_c


class Module:
    pass


if sys.argv[1] == "ignored":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
module = Module()
reference = weakref.ref(module, lambda _: signal.raise_signal(signal.SIGINT))
with ended_by_ctrl_c():
    del module
print("goes on")
"""


@pytest.mark.parametrize(("how", "status", "says"), [("heeded", 130, ""), ("ignored", 0, "goes on\n")])
def test_ctrl_c_during_an_import_ends_the_process_unless_ignored(how: str, status: int, says: str) -> None:
    done = subprocess.run([sys.executable, "-c", CTRL_C, how], capture_output=True, text=True, timeout=GENEROUS)
    assert (done.returncode, done.stdout, done.stderr) == (status, says, "")
