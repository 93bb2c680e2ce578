"""`reprise serve` as an operator starts it: a process of its own, found by the line that says it is ready."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.waiting import GENEROUS, wait

ROOT = Path(__file__).parents[2]
PROGRAM = ("-m", "service.cli")
START_SECONDS = 480.0
"""An idle machine takes 4 to 10 s."""


def stand_still(pid: int) -> None:
    """SIGSTOP, and all its threads have stopped or ended: the signal alone says nothing of when."""
    os.kill(pid, signal.SIGSTOP)
    wait(lambda: _is_stopped(pid), what="it has stopped")


def _is_stopped(pid: int) -> bool:
    try:
        stats = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:
        return False  # One of its threads ended meanwhile.
    return all(stat.rpartition(")")[2].split()[0] in "TZX" for stat in stats)


class ServerProcess:
    """A started server. `url` ends without a slash; `log` holds the JSON lines of its stderr so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.url = ""
        self.log: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            # Long lines of several processes may run into each other; this one does not.
            message = str(json.loads(line)["message"]) if '"message": "ready at ' in line else ""
            if message.startswith("ready at "):
                self.url = message.removeprefix("ready at ")
                self._ready.set()
        self._ready.set()

    def wait_ready(self) -> None:
        assert self._ready.wait(START_SECONDS) and self.url, "".join(self.log)

    def stop(self, sig: int = signal.SIGTERM, seconds: float = GENEROUS) -> int:
        """The exit status after a signal."""
        self.process.send_signal(sig)
        try:
            return self.process.wait(seconds)
        finally:
            self.process.kill()
            self._reader.join(GENEROUS)


@contextmanager
def served(*arguments: str, program: Sequence[str] = PROGRAM, **environ: str) -> Iterator[ServerProcess]:
    """A ready server on a free loopback port; stopped at the end unless it has ended. program: Python's arguments for
    another `reprise` command. It computes in 32 bits on a GPU, too, where in 16 bits an answer depends on what else is
    in its batch; the flag --dtype chooses otherwise."""
    command = [sys.executable, *program, "serve", "--port", "0", "--log-format", "json", *arguments]
    usual = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "REPRISE_DTYPE": "float32"}
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **usual, **environ}
    )
    server = ServerProcess(process)
    try:
        server.wait_ready()
        yield server
    finally:
        if process.poll() is None:
            server.stop()
