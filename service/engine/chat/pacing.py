"""How much prefill and encoder work a launch may hold while other rows decode, based on the measured costs of
launches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.engine.chat.chunk_budget import ChunkBudget
from service.engine.chat.costs import ChatCosts
from service.engine.chat.itl_budget import Gaps
from service.graphs.runner import GraphRunner

ITL_TARGET = 0.0125
"""Target in seconds between two tokens on a GPU if EngineConfig.itl_target is None."""
UNPACED_CHUNKS = 0.5
"""Seconds of a step's prefill chunks without a target (on a CPU): who comes meanwhile waits for the whole step."""
MIN_CHUNK_TOKENS = 128
"""Prefill tokens that a step may hold although nothing fits: if it must be launched in spite of its allowance, or if
nothing is owed from earlier gaps."""


@dataclass(frozen=True)
class ChunkWork:
    """The work of a step's prefill chunks."""

    tokens: int
    """Tokens, padding included."""
    pairs: int
    """Pairs of a query and a cached key."""
    decode_seconds: float
    """Predicted seconds of the decode rows in the same step."""


class Pacing:
    """The costs of a model's launches, and the gaps between the tokens of its decode rows. Without a target for the
    gaps, the arbiter's allowance and UNPACED_CHUNKS limit work."""

    def __init__(self, itl_target: float | None, max_step_tokens: int) -> None:
        """itl_target: seconds, see service.engine.chat.itl_budget."""
        self.costs = ChatCosts()
        self.gaps = Gaps(itl_target)
        self._max_step_tokens = max_step_tokens

    def start(self, decode: GraphRunner, prefill: GraphRunner, encoder: GraphRunner, pair: float) -> None:
        """Starts from the seconds that were measured at the captures. pair: seconds of a pair of a query and a cached
        key."""
        for kind, runner in (("decode", decode), ("encoder", encoder)):
            for size, seconds in runner.measured_seconds:
                self.costs.observe(kind, size, seconds.replay)
        tokens = [tokens for tokens, _ in prefill.measured_seconds]
        if len(set(tokens)) > 1:
            replays = [seconds.replay for _, seconds in prefill.measured_seconds]
            token, launch = np.polyfit(tokens, replays, 1).tolist()
            if token > 0:
                self.costs.prefill.start(max(0.0, launch), token, pair, dict(zip(tokens, replays, strict=True)))

    def decode_seconds(self, rows: int) -> float:
        """Predicted seconds of a decode step; 0 without rows, and until one was measured."""
        return self.costs.mean("decode", rows) if rows else 0.0

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

    def observe(self, kind: str, size: int, chunks: ChunkWork | None, seconds: float) -> None:
        """Records how long a launch took. size: decode rows, or patches of an encoder pass."""
        if chunks is None:
            self.costs.observe(kind, size, seconds)
        else:
            self.costs.prefill.observe(chunks.tokens, chunks.pairs, max(0.0, seconds - chunks.decode_seconds))
