"""How much prefill and encoder work a launch may hold while other rows decode, based on the measured costs of
launches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.engine.chat.chunk_budget import ChunkBudget
from service.engine.chat.costs import ChatCosts
from service.engine.chat.gaps import Gaps
from service.graphs.runner import GraphRunner

ITL_TARGET = 0.0125
"""Target in seconds between two tokens on a GPU if EngineConfig.itl_target is None."""
MIN_CHUNK_TOKENS = 128
"""Prefill tokens of a step that must be launched although nothing fits the allowance, or although nothing fits the room
of a gap with nothing owed."""


@dataclass(frozen=True)
class ChunkWork:
    """The work of a step's prefill chunks. tokens: including padding. pairs: of a query and a cached key. beside:
    predicted seconds of the decode rows in the same step."""

    tokens: int
    pairs: int
    beside: float


class Pacing:
    """The costs of a model's launches and the gaps between the tokens of its rows. Without a target, only the allowance
    of a turn limits work."""

    def __init__(self, itl_target: float | None, max_step_tokens: int) -> None:
        """itl_target: seconds, see service.engine.chat.gaps."""
        self.costs = ChatCosts()
        self.gaps = Gaps(itl_target)
        self._max_step_tokens = max_step_tokens

    def start(self, decode: GraphRunner, prefill: GraphRunner, encoder: GraphRunner, pair: float) -> None:
        """Starts from what the captures measured. pair: seconds of a pair of a query and a cached key."""
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
        """0 for no rows, and while nothing was measured."""
        return self.costs.mean("decode", rows) if rows else 0.0

    def chunk_budget(self, rows: int, allowance: float, sizes: Sequence[int], *, must: bool) -> ChunkBudget:
        """The chunk budget of a step with `rows` decode rows. allowance: seconds for the whole step. must: the step may
        hold MIN_CHUNK_TOKENS even if that takes longer. sizes: tokens of the captured prefills."""
        decode_seconds = self.decode_seconds(rows)
        seconds = allowance - decode_seconds
        room = self.gaps.room(decode_seconds) if rows else math.inf
        min_tokens = MIN_CHUNK_TOKENS if must or not rows or self.gaps.free else 0
        if must:
            seconds, room = math.inf, min(seconds, room)
        sizes = tuple(sizes) if self.gaps.paced else ()
        return ChunkBudget(self._max_step_tokens, seconds, room, min_tokens, self.costs.prefill, sizes)

    def encoder_room(self, rows: int, *, shared: bool) -> float:
        """Seconds that an encoder pass should not exceed. shared: prefill chunks need a part of the room."""
        if not rows:
            return math.inf
        return self.gaps.room(self.decode_seconds(rows)) / (2 if shared else 1)

    def spend(self, rows: int, seconds: float) -> None:
        """Records work that was launched while `rows` rows decode; with no rows it delays no token."""
        if rows:
            self.gaps.spend(seconds)

    def observe(self, kind: str, size: int, chunks: ChunkWork | None, seconds: float) -> None:
        """Records how long a launch took. size: decode rows, or patches of an encoder pass."""
        if chunks is None:
            self.costs.observe(kind, size, seconds)
        else:
            self.costs.prefill.observe(chunks.tokens, chunks.pairs, max(0.0, seconds - chunks.beside))
