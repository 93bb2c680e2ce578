"""How much prefill and encoder work a launch may hold while other rows decode, based on the measured costs of
launches."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul

import numpy as np

from service.graphs.runner import GraphRunner

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


_FEW = 32
"""Fewer tokens than this are not worth a step of their own: they wait for a gap with more room."""
_GAIN = 0.05
"""Relative gain in tokens per second for which a prompt that does not end in this step is cut to a captured size."""


@dataclass
class ChunkBudget:
    """The budget of one step. The scheduler asks how many tokens each chunk may hold, and spends them.

    tokens: limit on the tokens of all chunks.
    seconds: limit on the predicted time of all chunks.
    room: another limit in seconds, what the gap between two tokens has left. Where it allows fewer than _FEW tokens,
        and not all of `tokens`, `min_tokens` are allowed instead.
    sizes: tokens of the captured prefills, ascending; empty if chunks need not fit them.
    multiple: of which chunks have whole ones, unless they end their prompts.
    """

    tokens: int
    seconds: float = math.inf
    room: float = math.inf
    min_tokens: int = 0
    cost: PrefillCost = field(default_factory=PrefillCost)
    sizes: tuple[int, ...] = ()
    multiple: int = 1

    used: int = 0
    """Tokens of the chunks so far."""
    pairs: int = 0
    """Pairs of a query and a cached key in the chunks so far."""

    @property
    def predicted(self) -> float:
        """Seconds of the chunks so far."""
        return self.cost.seconds(self.padded(self.used), self.pairs) if self.used else 0.0

    @property
    def crowded(self) -> bool:
        """Whether the gap has no room for a chunk."""
        return not self.min_tokens and self._within(self.room, 0) < self._few

    @property
    def _few(self) -> int:
        return min(max(_FEW, self.multiple), self.tokens)

    def align(self, multiple: int) -> None:
        """Limits chunks to whole multiples of so many tokens, of which at least one is allowed."""
        self.multiple, self.tokens = multiple, max(self.tokens, multiple)
        if self.min_tokens:
            self.min_tokens = max(self.min_tokens, multiple)

    def padded(self, tokens: int) -> int:
        """Tokens that a replay would compute for `tokens`: the captured size, or `tokens` if no captured size holds
        them."""
        index = bisect_left(self.sizes, tokens)
        return self.sizes[index] if index < len(self.sizes) else tokens

    def affords(self, context: int) -> int:
        """Tokens that the next chunk may hold after `context` cached keys."""
        paced = self._within(self.room, context)
        if self.used + paced < self._few:
            paced = self.min_tokens - self.used
        return max(0, min(self.tokens - self.used, self._within(self.seconds, context), paced))

    def spend(self, tokens: int, context: int) -> None:
        """Spends tokens; a negative number gives them back."""
        self.used += tokens
        self.pairs += tokens * context

    def excess(self, *, finished: bool) -> int:
        """Tokens to give back, so that a smaller captured prefill can be replayed, which has less padding or keeps to
        the seconds. finished: the chunks end their prompts, so the tokens that are given back need a step of their own.
        """
        below = bisect_right(self.sizes, self.used) - 1
        if below < 0 or self.sizes[below] == self.used or self.padded(self.used) == self.used:
            return 0
        size = self.sizes[below]
        if size < self.multiple:
            return 0
        if size >= self.min_tokens and self.predicted > min(self.seconds, self.room):
            return self.used - size
        whole, cut = (self.cost.seconds(self.padded(tokens), 0) for tokens in (self.used, size))
        if finished:
            pays = cut + self.cost.seconds(self.padded(self.used - size), 0) < whole
        else:
            pays = cut * self.used < (1 - _GAIN) * whole * size
        return self.used - size if pays else 0

    def _within(self, seconds: float, context: int) -> int:
        """Further tokens after `context` keys with which the whole step stays within `seconds`."""
        launch, token, pair = self.cost.coefficients
        each = token + pair * context
        if math.isinf(seconds) or not each:
            return self.tokens if seconds > 0 else -self.used
        paced = int(min(float(self.tokens), (seconds - launch - token * self.used - pair * self.pairs) / each))
        return self._as_measured(paced, seconds, context)

    def _as_measured(self, paced: int, seconds: float, context: int) -> int:
        """`paced` further tokens according to the coefficients, or more if a larger captured size was launched lately
        and did not take longer. A smaller size is assumed to take no longer than a larger one."""
        for size in reversed(self.sizes):
            more = size - self.used
            if more <= paced:
                return paced
            measured = size <= self.tokens and self.cost.measured_lately(size)
            if measured and self.cost.seconds(size, self.pairs + more * context) <= seconds:
                return more
        return paced


_AIM = 0.9
"""Share of the target that predictions may fill; the rest allows for their errors."""
_MIN_DECODE_RATE = 0.15
"""Decode rows keep at least this share of their token rate, however long the target is."""
_MIN_OTHER_SHARE = 1 / 3
"""Other work gets at least this share of the time, however little the target leaves."""

_MAX_PUT_OFF = 3
"""Gaps in a row in which other work is put off for launches of other models."""


class Gaps:
    """Seconds of encoder passes and prefill chunks between the tokens of decode rows.

    A gap has room up to the target for the inter-token latency, or up to where the rows would fall below
    _MIN_DECODE_RATE, but always for _MIN_OTHER_SHARE, so that prompts make progress even when the rows leave no time.
    Work that cannot be cut to the room may run once nothing is owed. The excess over the room is then owed, and the
    following gaps pay it back.

    Launches of other models on the GPU fall into a gap, too, and leave less room in it. What is put off for them is due
    in the next gap. If they cannot wait and take that one as well, and the next, it runs nevertheless.
    """

    def __init__(self, target: float | None) -> None:
        """target: seconds; None: no limit."""
        self._target = target
        self._spent = 0.0
        self._owed = 0.0
        self._taken = 0.0
        self._put_off = 0
        """Number of last gaps in which other models launched and work was put off."""

    @property
    def paced(self) -> bool:
        return self._target is not None

    @property
    def due(self) -> bool:
        """Whether other models should leave the rest of this gap alone: work is due in it, or was launched."""
        return self._put_off > 0 or self._spent > 0

    @property
    def free(self) -> bool:
        """Nothing was spent in this gap, and nothing is owed; nothing was taken that counts."""
        return not self._spent and not self._owed and not self._counted

    def room(self, decode_seconds: float) -> float:
        """Seconds that are left in this gap beside a decode step of `decode_seconds` (0: not measured yet)."""
        return max(0.0, self._whole(decode_seconds) - self._spent - self._owed - self._counted)

    def spend(self, seconds: float) -> None:
        """Records that other work was launched."""
        if self.paced:
            self._spent += seconds

    def others_launched(self, seconds: float) -> None:
        """Records a launch of another model."""
        if self.paced:
            self._taken += seconds

    def close(self, decode_seconds: float, *, put_off: bool = False) -> None:
        """Ends the gap, since the next tokens of the rows were launched. decode_seconds: 0 without rows, in which case
        nothing is owed. put_off: work that might have run in this gap is waiting."""
        self._put_off = self._put_off + 1 if put_off and self._taken > 0 and decode_seconds > 0 else 0
        self._taken = 0.0
        if self._spent or self._owed:
            self._owed = max(0.0, self._owed + self._spent - self._whole(decode_seconds)) if decode_seconds else 0.0
            self._spent = 0.0

    @property
    def _counted(self) -> float:
        """Seconds that other models took of this gap, unless they took too many before."""
        return self._taken if self._put_off < _MAX_PUT_OFF else 0.0

    def _whole(self, decode_seconds: float) -> float:
        """Seconds that a gap has for other work, before any are spent."""
        if self._target is None:
            return math.inf
        limit = _AIM * self._target
        at_least = decode_seconds * _MIN_OTHER_SHARE / (1 - _MIN_OTHER_SHARE)
        room = min(limit, decode_seconds / _MIN_DECODE_RATE if decode_seconds else limit) - decode_seconds
        return max(at_least, room)


ITL_TARGET = 0.0125
"""Target in seconds between two tokens on a GPU if EngineConfig.itl_target is None."""
UNPACED_CHUNKS = 0.5
"""Seconds of a step's prefill chunks without a target (on a CPU): who comes meanwhile waits for the whole step."""
MIN_CHUNK_TOKENS = 128
"""Prefill tokens that a step may hold although nothing fits: if it must be launched in spite of its allowance, or if
nothing is owed from earlier gaps."""


