"""Memory that one picture has freed is there for the next, and NumPy leaves the processors alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHILD = """
import resource, threading
from service.system.children import keep_freed_memory

def decode():
    blocks = [bytes(803_000), bytes(803_000), bytes(603_000)]

def new_pages():
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

def work():
    for _ in range(4):
        decode()
    before = new_pages()
    for _ in range(8):
        decode()
    print(new_pages() - before)

{call}
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def new_pages(call: str) -> int:
    child = subprocess.run([sys.executable, "-c", CHILD.format(call=call)], capture_output=True, text=True, check=True)
    return int(child.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's thresholds")
def test_a_thread_takes_no_new_pages_for_pictures_of_one_size() -> None:
    given_back = new_pages("pass")
    assert 10 * new_pages("keep_freed_memory()") < given_back


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_numpy_has_no_threads_that_spin() -> None:
    code = "import os, service, numpy; print(len(os.listdir('/proc/self/task')))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, env={"PATH": "/bin"}) == "1\n"
