"""Runs of the suite are counted, and what failed is named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks import suite_runs
from benchmarks.footprint import children

TESTS = """
import os

def test_good():
    assert os.environ["TMPDIR"]

def test_bad():
    if os.path.exists({flag!r}):
        raise ValueError("a reason")
"""


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A suite of two tests, one of which fails when the file `flag` exists; results go to `out`."""
    monkeypatch.setattr(suite_runs, "ROOT", tmp_path)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    (tmp_path / "test_two.py").write_text(TESTS.format(flag=str(tmp_path / "flag")))
    return tmp_path


def test_good_runs_beside_busy_loops(suite: Path) -> None:
    before = set(children(os.getpid()))
    assert suite_runs.main(["--runs", "2", "--workers", "1", "--busy", "1", "--name", "good"]) == 0
    assert set(children(os.getpid())) == before
    result = json.loads((suite / "out/suite_runs_good.json").read_text())
    assert (result["workers"], result["busy_loops"]) == (1, 1) and result["processors"]
    assert [(row["run"], row["status"], row["tests"], row["failed"]) for row in result["rows"]] == [
        (1, 0, 2, []),
        (2, 0, 2, []),
    ]
    assert not list((suite).glob(".pytest_cache"))


def test_a_failure_is_named_with_its_reason(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (suite / "flag").touch()
    assert suite_runs.main(["--runs", "1", "--workers", "1"]) == 1
    (row,) = json.loads((suite / "out/suite_runs_w1_b0.json").read_text())["rows"]
    assert row["failed"] == [{"test": "test_two::test_bad", "message": "ValueError: a reason"}] and row["tail"]
    assert "failed: test_two::test_bad" in capsys.readouterr().out


def test_a_run_that_does_not_end_is_counted_as_failed(suite: Path) -> None:
    (suite / "test_two.py").write_text("import time\n\ndef test_slow():\n    time.sleep(3600)\n")
    row = suite_runs.run(1, [], limit=0.5)
    assert row["status"] == suite_runs.ENDED_BY_LIMIT and row["tests"] == 0
