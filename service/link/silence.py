"""How long an engine has been silent. Time in which this process itself was paused (a frozen container, a suspended
machine) does not count, since messages that the engine sent meanwhile are read afterwards."""

from __future__ import annotations

from collections.abc import Callable

START_TIMEOUT = 900.0
"""Seconds of silence after which an engine that loads or captures is restarted."""
MAX_COUNTED = 1.0
"""Seconds between two checks that count as silence. The loop checks twice a second; a longer gap means that this
process was paused or busy."""


class Silence:
    """Seconds of silence, counted by frequent checks."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._looked = clock()
        self._seconds = 0.0

    def end(self) -> None:
        """Ends the silence: the engine sent something."""
        self._looked = self._clock()
        self._seconds = 0.0

    def look(self) -> float:
        """Checks, and returns the seconds so far."""
        now = self._clock()
        self._seconds += min(now - self._looked, MAX_COUNTED)
        self._looked = now
        return self._seconds
