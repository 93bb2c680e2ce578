"""What launches of a chat model cost in seconds, measured from those that finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul

# Running means of encoder passes and decode steps.
_WEIGHT_ABOVE, _WEIGHT_BELOW = 0.5, 0.2
"""Weight of a measurement above the mean and of one below it. Too high an estimate only delays a launch; too low a one
can make a live listener's audio run out."""
_MAX_OVER_MEAN = 3.0
"""A measurement counts as at most this many times the mean."""

# The Kalman filter of the cost of prefill chunks.
_USUAL_SHAPE = (128.0, 1.0, 1e-4)
"""Cost of a launch, of a token and of a pair of a query and a cached key, relative to a token, before anything is
measured."""
_NOISE = 0.1
"""Standard deviation of a measurement, relative to the expected value."""
_DRIFT = 5e-4
"""Variance that each coefficient, relative to its start, gains with a measurement."""
_MAX_DEVIATIONS = 3.0
"""A measurement farther off than this many standard deviations counts as one at that distance."""
_MIN_FACTOR = 0.02
"""No coefficient falls below this share of its start."""
_WRONG_START = 0.5
"""If coefficients fall below this share of their start, the start was wrong."""

# Recent launches of a certain number of tokens.
_MAX_JUMP = 1.3
"""A measurement counts as at most this many times the mean of launches of the same number of tokens, and as at least
that mean divided by it."""
_MAX_AGE = 50
"""After this many other measurements, one of a certain size is worth no more than the coefficients."""


class ChatCosts:
    """Running means of seconds by kind (encoder, decode) and size, sizes grouped by powers of two, and the cost of
    prefill chunks.

    A group without a measurement is estimated from the nearest one, in proportion to the size. A launch that was held
    up, for example on a machine that was suspended, counts as one that took _MAX_OVER_MEAN times the mean. The same
    idea as engine.speech.costs.SpeechCosts, without its bounds: nobody listens live to a chat.
    """

    def __init__(self) -> None:
        self.prefill = PrefillCost()
        self._seconds: dict[str, dict[int, tuple[float, float]]] = {}

    def observe(self, kind: str, size: int, seconds: float) -> None:
        known = self._seconds.setdefault(kind, {})
        mean_size, mean = known.get(size.bit_length(), (float(size), seconds))
        seconds = min(seconds, _MAX_OVER_MEAN * mean) if mean > 0 else seconds
        weight = _WEIGHT_ABOVE if seconds > mean else _WEIGHT_BELOW
        known[size.bit_length()] = (mean_size + weight * (size - mean_size), mean + weight * (seconds - mean))

    def mean(self, kind: str, size: int) -> float:
        """Expected seconds; 0 for a kind that has never run. A size below the mean size of its group costs as much as
        the mean."""
        known = self._seconds.get(kind)
        if not known:
            return 0.0
        nearest = min(known, key=lambda bits: abs(bits - size.bit_length()))
        mean_size, mean = known[nearest]
        return mean * max(1.0, size / max(1.0, mean_size))


@dataclass(frozen=True)
class _Measured:
    """Recent launches of a certain number of tokens."""

    seconds: float
    """Mean for `pairs` pairs."""
    pairs: int
    at: int
    """Number of the last measurement."""


