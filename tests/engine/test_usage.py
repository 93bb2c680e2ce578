"""What the engine process says about itself and its start."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from service.engine.core.worker import StartPhases
from service.engine.memory import process_age, process_usage
from service.graphs.observations import Observations


def test_usage_is_that_of_the_process() -> None:
    before = process_usage()
    assert before is not None
    used = time.process_time()
    while time.process_time() < used + 0.2:
        pass
    block, over = bytearray(os.urandom(1 << 16) * 512), threading.Event()
    waiting = threading.Thread(target=over.wait)
    waiting.start()
    after = process_usage()
    over.set()
    waiting.join()
    assert after is not None
    assert after.cpu_seconds - before.cpu_seconds > 0.15
    assert after.resident_bytes >= len(block)
    assert after.threads > before.threads
    age = process_age()
    assert age is not None and age > 0 and process_age() >= age  # type: ignore[operator]


def test_a_name_with_brackets_is_read_over_and_a_system_without_proc_says_nothing(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    stat.write_text(f"7 (a ) b) S 1 7 7 0 -1 0 0 0 0 0 {3 * ticks} {ticks} 0 0 20 0 9 0 500 1000 11 0\n")
    usage = process_usage(stat)
    assert usage is not None and (usage.cpu_seconds, usage.threads, usage.resident_bytes) == (4, 9, 11 * page)
    assert process_usage(tmp_path / "none") is None and process_age(tmp_path / "none") is None


def test_phases_of_a_start_add_up() -> None:
    observations = Observations()
    phases = StartPhases(observations)
    phases.add("load", 1.0)
    phases.add("capture", 4.0)
    phases.add("load", 2.0)
    with phases.timed("memory"):
        pass
    events = observations.drain()
    last = {event.labels["phase"]: event.value for event in events}
    assert {event.name for event in events} == {"start_phase_seconds"}
    assert last["load"] == 3 and last["capture"] == 4 and last["memory"] >= 0
