"""One command runs the commands behind the results."""

from __future__ import annotations

from pathlib import Path

import pytest

import benchmarks.__main__ as runner
from benchmarks.commands import Command

KNOWN = {
    "good": Command("", "good", "python -c \"print('measured')\""),
    "bad": Command("", "bad", 'python -c "raise SystemExit(3)"'),
    "slow": Command(
        "", "slow", "python -c \"import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('ended'); raise\""
    ),
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


def test_what_does_not_fit_is_interrupted_and_what_comes_then_is_not_begun(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["--minutes", "0.05", "slow", "good"]) == 1
    printed = capsys.readouterr().out
    assert "slow: cut short" in printed and "    ended" in printed and "good: no time left" in printed


def test_an_unknown_result_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        runner.main(["encoder_of_nothing"])
    assert exit_.value.code == 2 and "'encoder_of_nothing'" in capsys.readouterr().err
