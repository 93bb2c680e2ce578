"""The overload benchmark: what it makes of what clients saw, and its whole way against a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import overload
from service.cli.bench.spec import Record


def answered(start: float, *, first: float = 0.1, duration: float = 0.5) -> Record:
    return Record(start=start, status=200, first=first, duration=duration)


def refused(start: float, seconds: float, message: str = "Too many requests in progress") -> Record:
    return Record(start=start, status=503, duration=seconds, error="refused", message=message)


def test_good_answers_count_between_the_first_queue_and_the_last_arrival() -> None:
    """Two answers a second, all from 0 to 20 s; the first 4 s are the filling of the queue."""
    records = [answered(number / 2) for number in range(41)]
    row = overload.row_of(records, limit=4.0, capacity=2.0)
    assert row["goodput_per_s"] == pytest.approx(2.0, rel=0.05) and row["goodput_share"] == pytest.approx(1, rel=0.05)
    assert row["good"] == 41 and not overload.missed(row)


def test_answers_that_come_late_are_not_good() -> None:
    late = [answered(number / 2, first=4.1, duration=5.0) for number in range(41)]
    row = overload.row_of(late, limit=4.0, capacity=2.0)
    assert (row["good"], row["late"], row["goodput_share"]) == (0, 41, 0)
    assert overload.missed(row) == ["goodput is 0% of the capacity"]


def test_a_refusal_after_a_wait_in_the_queue_is_not_one_at_once(tmp_path: Path) -> None:
    records = [answered(0.0), refused(1.0, 0.002), refused(2.0, 3.2, "the request timed out in the queue"), answered(9)]
    row = overload.row_of(records, limit=4.0, capacity=0.1)
    assert row["refused"] == 2 and row["refusal_client_p99_ms"] == pytest.approx(2.0)
    log = tmp_path / "log"
    lines = [
        {"outcome": "overloaded", "ms": 1.5},
        {"outcome": "overloaded", "ms": 3200.0},
        {"outcome": "ok", "ms": 9.0},
    ]
    log.write_text("plain text\n" + "".join(json.dumps(line) + "\n" for line in lines))
    assert overload.refusals_logged(log, waited=3.2) == [0.0015]
    slow = row | overload.quantiles("refusal_server", [0.006])
    assert "p99 of a refusal is 6.0 ms (server), 5 wanted" in overload.missed(slow)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_its_whole_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    shape = ["--streams", "2", "--rounds", "2", "--seconds", "2", "--processes", "1"]
    overload.main(["embedded", *shape, "--", "--max-in-flight", "8"])
    (row,) = json.loads((tmp_path / "overload_embedded.json").read_text())["rows"]
    assert row["capacity_per_s"] > 0 and row["requests"] == row["good"] + row["late"] + row["refused"] + row["failed"]
    assert not row["failed"]
