"""An engine on processors that other processes use, too."""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from models.interfaces import cpus
from tests.support.processes import served

WARM_UP = 5
ANSWERS = 8
ATTEMPTS = 8
MOST = 2.5
"""Times as long as with the processors to itself. Threads that wait for each other without sleeping took 66 times."""


class Spinners:
    """As many processes as processors, each in an endless loop while it is not stopped."""

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self._processes = processes
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)

    @contextmanager
    def spinning(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)


@pytest.fixture
def spinners() -> Iterator[Spinners]:
    with ExitStack() as stack:
        processes = []
        for _ in range(cpus.available()):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
            processes.append(process)
        yield Spinners(processes)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_answer_beside_endless_loops(spinners: Spinners) -> None:
    body = {"model": "reprise/qwen2_vl", "max_tokens": 16, "seed": 1, "ignore_eos": True}
    with served(OMP_NUM_THREADS="") as server, httpx.Client(base_url=server.url, timeout=600) as client:

        def seconds(text: str) -> float:
            began = time.perf_counter()
            answer = client.post(
                "/v1/chat/completions", json=body | {"messages": [{"role": "user", "content": text}]}
            ).json()
            assert answer["usage"]["completion_tokens"] == 16
            return time.perf_counter() - began

        for turn in range(WARM_UP):
            seconds(f"Warm-up {turn}")

        def ratio() -> float:
            idle, busy = [], []
            for turn in range(ANSWERS):
                idle.append(seconds(f"Idle {turn}"))
                with spinners.spinning():
                    busy.append(seconds(f"Busy {turn}"))
            alone, beside = statistics.median(idle), statistics.median(busy)
            print(f"idle {alone * 1e3:.0f} ms, busy {beside * 1e3:.0f} ms, {beside / alone:.2f} times")
            return beside / alone

        # A neighbour of this machine may spoil one measurement; threads that wait without sleeping spoil each.
        assert any(ratio() <= MOST for _ in range(ATTEMPTS))
