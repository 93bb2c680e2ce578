"""Phases of a start on a terminal."""

from __future__ import annotations

import io
import logging
import re

import pytest
from rich.console import Console

from service.link.messages import EngineState
from service.processes.progress import StartProgress, start_progress


def state(phase: str, detail: str = "", **fields: dict[str, int]) -> EngineState:
    return EngineState(phase, detail, (), 0, **fields)


def lines(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_phases_stay_on_the_terminal_with_their_times(caplog: pytest.LogCaptureFixture) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=80)
    progress = StartProgress(console)
    phases = [state("loading", "a/[b]"), state("capturing", "a/[b]", device_memory={"free": 1})]
    phases += [state("capturing", "on a CPU"), state("ready")]
    for phase in phases:
        progress(phase)
    progress.end(good=True)
    last = [line for line in lines(console) if line.startswith("✓")][-4:]
    assert [line.split("0:00")[0].strip() for line in last] == [
        "✓ starting the engine",
        "✓ loading a/[b]",
        "✓ capturing a/[b]",
        "✓ warming up on a CPU",
    ]
    with caplog.at_level(logging.INFO):
        progress(state("loading", "a/[b]"))
    assert caplog.messages == ["engine: loading (a/[b])"], "a restart is told in the log"


def test_a_start_that_fails_is_not_ticked_off() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=80)
    progress = StartProgress(console)
    progress(state("loading", "m"))
    progress.end(good=False)
    assert not [line for line in lines(console) if line.startswith("✓ loading")]


@pytest.mark.parametrize(("kind", "live"), [("xterm", True), ("dumb", False)])
def test_a_terminal_that_cannot_move_its_cursor_gets_log_lines(
    kind: str, live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", kind)
    progress = start_progress()
    assert (progress is not None) is live
    if progress is not None:
        progress.end(good=False)