class Pacing:
    """The costs of a model's launches, and the gaps between the tokens of its decode rows. Without a target for the
    gaps, the arbiter's allowance and UNPACED_CHUNKS limit work."""

    def __init__(self, itl_target: float | None, max_step_tokens: int) -> None:
        """itl_target: seconds; None: no target."""
        self.costs = ChatCosts()
        self.gaps = Gaps(itl_target)
        self._max_step_tokens = max_step_tokens

    def start(self, runners: Mapping[str, GraphRunner], prefill: GraphRunner, pair: float) -> None:
        """Starts from the seconds that were measured at the captures. runners: by kind of launch, but for prefills.
        pair: seconds of a pair of a query and a cached key."""
        for kind, runner in runners.items():
            for size, seconds in runner.measured_seconds:
                self.costs.observe(kind, size, seconds.replay)
        tokens = [tokens for tokens, _ in prefill.measured_seconds]
        if len(set(tokens)) > 1:
            replays = [seconds.replay for _, seconds in prefill.measured_seconds]
            token, launch = np.polyfit(tokens, replays, 1).tolist()
            if token > 0:
                self.costs.prefill.start(max(0.0, launch), token, pair, dict(zip(tokens, replays, strict=True)))

    def decode_seconds(self, rows: int, *, verifies: bool = False) -> float:
        """Predicted seconds of a decode step; 0 without rows, and until one was measured. verifies: it has drafts."""
        seconds = self.costs.mean("decode", rows) if rows else 0.0
        return max(seconds, self.costs.mean("verify", rows)) if verifies else seconds

    def chunk_budget(self, rows: int, allowance: float, sizes: Sequence[int], *, must: bool) -> ChunkBudget:
        """The chunk budget of a step with `rows` decode rows. allowance: seconds for the whole step. must: the step may
        hold MIN_CHUNK_TOKENS even if that takes longer. sizes: tokens of the captured prefills."""
        decode_seconds = self.decode_seconds(rows)
        seconds = allowance - decode_seconds
        room = self.gaps.room(decode_seconds) if rows else math.inf
        if not self.gaps.paced:
            room = UNPACED_CHUNKS
        min_tokens = MIN_CHUNK_TOKENS if must or not rows or self.gaps.free else 0
        if must:
            seconds, room = math.inf, min(seconds, room)
        sizes = tuple(sizes) if self.gaps.paced else ()
        return ChunkBudget(self._max_step_tokens, seconds, room, min_tokens, self.costs.prefill, sizes)

    def encoder_room(self, rows: int, *, shared: bool) -> float:
        """Seconds that an encoder pass should not exceed. shared: prefill chunks need a part of the gap, too."""
        if not rows:
            return math.inf
        return self.gaps.room(self.decode_seconds(rows)) / (2 if shared else 1)

    def spend(self, rows: int, seconds: float) -> None:
        """Records work that was launched while `rows` rows decode; with no rows it delays no token."""
        if rows:
            self.gaps.spend(seconds)

    def others_launched(self, rows: int, seconds: float) -> None:
        """Records a launch of another model while `rows` rows decode."""
        if rows:
            self.gaps.others_launched(seconds)

    def smallest_step(self, rows: int, *, prefills: bool) -> float:
        """Predicted seconds of the smallest step."""
        return self.decode_seconds(rows) + (self.costs.prefill.seconds(MIN_CHUNK_TOKENS, 0) if prefills else 0.0)
