"""Runs of the suite are counted, and what failed is named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks import suite_runs
from benchmarks.servers.footprint import children

TESTS = """
import os

def test_good():
    assert os.environ["TMPDIR"]

def test_bad():
    if os.path.exists({flag!r}):
        raise ValueError("a reason")
"""

MEETING = """
import os, pathlib, time

def test_good():
    assert os.environ["TMPDIR"]

def test_both():
    here = pathlib.Path(__file__).parent
    (here / f"on-{{os.getpid()}}-{{sorted(os.sched_getaffinity(0))}}").touch()
    while len(list(here.glob("on-*"))) < {at_once}:
        time.sleep(0.05)
"""


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A suite of two tests, one of which fails when the file `flag` exists; results go to `out`."""
    monkeypatch.setattr(suite_runs, "ROOT", tmp_path)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    (tmp_path / "test_two.py").write_text(TESTS.format(flag=str(tmp_path / "flag")))
    return tmp_path


@pytest.mark.slow
def test_good_runs_at_once_share_the_processors(suite: Path) -> None:
    """Where there are two processors, each of two runs waits for the other, on a processor that the other has not."""
    before, at_once = os.sched_getaffinity(0), min(2, len(os.sched_getaffinity(0)))
    (suite / "test_two.py").write_text(MEETING.format(at_once=at_once))
    assert suite_runs.main(["--runs", "2", "--at-once", str(at_once), "--workers", "1", "--name", "good"]) == 0
    assert os.sched_getaffinity(0) == before
    result = json.loads((suite / "out/suite_runs_good.json").read_text())
    assert (result["workers"], result["busy_loops"], result["at_once"]) == (1, 0, at_once) and result["processors"]
    assert [(row["run"], row["status"], row["tests"], row["failed"]) for row in result["rows"]] == [
        (1, 0, 2, []),
        (2, 0, 2, []),
    ]
    first, second = ({*row["processors"]} for row in result["rows"])
    assert first and second and (at_once == 1 or not first & second)
    seen = {path.name.rsplit("-", 1)[1] for path in suite.glob("on-*")}
    assert seen == {str(row["processors"]) for row in result["rows"]}
    assert not list((suite).glob(".pytest_cache"))


@pytest.mark.slow
def test_runs_at_once_may_share_their_processors_and_loops(suite: Path) -> None:
    """Each of two runs waits for the other."""
    (suite / "test_two.py").write_text(MEETING.format(at_once=2))
    before = set(children(os.getpid()))
    arguments = ["--runs", "2", "--at-once", "2", "--shares", "1", "--workers", "1", "--busy", "1", "--name", "shared"]
    assert suite_runs.main(arguments) == 0
    assert set(children(os.getpid())) == before
    result = json.loads((suite / "out/suite_runs_shared.json").read_text())
    assert (result["at_once"], result["shares"]) == (2, 1)
    assert [row["processors"] for row in result["rows"]] == [result["processors"]] * 2


@pytest.mark.slow
def test_a_failure_beside_busy_loops_is_named_with_its_reason(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (suite / "flag").touch()
    before = set(children(os.getpid()))
    assert suite_runs.main(["--runs", "1", "--workers", "1", "--busy", "1", "--logs", str(suite / "logs")]) == 1
    assert set(children(os.getpid())) == before
    result = json.loads((suite / "out/suite_runs_w1_b1.json").read_text())
    (row,) = result["rows"]
    assert result["busy_loops"] == 1
    assert row["failed"] == [{"test": "test_two::test_bad", "message": "ValueError: a reason"}] and row["tail"]
    assert "failed: test_two::test_bad" in capsys.readouterr().out
    read = suite_runs.read_log((suite / "logs/suite_runs_w1_b1_1.log").read_text())
    assert read["tests"] == 2 and [one["test"] for one in read["failed"]] == ["test_two.py::test_bad"]


@pytest.mark.slow
def test_a_run_that_does_not_end_is_counted_as_failed(suite: Path) -> None:
    (suite / "test_two.py").write_text("import time\n\ndef test_slow():\n    time.sleep(3600)\n")
    row = suite_runs.run(1, [], limit=0.5)
    assert row["status"] == suite_runs.ENDED_BY_LIMIT and row["tests"] == 0


def test_of_a_run_that_is_cut_short_the_tests_that_had_ended_count() -> None:
    said = """
[gw0] [  0%] PASSED tests/a.py::test_one
tests/a.py::test_two[x y]
[gw11] [ 50%] FAILED tests/a.py::test_two[x y]
[gw0] [ 99%] SKIPPED tests/b.py::test_three (a reason)
[gw0] [100%] ERROR tests/b.py::test_four
tests/b.py::test_five
"""
    row = suite_runs.read_log(said)
    assert (row["tests"], row["skipped"]) == (4, 1)
    assert [one["test"] for one in row["failed"]] == ["tests/a.py::test_two[x y]", "tests/b.py::test_four"]


@pytest.mark.slow
def test_a_series_that_was_cut_short_goes_on(suite: Path) -> None:
    arguments = ["--workers", "1", "--name", "long", "--runs"]
    assert suite_runs.main([*arguments, "1"]) == 0
    path = suite / "out/suite_runs_long.json"
    result = json.loads(path.read_text())
    result["rows"][0]["seconds"] = 1234.5
    path.write_text(json.dumps(result))
    assert suite_runs.main([*arguments, "2", "--resume"]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["run"] for row in rows] == [1, 2] and rows[0]["seconds"] == 1234.5 != rows[1]["seconds"]
    path.write_text(json.dumps({**result, "commit": "0" * 40}))
    with pytest.raises(ValueError, match="is of commit 0000000"):
        suite_runs.main([*arguments, "2", "--resume"])


def test_shares_are_equal() -> None:
    assert suite_runs.shares(range(4, 11), 3) == [[4, 5], [6, 7], [8, 9]]


def test_more_runs_at_once_than_processors_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        suite_runs.main(["--at-once", "100000"])
    assert "each share needs a processor" in capsys.readouterr().err


def test_runs_that_do_not_fill_their_shares_equally_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        suite_runs.main(["--at-once", "0", "--shares", "-1"])
    with pytest.raises(SystemExit):
        suite_runs.main(["--at-once", "3", "--shares", "2"])
    assert "shares" in capsys.readouterr().err
