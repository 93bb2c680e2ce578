"""How much prefill and encoder work a launch may hold while other rows decode, based on the measured costs of
launches."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from service.graphs.buckets import round_up
from service.graphs.runner import GraphRunner

_WEIGHT_ABOVE, _WEIGHT_BELOW = 0.5, 0.2
"""Weight of a measurement above the mean and of one below it. Too high an estimate only delays a launch; too low a one
can make a live listener's audio run out."""
_MAX_OVER_MEAN = 3.0
"""A measurement counts as at most this many times the mean: a launch may be held up, as on a suspended machine."""
_MAX_JUMP = 1.3
"""The same of prefill chunks."""
_USUAL_PAIR = 1e-4
"""Cost of a pair of a query and a cached key, relative to a token, before anything is measured."""


class SizeMeans:
    """Running means of seconds by size, interpolated between them; four sizes per power of two are counted together.

    No size takes longer than a larger one: where a launch does not fill the GPU, a larger one costs nothing.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._seconds: list[float] = []
        """Of `_sizes`. Both ascend."""

    def observe(self, size: int, seconds: float) -> None:
        size = round_up(size)
        index = bisect_left(self._sizes, size)
        if self._sizes[index : index + 1] != [size]:
            self._sizes.insert(index, size)
            self._seconds.insert(index, min([seconds, *self._seconds[index : index + 1]]))
        before = self._seconds[index] or seconds
        seconds = min(seconds, _MAX_OVER_MEAN * before)
        mean = before + (_WEIGHT_ABOVE if seconds > before else _WEIGHT_BELOW) * (seconds - before)
        smaller, larger = self._seconds[:index], self._seconds[index + 1 :]
        self._seconds = [*(min(one, mean) for one in smaller), mean, *(max(one, mean) for one in larger)]

    def mean(self, size: int) -> float:
        """Expected seconds; 0 before the first measurement. In proportion for a size above all measured ones; one below
        costs as much as the smallest."""
        index = bisect_left(self._sizes, size)
        if index == len(self._sizes):
            return self.per_unit * size
        if not index:
            return self._seconds[0]
        (low, high), (cost, more) = self._sizes[index - 1 : index + 1], self._seconds[index - 1 : index + 1]
        return cost + (more - cost) * (size - low) / (high - low)

    @property
    def per_unit(self) -> float:
        """Seconds of the largest measured size, divided by it; 0 before the first measurement."""
        return self._seconds[-1] / self._sizes[-1] if self._sizes else 0.0


class PrefillCost:
    """Seconds of a step's prefill chunks: those of as many tokens without cached context, and of each pair of a query
    and a cached key. A GPU starts with those of its captured prefills."""

    def __init__(self) -> None:
        self._uncached = SizeMeans()
        self._pair = 0.0

    def start(self, seconds: Mapping[int, float], pair: float) -> None:
        """seconds: by tokens, without cached keys. pair: 0 if it was lost in noise."""
        for tokens, taken in seconds.items():
            self._uncached.observe(tokens, taken)
        self._pair = pair or _USUAL_PAIR * self.seconds_per_token

    @property
    def seconds_per_token(self) -> float:
        """Seconds of a token of a large chunk; 0 before anything was measured."""
        return self._uncached.per_unit

    def seconds(self, tokens: int, pairs: int) -> float:
        """tokens: those that are computed, including the padding of a captured graph."""
        return self._uncached.mean(tokens) + self._pair * pairs

    def observe(self, tokens: int, pairs: int, seconds: float) -> None:
        """Records how long a step's chunks took. Tokens and pairs share an error in proportion to the squares of their
        costs (least mean squares)."""
        if seconds <= 0:
            return  # The clock has not moved.
        if not self.seconds_per_token:
            self.start({tokens: seconds * tokens / (tokens + _USUAL_PAIR * pairs)}, 0.0)
            return
        uncached, context = self._uncached.mean(tokens), self._pair * pairs
        expected = uncached + context
        error = min(seconds, expected * _MAX_JUMP) - expected
        share = uncached**2 / (uncached**2 + context**2)
        self._uncached.observe(tokens, uncached + share * error)
        if pairs:
            self._pair += (_WEIGHT_ABOVE if error > 0 else _WEIGHT_BELOW) * (1 - share) * error / pairs


class ChatCosts:
    """What launches of each kind (encoder, decode, verify) and size take, and prefill chunks."""

    def __init__(self) -> None:
        self.prefill = PrefillCost()
        self._means: dict[str, SizeMeans] = defaultdict(SizeMeans)

    def observe(self, kind: str, size: int, seconds: float) -> None:
        self._means[kind].observe(size, seconds)

    def mean(self, kind: str, size: int) -> float:
        """Expected seconds; 0 for a kind that has never run."""
        return self._means[kind].mean(size)


_FEW = 32
"""Fewer tokens than this are not worth a step of their own: they wait for a gap with more room."""


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
        if paced < self._few:
            paced = self.min_tokens
        return max(0, min(self.tokens, self._within(self.seconds, context), paced) - self.used)

    def spend(self, tokens: int, context: int) -> None:
        """Spends tokens."""
        self.used += tokens
        self.pairs += tokens * context

    def _within(self, seconds: float, context: int) -> int:
        """Tokens of all chunks that take at most `seconds`, the next ones after `context` keys. A larger captured size
        is filled where it takes no longer."""
        if seconds == math.inf:
            return self.tokens

        def predicted(tokens: int) -> float:
            return self.cost.seconds(self.padded(tokens), self.pairs + (tokens - self.used) * context)

        return bisect_right(range(1, self.tokens + 1), seconds, key=predicted)


_AIM = 0.9
"""Share of the target that predictions may fill; the rest allows for their errors."""
_MIN_DECODE_RATE = 0.15
"""Decode rows keep at least this share of their token rate, however long the target is."""
_MIN_OTHER_SHARE = 1 / 3
"""Other work gets at least this share of the time, however little the target leaves."""

_MAX_PUT_OFF = 3
"""Gaps in a row in which other work is put off for launches of other models."""


ITL_TARGET = 0.0125
"""Target in seconds between two tokens on a GPU if EngineConfig.itl_target is None."""
UNPACED_CHUNKS = 0.5
"""Seconds of a step's prefill chunks without a target (on a CPU): who comes meanwhile waits for the whole step."""
MIN_CHUNK_TOKENS = 128
"""Prefill tokens that a step may hold although nothing fits: if it must be launched in spite of its allowance, or if
nothing is owed from earlier gaps."""


