"""Phases of a start on a terminal."""

from __future__ import annotations

import io
import logging
import re

import pytest
from rich.console import Console

from service.link.messages import EngineState
from service.processes.progress import StartProgress


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
