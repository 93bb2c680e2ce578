"""How long launches take, learnt from those that finished."""

from __future__ import annotations

_UP, _DOWN = 0.5, 0.2
"""Weights of a launch that took longer and of one that took shorter than foreseen: who waits for a listener's slack to
cover a launch had better think it too long than too short."""


class LaunchCosts:
    """Moving averages by kind and size class (powers of two). Sizes never seen are scaled from the nearest that was."""

    def __init__(self) -> None:
        self._seconds: dict[str, dict[int, tuple[float, float]]] = {}

    def learn(self, kind: str, size: int, seconds: float) -> None:
        known = self._seconds.setdefault(kind, {})
        mean_size, mean = known.get(size.bit_length(), (float(size), seconds))
        weight = _UP if seconds > mean else _DOWN
        known[size.bit_length()] = (mean_size + weight * (size - mean_size), mean + weight * (seconds - mean))

    def predict(self, kind: str, size: int) -> float:
        """Seconds; 0 for a kind that never ran. A size below the mean of its class is taken to cost as much."""
        known = self._seconds.get(kind)
        if not known:
            return 0.0
        nearest = min(known, key=lambda bits: abs(bits - size.bit_length()))
        mean_size, mean = known[nearest]
        return mean * max(1.0, size / max(1.0, mean_size))
