"""Measured seconds of the launches of a speech model, which the scheduler compares with the slack of streams."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal

Kind = Literal["prefill", "text_prefill", "voice_prefill", "audio_prefill", "tail", "decode", "vae", "clip"]
"""prefill is the eager one. Replayed are text_prefill (text alone), voice_prefill (few patches: the rest of a voice's
reference) and audio_prefill (as many patches as tokens). clip: encoding a piece of reference audio."""
REPLAYED_PREFILLS: Sequence[Kind] = ("text_prefill", "voice_prefill", "audio_prefill")

_WEIGHT = 0.2
_DEVIATIONS = 2.0
_PRIOR = 0.02
"""Seconds assumed while nothing of a kind was measured."""
_MAX_OVER_MEAN = 3.0
"""A measurement counts as at most this many times what was expected."""


class SpeechCosts:
    """Running means of seconds by (kind, solver steps, size), with deviations for safe bounds.

    Size is rounded tokens for "prefill" (stream.eager_cost_key), the bucket's tokens for replayed prefills, the rows
    of the bucket for a step and 1 for a piece of reference audio; solver steps is 0 where a cost has none. Means and
    deviations are exponentially weighted, as TCP estimates a round trip (RFC 6298). A size without a measurement is
    interpolated between its neighbours; above the largest measured size cost grows in proportion, below the smallest it
    stays the same. A launch that was held up counts as one that took _MAX_OVER_MEAN times the estimate, also the first
    of a size: a rare size would keep it for long.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[Kind, int], dict[int, tuple[float, float]]] = {}
        self._estimates: dict[tuple[Kind, int, int, float], float] = {}
        """Of what was measured so far: the next step is chosen from hundreds of them."""

    def observe(self, kind: Kind, solver_steps: int, size: int, seconds: float) -> None:
        sizes = self._seen.setdefault((kind, solver_steps), {})
        expected = self.mean(kind, solver_steps, size) if sizes else 0.0
        if expected > 0:
            seconds = min(seconds, _MAX_OVER_MEAN * expected)
        self._estimates.clear()
        if size not in sizes:
            sizes[size] = (seconds, seconds / 8)
            return
        mean, deviation = sizes[size]
        deviation += _WEIGHT * (abs(seconds - mean) - deviation)
        sizes[size] = (mean + _WEIGHT * (seconds - mean), deviation)

    def mean(self, kind: Kind, solver_steps: int, size: int) -> float:
        """Expected seconds; 0 for size 0, _PRIOR when nothing of this kind was measured."""
        return self._estimate(kind, solver_steps, size, 0.0)

    def bound(self, kind: Kind, solver_steps: int, size: int) -> float:
        """Seconds that are rarely exceeded: mean + 2 deviations."""
        return self._estimate(kind, solver_steps, size, _DEVIATIONS)

    def _estimate(self, kind: Kind, solver_steps: int, size: int, deviations: float) -> float:
        key = kind, solver_steps, size, deviations
        estimate = self._estimates.get(key)
        if estimate is None:
            estimate = self._estimates[key] = self._interpolated(*key)
        return estimate

    def _interpolated(self, kind: Kind, solver_steps: int, size: int, deviations: float) -> float:
        if size == 0:
            return 0.0
        seen = self._seen.get((kind, solver_steps)) or self._nearest_steps(kind, solver_steps)
        if not seen:
            return _PRIOR
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

    def _nearest_steps(self, kind: Kind, solver_steps: int) -> dict[int, tuple[float, float]] | None:
        """Costs at the nearest number of solver steps that was measured, if this number was not."""
        others = [key for key in self._seen if key[0] == kind]
        return self._seen[min(others, key=lambda key: abs(key[1] - solver_steps))] if others else None
