"""What a server holds on to: descriptors, processes, threads, files, and the gauges that count its work."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from service.voices import FOLDER

WORK_GAUGES = (
    "reprise_requests_running",
    "reprise_requests_waiting",
    "reprise_slots_used",
    'state="used"',
    "reprise_http_requests_in_progress",
    "reprise_admitted_bytes",
)
"""Lines of a scrape that are zero while there is no request except the scrape itself."""
ENGINE = "service.link.process"
DECODER = "service.media.decode_worker"
GRAMMARS = "service.api.structured.grammar_worker"
NUMBER = re.compile(r"(?<![0-9A-Za-z])\d+(?![0-9A-Za-z])")
"""In a file's name. Digits among others, or among letters, may be anything of any other process."""


@dataclass(frozen=True)
class Process:
    pid: int
    role: str
    descriptors: tuple[str, ...]
    threads: int
    resident_bytes: int


@dataclass(frozen=True)
class Footprint:
    """descriptors, threads: by role (api, engine, decoder, grammars). busy: gauges that are not zero. files: shared
    memory and the server's temporary files. tasks: of the event loop."""

    processes: dict[str, int]
    descriptors: dict[str, int]
    threads: dict[str, int]
    resident_bytes: dict[str, int]
    files: frozenset[str]
    busy: tuple[str, ...]
    tasks: int

    def left_over(self, before: Footprint) -> list[str]:
        """What is held now but was not held before; empty if everything was given back."""
        found = [f"gauge {line}" for line in self.busy]
        found += [f"file {name}" for name in sorted(self.files - before.files)]
        for kind in ("processes", "descriptors"):
            was, now = getattr(before, kind), getattr(self, kind)
            found += [
                f"{kind} of {role}: {was.get(role, 0)} -> {now[role]}" for role in now if now[role] > was.get(role, 0)
            ]
        if self.tasks > before.tasks:
            found.append(f"tasks: {before.tasks} -> {self.tasks}")
        return found

    def facts(self) -> dict[str, Any]:
        """In the form of a result."""
        return {name: value for name, value in asdict(self).items() if name != "files"}


def children(pid: int) -> list[int]:
    """Child processes of all generations; none for a process that has ended."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:  # as also later, it may end at any time
        return found
    for thread in threads:
        try:
            direct = [int(child) for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()]
        except OSError:
            continue
        for child in direct:
            found += [child, *children(child)]
    return found


def inspect(pid: int) -> Process | None:
    """None for a process that has ended."""
    root = Path(f"/proc/{pid}")
    try:
        command = (root / "cmdline").read_bytes().decode(errors="replace")
        status = dict(line.split(":\t", 1) for line in (root / "status").read_text().splitlines() if ":\t" in line)
        if status["State"].startswith("Z"):
            return None
        names = []
        for entry in (root / "fd").iterdir():
            try:
                names.append(os.readlink(entry))
            except OSError:
                continue
    except (OSError, KeyError):
        return None
    modules = {"engine": ENGINE, "decoder": DECODER, "grammars": GRAMMARS}
    role = next((role for role, module in modules.items() if module in command), "api")
    resident = int(status.get("VmRSS", "0 kB").split()[0]) * 1024
    return Process(pid, role, tuple(names), int(status["Threads"]), resident)


def engine_pid(server_pid: int) -> int:
    for child in children(server_pid):
        process = inspect(child)
        if process is not None and process.role == "engine":
            return child
    raise LookupError("the server has no engine process")


def processor_seconds(server_pid: int) -> dict[str, float]:
    """Processor time so far of the server's running processes, by role."""
    ticks = os.sysconf("SC_CLK_TCK")
    spent: dict[str, float] = {}
    for pid in (server_pid, *children(server_pid)):
        process = inspect(pid)
        if process is not None:
            # After the name, which may hold blanks: state is the third field, user and system time the 14th and 15th.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            spent[process.role] = spent.get(process.role, 0.0) + (int(fields[11]) + int(fields[12])) / ticks
    return spent


def footprint(server_pid: int, url: str, temporary: Path) -> Footprint:
    """temporary: a TMPDIR that only the server uses."""
    text = httpx.get(f"{url}/metrics", headers={"connection": "close"}, timeout=120).text
    processes = [found for pid in (server_pid, *children(server_pid)) if (found := inspect(pid)) is not None]
    roles = dict.fromkeys(one.role for one in processes)

    def by_role(amount: Callable[[Process], int]) -> dict[str, int]:
        return {role: sum(amount(one) for one in processes if one.role == role) for role in roles}

    files = {str(path) for path in Path("/dev/shm").iterdir() if _belongs(path, processes)}
    # Each built-in voice is kept once, at its first use: no more files than names.
    kept = (path for path in temporary.rglob("*") if FOLDER not in (path.name, path.parent.name))
    files |= {re.sub(r"reprise-\w+", "reprise-*", str(path)) for path in kept}
    return Footprint(
        by_role(lambda one: 1),
        by_role(lambda one: len(one.descriptors)),
        by_role(lambda one: one.threads),
        by_role(lambda one: one.resident_bytes),
        frozenset(files),
        _busy(text),
        _tasks(text),
    )


def _belongs(path: Path, processes: list[Process]) -> bool:
    """Shared memory that one of the processes has open or named after itself."""
    names = {name for process in processes for name in process.descriptors}
    return str(path) in names or not {str(process.pid) for process in processes}.isdisjoint(NUMBER.findall(path.name))


def _busy(text: str) -> tuple[str, ...]:
    lines = [line for line in text.splitlines() if any(gauge in line for gauge in WORK_GAUGES)]
    return tuple(
        line
        for line in lines
        if not line.startswith("#") and float(line.split()[-1]) and 'endpoint="other"' not in line
    )


def _tasks(text: str) -> int:
    match = re.search(r"^reprise_event_loop_tasks (\S+)$", text, re.M)
    assert match is not None, "the gauge event_loop_tasks is missing"
    return int(float(match[1]))


def wait_settled(server_pid: int, url: str, temporary: Path, before: Footprint, seconds: float = 15.0) -> Footprint:
    """The footprint as soon as nothing is left over; AssertionError that names what is."""
    deadline = time.monotonic() + seconds
    while True:
        now = footprint(server_pid, url, temporary)
        left = now.left_over(before)
        if not left:
            return now
        assert time.monotonic() < deadline, "left over: " + "; ".join(left)
        time.sleep(0.2)
