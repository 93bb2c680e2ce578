"""Shows the start of the engine: on a terminal a live line for each phase, otherwise log lines."""

from __future__ import annotations

import logging

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from service.link.messages import EngineState

log = logging.getLogger("reprise")

STARTING = ("loading", "capturing")


def phase_of(state: EngineState) -> str:
    """The phase in words. Without a GPU nothing is captured: each bucket is run once."""
    return "warming up" if state.phase == "capturing" and not state.device_memory else state.phase


def log_phase(state: EngineState) -> None:
    log.info("engine: %s%s", phase_of(state), f" ({state.detail})" if state.detail else "")


def start_progress() -> StartProgress | None:
    """The live display; None where there is no terminal, or one that cannot move its cursor (TERM=dumb) and would show
    nothing before the end."""
    console = Console(stderr=True)
    return StartProgress(console) if console.is_interactive else None


class StartProgress:
    """Phases of the first start, each with its elapsed time. Later phases are logged."""

    def __init__(self, console: Console) -> None:
        columns = (SpinnerColumn(finished_text="[green]✓[/green]"), TextColumn("{task.description}"))
        self._display = Progress(*columns, TimeElapsedColumn(), console=console)
        self._task: TaskID | None = None
        self._ended = False
        self._display.start()
        self._begin("starting the engine")

    def __call__(self, state: EngineState) -> None:
        """Called with each state that differs from the last one."""
        if self._ended:
            log_phase(state)
        elif state.phase in STARTING:
            self._begin(f"{phase_of(state)} {state.detail}".rstrip())

    def end(self, *, good: bool) -> None:
        """Ends the live display; its lines stay on the terminal. good: the engine is ready."""
        if not self._ended:
            self._finish(good)
            self._display.stop()
            self._ended = True

    def _begin(self, description: str) -> None:
        self._finish(good=True)
        self._task = self._display.add_task(escape(description), total=1)

    def _finish(self, good: bool) -> None:
        if self._task is not None and good:
            self._display.update(self._task, completed=1)
        elif self._task is not None:
            self._display.stop_task(self._task)
