"""How many prefill tokens a step may hold: limited by its token budget, by seconds, and by the captured sizes."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from service.engine.chat.costs import PrefillCost

_FEW = 32
"""Fewer tokens than this are not worth a step of their own: they wait for a gap with more room."""
_GAIN = 0.05
"""Relative gain in tokens per second for which a prompt that does not end in this step is cut to a captured size."""
_CHUNK_SHARE = 4
"""Prefill chunks may always use a quarter of a step's token budget, however many decode rows there are, so that prompts
make progress."""


def chunk_tokens(max_step_tokens: int, rows: int) -> int:
    """Maximum number of prefill tokens in a step with `rows` decode rows."""
    return max(max_step_tokens - rows, max_step_tokens // _CHUNK_SHARE)


@dataclass
class ChunkBudget:
    """The budget of one step. The scheduler asks how many tokens each chunk may hold, and spends them.

    tokens: limit on the tokens of all chunks.
    seconds: limit on the predicted time of all chunks.
    room: another limit in seconds, what the gap between two tokens has left. Where it allows fewer than _FEW tokens,
        and not all of `tokens`, `min_tokens` are allowed instead.
    sizes: tokens of the captured prefills, ascending; empty if chunks need not fit them.
    """

    tokens: int
    seconds: float = math.inf
    room: float = math.inf
    min_tokens: int = 0
    cost: PrefillCost = field(default_factory=PrefillCost)
    sizes: tuple[int, ...] = ()

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
        return min(_FEW, self.tokens)

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
