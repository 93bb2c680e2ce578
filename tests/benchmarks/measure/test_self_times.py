"""A stage's own time."""

from __future__ import annotations

import pytest

from benchmarks.measure import self_times


class Work:
    """Moves a clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def outer(self) -> None:
        self.now += 1
        self.inner()
        self.now += 2

    def inner(self) -> None:
        self.now += 10


def test_a_stage_does_not_count_those_that_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work()
    monkeypatch.setattr(self_times.time, "perf_counter", work.clock)
    stages = self_times.SelfTimes()
    for name in ("outer", "inner"):
        stages.watch(work, name, name)
    work.outer()
    work.now += 100
    stages.close()
    assert stages.seconds == {"outer": 3, "inner": 10, "other": 100}
