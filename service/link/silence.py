"""How long an engine has been silent, not counting time in which this process was paused itself (a frozen container, a
suspended machine): messages that the engine sent meanwhile are read afterwards."""

from __future__ import annotations

from collections.abc import Callable

MOST_AT_ONCE = 1.0
"""Most seconds counted between two looks. The loop looks twice a second; a longer gap means that this process was
paused or busy."""


class Silence:
    """Seconds of silence, counted by looking often."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._looked = clock()
        self._seconds = 0.0

    def end(self) -> None:
        """A sign of life."""
        self._looked = self._clock()
        self._seconds = 0.0

    def look(self) -> float:
        """Seconds so far."""
        now = self._clock()
        self._seconds += min(now - self._looked, MOST_AT_ONCE)
        self._looked = now
        return self._seconds
