"""How many threads compute in the engine, and how they wait."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from service.link.config import EngineConfig, ModelConfig
from service.link.engine_link import MAX_THREADS, SMALL_BYTES, num_threads, thread_variables
from tests.support.processes import served
from tests.support.victims import SMALL

PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


def _config(directory: Path | str = "/nowhere", threads: int | None = None) -> EngineConfig:
    return EngineConfig((ModelConfig("m", str(directory)),), threads=threads)


def test_the_order_of_what_sets_the_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("models.interfaces.cpus.available", lambda: 4)
    assert num_threads(_config(), {}) == 4
    for words, count in (("2", 2), ("2,1", 2), ("many", 4), ("0", 4)):
        assert num_threads(_config(), {"OMP_NUM_THREADS": words}) == count
    assert num_threads(_config(threads=7), {"OMP_NUM_THREADS": "2"}) == 7
    monkeypatch.setattr("models.interfaces.cpus.available", lambda: 64)
    assert num_threads(_config(), {}) == MAX_THREADS
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"some")
    assert num_threads(_config(tmp_path), {}) == 1
    with weights.open("ab") as file:
        file.truncate(SMALL_BYTES)
    assert num_threads(_config(tmp_path), {}) == MAX_THREADS


def test_how_they_wait_stays_as_the_operator_has_set_it() -> None:
    three = _config(threads=3)
    assert thread_variables(three, {}) == {**PASSIVE, "OMP_NUM_THREADS": "3"}
    assert thread_variables(three, {"OMP_WAIT_POLICY": "ACTIVE"}) == {"OMP_NUM_THREADS": "3"}
    assert "KMP_BLOCKTIME" not in thread_variables(three, {"KMP_BLOCKTIME": "200"})


def test_numpy_computes_in_the_thread_that_asks() -> None:
    """Threads of OpenBLAS would spin after each product, on processors that the engine needs."""
    told = "print(len(os.listdir('/proc/self/task')), os.environ.get('OPENBLAS_NUM_THREADS'))"
    program = [sys.executable, "-c", f"import os, service, numpy as np; np.ones((9999, 99)) @ np.ones(99); {told}"]
    unset = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    most = min(2, len(os.sched_getaffinity(0)))
    for given, said in (({}, "1 None\n"), ({"OPENBLAS_NUM_THREADS": "2"}, f"{most} 2\n")):
        assert subprocess.run(program, env=unset | given, capture_output=True, text=True, check=True).stdout == said


@pytest.mark.slow
def test_an_engine_that_was_started_computes_with_them() -> None:
    with served(*SMALL, "--threads", "3") as server:
        said = re.search(r"threads on the host: (\d+)", "".join(server.log))
        assert said is not None and said[1] == "3"
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        environments = [_environment(int(child)) for child in children]
        (environ,) = [made for made in environments if "OMP_WAIT_POLICY" in made]
        assert environ.items() >= {**PASSIVE, "OMP_NUM_THREADS": "3"}.items()


def _environment(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(os.fsdecode(pair).split("=", 1) for pair in pairs if b"=" in pair)
