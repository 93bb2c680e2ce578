"""Whether the test suite passes every time: it is run again and again, beside loops that keep the processors busy.

    python -m benchmarks.suite_runs --runs 10 --workers 2                 # on an idle machine
    taskset -c 0,1 python -m benchmarks.suite_runs --workers 1 --busy 4   # two processors, shared with four loops
    python -m benchmarks.suite_runs --runs 3 -- tests/http -k stream      # after --: what pytest is told besides

Any number of these may run side by side from one checkout: each run has its own temporary directory, and servers take
free ports. Each writes suite_runs_<name>.json after every run. The exit status is 1 when a test failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.record import Row, write

ROOT = Path(__file__).parent.parent
BUSY = "while True: pass"
SLOWEST = 15
"""Tests whose seconds are kept of each run."""
ENDED_BY_LIMIT = 124


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every run passed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suite_runs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2, help="of pytest-xdist")
    parser.add_argument("--busy", type=int, default=0, help="loops that run beside it")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for one run")
    parser.add_argument("--name", help="of the result; default: w<workers>_b<busy>")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, behind --")
    options = parser.parse_args(arguments)
    name = f"suite_runs_{options.name or f'w{options.workers}_b{options.busy}'}"
    facts = {
        "workers": options.workers,
        "busy_loops": options.busy,
        "processors": sorted(os.sched_getaffinity(0)),
        "pytest": options.pytest,
    }
    rows: list[Row] = []
    with busy_loops(options.busy):
        for number in range(1, options.runs + 1):
            rows.append({"run": number, **run(options.workers, options.pytest, options.limit)})
            path = write(name, rows, **facts)
            print(summary(rows[-1]), flush=True)
    failed = sum(row["status"] != 0 for row in rows)
    print(f"{path}: {failed} of {len(rows)} runs failed")
    return 1 if failed else 0


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Processes that compute all the while, on the processors of this one."""
    loops = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run(workers: int, arguments: Sequence[str], limit: float) -> Row:
    """One run of the suite: exit status, seconds, counts, what failed and what took longest."""
    with tempfile.TemporaryDirectory(prefix="suite-") as folder:
        report = Path(folder) / "report.xml"
        command = [
            *(sys.executable, "-m", "pytest", "-n", str(workers), "--dist", "loadfile", "-p", "no:cacheprovider"),
            *("--basetemp", f"{folder}/pytest", f"--junitxml={report}", *arguments),
        ]
        load = os.getloadavg()[0]
        began = time.monotonic()
        log = Path(folder) / "log"
        status = status_of(command, environment(folder), log, limit)
        seconds = round(time.monotonic() - began, 1)
        tail = log.read_text(errors="replace").splitlines()[-20:]
        outcome = read_report(report) if report.exists() else {"tests": 0, "failed": [], "slowest": []}
        return {"status": status, "seconds": seconds, "load": load, **outcome, "tail": tail if status else []}


def status_of(command: list[str], environ: Mapping[str, str], log: Path, limit: float) -> int:
    """The exit status of a command in a session of its own; at the limit everything in that session is killed."""
    with (
        log.open("wb") as file,
        subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return ENDED_BY_LIMIT


def environment(folder: str) -> Mapping[str, str]:
    """As `make test` has it, with everything that a run writes below `folder`."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TMPDIR": folder,
        "XDG_CACHE_HOME": f"{folder}/cache",
        "HYPOTHESIS_STORAGE_DIRECTORY": f"{folder}/hypothesis",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def read_report(report: Path) -> Row:
    """Counts, failures and the slowest tests of pytest's JUnit file."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed: list[dict[str, Any]] = []
    for case in cases:
        for problem in (*case.findall("failure"), *case.findall("error")):
            failed.append({"test": _name(case), "message": (problem.get("message") or "")[:500]})
    slowest = sorted(cases, key=lambda case: -float(case.get("time", 0)))[:SLOWEST]
    return {
        "tests": len(cases),
        "skipped": sum(case.find("skipped") is not None for case in cases),
        "failed": failed,
        "slowest": [{"test": _name(case), "seconds": round(float(case.get("time", 0)), 1)} for case in slowest],
    }


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def summary(row: Row) -> str:
    failed = ", ".join(one["test"] for one in row["failed"]) or "none"
    return f"run {row['run']}: {row['seconds']:.0f} s, {row['tests']} tests, status {row['status']}, failed: {failed}"


if __name__ == "__main__":
    sys.exit(main())