class Pacing:
    """The costs of a model's launches, and the seconds of encoder passes and prefill chunks in the gaps between the
    tokens of its decode rows. Without a target for the gaps, the arbiter's allowance and UNPACED_CHUNKS limit work.

    A gap has room up to the target for the inter-token latency, or up to where the rows would fall below
    _MIN_DECODE_RATE, but always for _MIN_OTHER_SHARE, so that prompts make progress even when the rows leave no time.
    Work that cannot be cut to the room may run once nothing is owed. The excess over the room is then owed, and the
    following gaps pay it back.

    Launches of other models on the GPU fall into a gap, too, and leave less room in it. What is put off for them is due
    in the next gap. If they cannot wait and take that one as well, and the next, it runs nevertheless.
    """

    def __init__(self, itl_target: float | None, max_step_tokens: int) -> None:
        """itl_target: seconds; None: no target."""
        self.costs = ChatCosts()
        self._target = itl_target
        self._max_step_tokens = max_step_tokens
        self._spent = 0.0
        self._owed = 0.0
        self._taken = 0.0
        self._put_off = 0
        """Number of last gaps in which other models launched and work was put off."""

    def start(self, runners: Mapping[str, GraphRunner], prefill: GraphRunner, pair: float) -> None:
        """Starts from the seconds that were measured at the captures. runners: by kind of launch, but for prefills.
        pair: seconds of a pair of a query and a cached key."""
        for kind, runner in runners.items():
            for size, seconds in runner.measured_seconds:
                self.costs.observe(kind, size, seconds)
        self.costs.prefill.start(dict(prefill.measured_seconds), pair)

    def decode_seconds(self, rows: int, *, verifies: bool = False) -> float:
        """Predicted seconds of a decode step; 0 without rows, and until one was measured. verifies: it has drafts."""
        seconds = self.costs.mean("decode", rows) if rows else 0.0
        return max(seconds, self.costs.mean("verify", rows)) if verifies else seconds

    def smallest_step(self, rows: int, *, prefills: bool) -> float:
        """Predicted seconds of a decode step and, if there are prompts, of the smallest chunk before it."""
        return self.decode_seconds(rows) + (self.costs.prefill.seconds(MIN_CHUNK_TOKENS, 0) if prefills else 0.0)

    def chunk_budget(self, rows: int, allowance: float, sizes: Sequence[int], *, must: bool) -> ChunkBudget:
        """The budget of a step of chunks between steps of `rows` decode rows. allowance: seconds for it and one of
        these. must: it may hold MIN_CHUNK_TOKENS even if that takes longer. sizes: tokens of the captured prefills."""
        decode_seconds, paced = self.decode_seconds(rows), self._target is not None
        seconds = allowance - decode_seconds
        room = UNPACED_CHUNKS if not paced else self.room(decode_seconds) if rows else math.inf
        min_tokens = MIN_CHUNK_TOKENS if must or not rows or self.free else 0
        if must:
            seconds, room = math.inf, min(seconds, room)
        sizes = tuple(sizes) if paced else ()
        return ChunkBudget(self._max_step_tokens, seconds, room, min_tokens, self.costs.prefill, sizes)

    def encoder_room(self, rows: int, *, shared: bool) -> float:
        """Seconds that an encoder pass should not exceed. shared: prefill chunks need a part of the gap, too."""
        if not rows:
            return math.inf
        return self.room(self.decode_seconds(rows)) / (2 if shared else 1)

    # The gap

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

    def spend(self, rows: int, seconds: float) -> None:
        """Records work that was launched while `rows` rows decode; with no rows it delays no token."""
        if rows and self._target is not None:
            self._spent += seconds

    def others_launched(self, rows: int, seconds: float) -> None:
        """Records a launch of another model while `rows` rows decode."""
        if rows and self._target is not None:
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
