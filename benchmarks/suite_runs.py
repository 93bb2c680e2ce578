"""Whether the test suite passes every time: it is run again and again, beside loops that keep the processors busy.

    python -m benchmarks.suite_runs --runs 10 --workers 2                 # on an idle machine
    taskset -c 0,1 python -m benchmarks.suite_runs --workers 1 --busy 4   # two processors, shared with four loops
    taskset -c 0-29 python -m benchmarks.suite_runs --workers 1 --busy 4 --at-once 10    # ten times that, 3 for each
    python -m benchmarks.suite_runs --workers 1 --busy 4 --at-once 2 --shares 1    # two runs on the same processors
    python -m benchmarks.suite_runs --runs 3 -- tests/http -k stream      # after --: what pytest is told besides

Any number of these may run side by side from one checkout: each run has its own temporary directory, and servers take
free ports. Each share of the processors has loops of its own. suite_runs_<name>.json is written after every run, and
--resume goes on with it. The exit status is 1 when a test failed or a run did not end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.measure.record import Row, commit, folder, write

ROOT = Path(__file__).parent.parent
BUSY = "while True: pass"
SLOWEST = 15
"""Tests whose seconds are kept of each run."""
ENDED_BY_LIMIT = 124
LINE = re.compile(r"^\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (.*?) *$", re.MULTILINE)
"""What pytest-xdist says of each test at its end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every run passed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suite_runs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--resume", action="store_true", help="go on with a result of this name and commit")
    parser.add_argument("--workers", type=int, default=2, help="of pytest-xdist")
    parser.add_argument("--busy", type=int, default=0, help="loops that run beside it, on each share of processors")
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side")
    parser.add_argument("--shares", type=int, help="of the processors, for the runs at once; default: one for each")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for one run")
    parser.add_argument("--logs", type=Path, help="a folder for what pytest says, while it says it")
    parser.add_argument("--name", help="of the result; default: w<workers>_b<busy>")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, behind --")
    options = parser.parse_args(arguments)
    processors = sorted(os.sched_getaffinity(0))
    parts = options.shares or options.at_once
    if not 1 <= parts <= len(processors):
        parser.error(f"--at-once, --shares: each share needs a processor, and {len(processors)} are not {parts}")
    if options.at_once % parts:
        parser.error(f"--at-once {options.at_once}: not a multiple of {parts} shares")
    name = f"suite_runs_{options.name or f'w{options.workers}_b{options.busy}'}"
    facts = {
        "workers": options.workers,
        "busy_loops": options.busy,
        "at_once": options.at_once,
        "shares": parts,
        "processors": processors,
        "pytest": options.pytest,
    }
    split, writing = shares(processors, parts), threading.Lock()
    free = split * (options.at_once // parts)
    rows = earlier(name) if options.resume else []
    first = len(rows) + 1

    def one(number: int) -> None:
        with writing:
            share = free.pop()
        log = options.logs and options.logs / f"{name}_{number}.log"
        # Of this thread, and so of the processes that it starts.
        os.sched_setaffinity(0, share)
        row = run(options.workers, options.pytest, options.limit, log)
        with writing:
            free.append(share)
            rows.append({"run": number, "processors": share, **row})
            rows.sort(key=lambda row: row["run"])
            write(name, rows, **facts)
            print(summary({"run": number, **row}), flush=True)

    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
    with busy_loops(options.busy, split), ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(one, range(first, options.runs + 1)))
    failed = sum(row["status"] != 0 for row in rows)
    print(f"{folder() / name}.json: {failed} of {len(rows)} runs failed")
    return 1 if failed else 0


def earlier(name: str) -> list[Row]:
    """The runs of a result that was cut short; none if there is no such result. ValueError if its commit is another."""
    path = folder() / f"{name}.json"
    if not path.exists():
        return []
    result = json.loads(path.read_text())
    if result["commit"] != commit():
        raise ValueError(f"{path} is of commit {result['commit'][:7]}, and this is {commit()[:7]}")
    return [{**row, "run": number} for number, row in enumerate(result["rows"], start=1)]


def shares(processors: Sequence[int], count: int) -> list[list[int]]:
    """Equal shares of neighbouring processors; a remainder stays unused."""
    size = len(processors) // count
    return [list(processors[first : first + size]) for first in range(0, size * count, size)]


@contextmanager
def busy_loops(count: int, shares: Sequence[Sequence[int]]) -> Iterator[None]:
    """Processes that compute all the while, `count` on each share of the processors."""
    loops = []
    try:
        for share in shares:
            for _ in range(count):
                loops.append(loop := subprocess.Popen([sys.executable, "-c", BUSY]))
                os.sched_setaffinity(loop.pid, share)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run(workers: int, arguments: Sequence[str], limit: float, log: Path | None = None) -> Row:
    """One run of the suite: exit status, seconds, counts, what failed and what took longest. Of a run that was cut
    short, the tests that had ended."""
    with tempfile.TemporaryDirectory(prefix="suite-", ignore_cleanup_errors=True) as folder:
        report = Path(folder) / "report.xml"
        command = [
            *(sys.executable, "-m", "pytest", "-n", str(workers), "--dist", "loadfile", "-p", "no:cacheprovider"),
            *("-vv", "--basetemp", f"{folder}/pytest", f"--junitxml={report}", *arguments),
        ]
        load = os.getloadavg()[0]
        began = time.monotonic()
        log = log or Path(folder) / "log"
        status = status_of(command, environment(folder), log, limit)
        seconds = round(time.monotonic() - began, 1)
        said = log.read_text(errors="replace")
        outcome = read_report(report) if report.exists() else read_log(said)
        return {
            "status": status,
            "seconds": seconds,
            "load": load,
            **outcome,
            "tail": said.splitlines()[-20:] if status else [],
        }


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
    ours = ("OUT", "REPRISE_COMMIT")
    return {
        **{name: value for name, value in os.environ.items() if name not in ours},
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


def read_log(said: str) -> Row:
    """Counts and failures of the tests that had ended when pytest said no more."""
    ended = LINE.findall(said)
    return {
        "tests": len(ended),
        "skipped": sum(outcome == "SKIPPED" for outcome, _ in ended),
        "failed": [{"test": test, "message": ""} for outcome, test in ended if outcome in ("FAILED", "ERROR")],
        "slowest": [],
    }


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def summary(row: Row) -> str:
    failed = ", ".join(one["test"] for one in row["failed"]) or "none"
    return f"run {row['run']}: {row['seconds']:.0f} s, {row['tests']} tests, status {row['status']}, failed: {failed}"


if __name__ == "__main__":
    sys.exit(main())
