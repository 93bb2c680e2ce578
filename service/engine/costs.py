"""How long launches take, learnt from those that finished."""

from __future__ import annotations

_WEIGHT = 0.2


class CostModel:
    """Moving averages by kind and size class (powers of two). Sizes never seen are scaled from the nearest that was."""

    def __init__(self) -> None:
        self._seconds: dict[str, dict[int, tuple[float, float]]] = {}

    def learn(self, kind: str, size: int, seconds: float) -> None:
        known = self._seconds.setdefault(kind, {})
        mean_size, mean = known.get(size.bit_length(), (float(size), seconds))
        known[size.bit_length()] = (
            mean_size + _WEIGHT * (size - mean_size),
            mean + _WEIGHT * (seconds - mean),
        )

    def predict(self, kind: str, size: int) -> float:
        """Seconds; 0 for a kind that never ran."""
        known = self._seconds.get(kind)
        if not known:
            return 0.0
        nearest = min(known, key=lambda bits: abs(bits - size.bit_length()))
        mean_size, mean = known[nearest]
        return mean if nearest == size.bit_length() else mean * max(1.0, size / max(1.0, mean_size))
