"""Which capacity would be worth a recording: counts what was needed and proposes what would save most padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from models.protocol import Capacity
from service.graphs.buckets import CapacityKey, cheapest, fits, key_of, leading

_LEAST_CALLS = 16.0
"""Calls before anything is proposed."""
_LEAST_GAIN = 0.05
"""Share of the rows computed now that a recording must save to be worth its capture."""
_HALVE_AT = 4096.0
"""Calls after which all counts are halved: demand of an hour ago fades."""
_MOST_ROUNDED = 4096
"""Remembered needs; images come in endless sizes."""


class Demand:
    """Calls by their needs, rounded up to four steps an octave; old ones count less."""

    def __init__(self, ladder: Sequence[Capacity]) -> None:
        self._ladder = ladder
        self._calls: dict[CapacityKey, float] = {}
        self._rounded: dict[CapacityKey, CapacityKey | None] = {}
        self._total = 0.0

    def note(self, needs: Capacity) -> None:
        """Counts one call. Needs over the whole ladder are not counted: no recording can serve them."""
        exact = key_of(needs)
        if exact not in self._rounded:
            if len(self._rounded) >= _MOST_ROUNDED:
                self._rounded.clear()
            rounded = self._round(needs)
            self._rounded[exact] = None if rounded is None else key_of(rounded)
        key = self._rounded[exact]
        if key is None:
            return
        self._calls[key] = self._calls.get(key, 0.0) + 1.0
        self._total += 1.0
        if self._total > _HALVE_AT:
            self._calls = {key: calls / 2 for key, calls in self._calls.items() if calls >= 1.0}
            self._total = sum(self._calls.values())

    def propose(self, recorded: Iterable[Capacity], unavailable: Iterable[Capacity]) -> Capacity | None:
        """The wanted capacity that would save most of the work done on padding; None when none saves a twentieth.

        A call that no recording holds counts double: it runs eagerly.
        """
        if self._total < _LEAST_CALLS:
            return None
        recorded = list(recorded)
        barred = {key_of(capacity) for capacity in (*recorded, *unavailable)}
        calls = [(dict(key), count) for key, count in self._calls.items()]
        now = [_size(cheapest(recorded, needs)) or 2 * _size(needs) for needs, _ in calls]
        best, best_gain = None, _LEAST_GAIN * sum(size * count for size, (_, count) in zip(now, calls, strict=True))
        for candidate, _ in calls:
            if key_of(candidate) in barred:
                continue
            gain = sum(
                max(0, size - _size(candidate)) * count
                for size, (needs, count) in zip(now, calls, strict=True)
                if fits(candidate, needs)
            )
            if gain > best_gain:
                best, best_gain = candidate, gain
        return best

    def _round(self, needs: Capacity) -> Capacity | None:
        """`needs` with its leading size on the grid and the other sizes of the rung above it: a recording made for
        it also serves the neighbours."""
        rung = cheapest(self._ladder, needs)
        if rung is None:
            return None
        name = leading(rung)
        return dict(rung) | {name: min(rung[name], _round_up(needs[name]))}


def _round_up(size: int) -> int:
    step = 1 << max(0, size.bit_length() - 3)
    return -(-size // step) * step


def _size(capacity: Capacity | None) -> int:
    return capacity[leading(capacity)] if capacity else 0
