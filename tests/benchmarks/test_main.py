"""One command runs the commands behind the results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import benchmarks.__main__ as runner
from benchmarks.commands import Command

pytestmark = pytest.mark.slow
KNOWN = {
    "good": Command("", "good", "python -c \"print('measured')\"", on_cpu=True),
    "bad": Command("", "bad", 'python -c "raise SystemExit(3)"', on_cpu=True),
    "fast": Command("", "fast", "python -c \"print('on a GPU')\""),
}


@pytest.fixture(autouse=True)
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "BY_RESULT", KNOWN)
    monkeypatch.setattr(runner, "LEAST_SECONDS", 1.0)
    monkeypatch.setenv("OUT", str(tmp_path))


def test_a_failure_is_told_and_does_not_stop_the_others(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert runner.main(["bad", "good"]) == 1
    printed = capsys.readouterr().out
    assert "bad: exit status 3" in printed and "good: exit status 0" in printed and "    measured" in printed
    assert (tmp_path / "good.log").read_text() == "measured\n"
    assert runner.main(["good"]) == 0


@pytest.mark.parametrize("gpu", [False, True])
def test_what_needs_a_gpu_is_not_begun_without_one(
    gpu: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert runner.main(["fast", "good"]) == (0 if gpu else 1)
    printed = capsys.readouterr().out
    assert ("fast: not measured, it needs a GPU" in printed) is not gpu
    assert (tmp_path / "fast.log").exists() is gpu and "good: exit status 0" in printed


def measured(folder: Path, name: str, commit: str) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"commit": commit, "rows": []}))


def test_only_stale_results_are_measured_anew(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPRISE_COMMIT", "0123456789abcdef")
    measured(tmp_path, "bad", "0123456789abcdef")
    assert runner.main(["--stale", "bad", "good"]) == 0
    printed = capsys.readouterr().out
    assert "good: exit status 0" in printed and "bad" not in printed
