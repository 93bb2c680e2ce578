"""The share of a model's time that work without a live listener is guaranteed: speech that is not heard while it is
made, and reference audio. It usually gets more, while listeners have audio in hand."""

from __future__ import annotations

SHARE = 0.2
"""Share of the time of steps beside live streams."""
LAG = 0.25
"""Seconds of it that may be lacking before listeners have to wait."""


class BackgroundShare:
    """Counts the seconds of its share that one kind of such work lacks."""

    def __init__(self) -> None:
        self._lacking = 0.0

    @property
    def overdue(self) -> bool:
        return self._lacking >= LAG

    def owes(self, seconds: float) -> bool:
        """Whether a launch of so many predicted seconds is due."""
        return self._lacking >= max(LAG, (1 - SHARE) * seconds)

    def count(self, seconds: float, *, served: float, waits: bool) -> None:
        """Counts a launch. served: the part of it that was such work. waits: whether more of it could have run."""
        self._lacking = max(0.0, self._lacking + (SHARE - served) * seconds) if waits else 0.0
