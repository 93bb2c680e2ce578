"""How long each phase of the engine's start takes, for the metric start_phase_seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from service.graphs.observations import Observations


class StartPhases:
    """Seconds of each phase of a start, as the gauge start_phase_seconds. The times of a repeated phase add up."""

    def __init__(self, observations: Observations) -> None:
        self._observations = observations
        self._seconds: dict[str, float] = {}

    def add(self, phase: str, seconds: float) -> None:
        """Adds to the seconds of a phase."""
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        self._observations.observe("start_phase_seconds", self._seconds[phase], phase=phase)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the time that the body of the context takes, unless it raises."""
        started = time.monotonic()
        yield
        self.add(phase, time.monotonic() - started)
