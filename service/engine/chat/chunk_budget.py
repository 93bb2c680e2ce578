"""How many prefill tokens a step may hold: by its token budget, by seconds, and by the sizes that are captured."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from service.engine.chat.costs import PrefillCost

_FEW = 32
"""Tokens that are not worth a step of their own: they wait for a gap with more room."""
_GAIN = 0.05
"""A prompt that goes on is cut at a captured size where that computes more tokens a second by this share."""


@dataclass
class ChunkBudget:
    """Of one step; the scheduler asks for each chunk what it may hold and spends it.

    tokens: at most so many; seconds: chunks must not be predicted to take longer; room: nor longer than this, but where
    it affords less than _FEW tokens (and not all of `tokens`), `least` are taken. sizes: tokens of the captured
    prefills, ascending; empty where chunks need not fit them.
    """

    tokens: int
    seconds: float = math.inf
    room: float = math.inf
    least: int = 0
    cost: PrefillCost = field(default_factory=PrefillCost)
    sizes: tuple[int, ...] = ()

    used: int = 0
    """Tokens of the chunks so far."""
    pairs: int = 0
    """Pairs of a query and a cached key in them."""

    @property
    def predicted(self) -> float:
        """Seconds of the chunks so far."""
        return self.cost.seconds(self.padded(self.used), self.pairs) if self.used else 0.0

    @property
    def crowded(self) -> bool:
        """The gap has no room for a chunk."""
        return not self.least and self._within(self.room, 0) < self._few

    @property
    def _few(self) -> int:
        return min(_FEW, self.tokens)

    def padded(self, tokens: int) -> int:
        """What a replay of so many tokens computes; themselves where no captured size holds them."""
        index = bisect_left(self.sizes, tokens)
        return self.sizes[index] if index < len(self.sizes) else tokens

    def affords(self, context: int) -> int:
        """Tokens that the next chunk may hold, behind `context` cached keys."""
        paced = self._within(self.room, context)
        if self.used + paced < self._few:
            paced = self.least - self.used
        return max(0, min(self.tokens - self.used, self._within(self.seconds, context), paced))

    def spend(self, tokens: int, context: int) -> None:
        """A negative number gives tokens back."""
        self.used += tokens
        self.pairs += tokens * context

    def excess(self, *, finished: bool) -> int:
        """Tokens to give back, so that a smaller captured prefill is replayed that pads less or holds the seconds.

        finished: the chunks end their prompts, so that what is given back takes a step of its own.
        """
        below = bisect_right(self.sizes, self.used) - 1
        if below < 0 or self.sizes[below] == self.used or self.padded(self.used) == self.used:
            return 0
        size = self.sizes[below]
        if size >= self.least and self.predicted > min(self.seconds, self.room):
            return self.used - size
        whole, cut = (self.cost.seconds(self.padded(tokens), 0) for tokens in (self.used, size))
        if finished:
            pays = cut + self.cost.seconds(self.padded(self.used - size), 0) < whole
        else:
            pays = cut * self.used < (1 - _GAIN) * whole * size
        return self.used - size if pays else 0

    def _within(self, seconds: float, context: int) -> int:
        """Further tokens behind `context` keys that stay within seconds for the whole step."""
        launch, token, pair = self.cost.coefficients
        each = token + pair * context
        if math.isinf(seconds) or not each:
            return self.tokens if seconds > 0 else -self.used
        paced = int(min(float(self.tokens), (seconds - launch - token * self.used - pair * self.pairs) / each))
        return self._as_measured(paced, seconds, context)

    def _as_measured(self, paced: int, seconds: float, context: int) -> int:
        """`paced` further tokens by the coefficients; more where a captured size of more was launched lately and did
        not take longer. A smaller size is thought to take no longer than a larger one."""
        for size in reversed(self.sizes):
            more = size - self.used
            if more <= paced:
                return paced
            measured = size <= self.tokens and self.cost.measured_lately(size)
            if measured and self.cost.seconds(size, self.pairs + more * context) <= seconds:
                return more
        return paced