class PrefillCost:
    """Seconds of a step's prefill chunks: launch + token x tokens + pair x pairs; a pair is a query and a cached key.

    A Kalman filter tracks the three coefficients, relative to their start: the values given to `start` (on a GPU, from
    its captured prefills), or else the usual shape scaled to the first measurement. A measurement far off moves them no
    more than one at the edge of what is plausible, and one above the expected value twice as much as one below it.

    Where a launch does not fill the GPU, more tokens cost nothing, which a linear model cannot express: each
    measurement of a smaller chunk would raise the estimate of a larger one, and make the next chunk smaller still. So a
    number of tokens that was launched recently costs what it took then, scaled by the coefficients to other pairs.
    """

    def __init__(self) -> None:
        # Lists, since a first token waits for `observe`, which takes half as long again with NumPy.
        self._start = list(_USUAL_SHAPE)
        self._factors = [1.0, 1.0, 1.0]
        self._variance = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
        self._measured: dict[int, _Measured] = {}
        """Recent launches by number of tokens."""
        self._number = 0
        """Number of measurements."""
        self.known = False
        """Whether anything was measured; until then everything costs 0."""

    def start(self, launch: float, token: float, pair: float, measured: Mapping[int, float] | None = None) -> None:
        """Sets the coefficients. One that is 0, because it was lost in noise, is set to its usual share of a token's.
        measured: the seconds by tokens, without cached keys, from which the coefficients were computed."""
        given = zip((launch, token, pair), _USUAL_SHAPE, strict=True)
        self._start = [seconds if seconds > 0 else share * token for seconds, share in given]
        self._measured = {tokens: _Measured(seconds, 0, self._number) for tokens, seconds in (measured or {}).items()}
        self.known = True

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """Seconds of a launch, of a token and of a pair."""
        if not self.known:
            return 0.0, 0.0, 0.0
        launch, token, pair = map(mul, self._start, self._factors)
        return launch, token, pair

    def seconds(self, tokens: int, pairs: int) -> float:
        """tokens: those that are computed, including the padding of a captured graph."""
        recent = self._recent(tokens)
        return self._linear(tokens, pairs) if recent is None else self._with_pairs(recent, tokens, pairs)

    def measured_lately(self, tokens: int) -> bool:
        return self._recent(tokens) is not None

    def _linear(self, tokens: int, pairs: int) -> float:
        launch, token, pair = self.coefficients
        return launch + token * tokens + pair * pairs

    def _recent(self, tokens: int) -> _Measured | None:
        found = self._measured.get(tokens)
        return None if found is None or self._number - found.at > _MAX_AGE else found

    def _with_pairs(self, measured: _Measured, tokens: int, pairs: int) -> float:
        return measured.seconds * self._linear(tokens, pairs) / self._linear(tokens, measured.pairs)

    def _note(self, tokens: int, pairs: int, seconds: float) -> None:
        self._number += 1
        self._measured = {size: found for size, found in self._measured.items() if self._number - found.at <= _MAX_AGE}
        if (before := self._measured.get(tokens)) is not None:
            mean = self._with_pairs(before, tokens, pairs)
            seconds = (mean + min(max(seconds, mean / _MAX_JUMP), _MAX_JUMP * mean)) / 2
        self._measured[tokens] = _Measured(seconds, pairs, self._number)

    def observe(self, tokens: int, pairs: int, seconds: float) -> None:
        """Records how long a step's chunks took."""
        terms = list(map(mul, self._start, (1, tokens, pairs)))
        if not self.known:
            if seconds <= 0:
                return
            scale = seconds / sum(terms)
            self._start, terms, self.known = _scaled(self._start, scale), _scaled(terms, scale), True
        largest = self._update(terms, seconds)
        self._note(tokens, pairs, min(seconds, largest))

    def _update(self, terms: Sequence[float], seconds: float) -> float:
        """One step of the Kalman filter: `seconds` is a measurement of terms x factors. Returns the largest plausible
        value of the measurement."""
        expected = _dot(terms, self._factors)
        spread = [_dot(row, terms) for row in self._variance]
        variance = _dot(terms, spread) + (_NOISE * expected) ** 2
        bound = _MAX_DEVIATIONS * variance**0.5
        error = min(max(seconds - expected, -bound), bound)
        gain, step = _scaled(spread, 1 / variance), error if error > 0 else error / 2
        factors = zip(self._factors, gain, strict=True)
        self._factors = [max(factor + part * step, _MIN_FACTOR) for factor, part in factors]
        for axis, row in enumerate(self._variance):
            row[:] = [value - gain[axis] * other for value, other in zip(row, spread, strict=True)]
            row[axis] += _DRIFT
        self._scale_down()
        trace = sum(row[axis] for axis, row in enumerate(self._variance))
        self._variance = [_scaled(row, min(1.0, 3.0 / trace)) for row in self._variance]
        return expected + bound

    def _scale_down(self) -> None:
        """Makes the current coefficients the start if both a launch and a token turned out to cost far less. The first
        measurement was then of a call that compiled kernels or was held up, and must not set a lower bound."""
        scale = max(self._factors[:2])
        if scale < _WRONG_START:
            self._start, self._factors = _scaled(self._start, scale), _scaled(self._factors, 1 / scale)
            self._variance = [_scaled(row, 1 / scale**2) for row in self._variance]


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(map(mul, first, second))


def _scaled(vector: Sequence[float], factor: float) -> list[float]:
    return [factor * value for value in vector]
