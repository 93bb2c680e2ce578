"""Metric events: counted in the engine where they happen, sent to the API process."""

from __future__ import annotations

from typing import Literal

import msgspec

Route = Literal["replay", "eager"]
EagerReason = Literal["ragged", "no_bucket", "disabled", "empty", "capture_failed"]
"""Why a step is not replayed; docs/routes.md says what each means."""


class Observation(msgspec.Struct, frozen=True):
    """A metric event: `name` is a metric of the API process without its prefix."""

    name: str
    value: float
    labels: dict[str, str] = {}


class Observations:
    """Metric events of the current tick. Counters of one name and labels are summed before they are sent."""

    def __init__(self) -> None:
        self._events: list[Observation] = []
        self._counts: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """One value of a histogram or gauge."""
        self._events.append(Observation(name, value, labels))

    def count(self, name: str, amount: float = 1.0, /, **labels: str) -> None:
        """Adds to a counter."""
        key = (name, tuple(labels.items()))
        self._counts[key] = self._counts.get(key, 0.0) + amount

    def count_eager_step(self, reason: EagerReason, *, model: str, kind: str) -> None:
        self.count("steps_total", model=model, kind=kind, route="eager", reason=reason)

    def drain(self) -> tuple[Observation, ...]:
        """All events since the last call."""
        counts = (Observation(name, value, dict(labels)) for (name, labels), value in self._counts.items())
        events = (*self._events, *counts)
        self._events, self._counts = [], {}
        return events
