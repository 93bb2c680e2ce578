"""What launches cost, measured: the scheduler compares these seconds with the streams' slack."""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal

Kind = Literal["prefill", "text_prefill", "clip_prefill", "tail", "decode", "vae", "clip"]
"""prefill is the eager pass; the other two are replayed: rungs for text alone, and rungs that hold patches."""

_WEIGHT = 0.2
_DEVIATIONS = 2.0


class CostModel:
    """Running means of seconds per (kind, solver steps, size), with the deviations that make them safe bounds.

    Size is tokens for "prefill", the rung's tokens for replayed prefills, bucket rows for a step and 1 for a piece of
    a clip; solver steps is 0 where a cost has none. Means and deviations are exponentially weighted, as TCP estimates
    a round trip (RFC 6298). A size never seen is interpolated
    between its neighbours; above the largest seen, cost grows in proportion; below the smallest, it stays.
    """

    def __init__(self, prior: float = 0.02) -> None:
        self._prior = prior
        self._seen: dict[tuple[Kind, int], dict[int, tuple[float, float]]] = {}

    def observe(self, kind: Kind, steps: int, size: int, seconds: float) -> None:
        sizes = self._seen.setdefault((kind, steps), {})
        if size not in sizes:
            sizes[size] = (seconds, seconds / 8)
            return
        mean, deviation = sizes[size]
        deviation += _WEIGHT * (abs(seconds - mean) - deviation)
        sizes[size] = (mean + _WEIGHT * (seconds - mean), deviation)

    def mean(self, kind: Kind, steps: int, size: int) -> float:
        """Expected seconds; 0 for size 0, the prior when nothing of this kind was ever seen."""
        return self._estimate(kind, steps, size, 0.0)

    def bound(self, kind: Kind, steps: int, size: int) -> float:
        """Seconds that are rarely exceeded: mean + 2 deviations."""
        return self._estimate(kind, steps, size, _DEVIATIONS)

    def _estimate(self, kind: Kind, steps: int, size: int, deviations: float) -> float:
        if size == 0:
            return 0.0
        seen = self._seen.get((kind, steps)) or self._nearest_steps(kind, steps)
        if not seen:
            return self._prior
        sizes = sorted(seen)
        index = bisect_left(sizes, size)

        def at(i: int) -> float:
            mean, deviation = seen[sizes[i]]
            return mean + deviations * deviation

        if index == len(sizes):
            return at(-1) * size / sizes[-1]
        if sizes[index] == size or index == 0:
            return at(index)
        share = (size - sizes[index - 1]) / (sizes[index] - sizes[index - 1])
        return at(index - 1) + share * (at(index) - at(index - 1))

    def _nearest_steps(self, kind: Kind, steps: int) -> dict[int, tuple[float, float]] | None:
        """Costs measured with another number of solver steps, while there are none with this one."""
        others = [key for key in self._seen if key[0] == kind]
        return self._seen[min(others, key=lambda key: abs(key[1] - steps))] if others else None
