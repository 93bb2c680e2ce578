"""Which route a batch with prefill chunks takes: a captured prefill, with captured decode beside it, or one eager pass.

A small batch is faster as a replay, since the launches of an eager pass take longer than its computation. A large one
may be faster eagerly, without padding and without reading the weights a second time for the decode rows. So the choice
is made by measured seconds, on both routes: of each bucket at its capture, and of a pair of a query and a cached key at
the start. Without a GPU nothing is measured, and captured buckets are always replayed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from models.interfaces.capturable import Bucket
from service.engine.chat.inputs import count_pairs, required_prefill
from service.engine.chat.scheduler_output import Chunk
from service.graphs.observations import EagerReason
from service.graphs.pool import Capture, RouteSeconds
from service.graphs.runner import CapturedGraph, GraphRunner

log = logging.getLogger(__name__)

PREFILL_TOKENS = {"cuda": (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024), "cpu": (64,)}
"""Tokens of the captured prefills without cached context. A padded token costs as much as a real one (20 us for 7B
parameters), so the sizes are close together. Every second bucket is captured before readiness."""
PREFILL_SEQUENCES = 8
CACHED_PREFILL_TOKENS = {
    "cuda": (32, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 1792, 2048),
    "cpu": (16, 64),
}
"""Tokens of the captured prefills of any chunks. A later turn of a conversation has few tokens; a chunk of a long
prompt takes the whole budget of a step, or what decode rows leave of it."""


def token_buckets(sizes: tuple[int, ...], budget: int, *, whole: bool = False) -> list[int]:
    """The `sizes`, cut to the step's token budget. whole: extended up to the budget, each a quarter larger than the one
    before."""
    made = sorted({min(size, budget) for size in sizes})
    while whole and made[-1] < budget:
        made.append(min(budget, made[-1] * 5 // 4))
    return made


def chunk_buckets(sizes: list[int], sequences: int, feature_levels: int) -> tuple[list[Bucket], list[Bucket]]:
    """Buckets of a captured prefill, and those to capture before readiness. If media rows have features, each size has
    a bucket with them and one without; the former can hold text, too."""
    bucket_list: list[Bucket] = [{"tokens": tokens, "sequences": sequences} for tokens in sizes]
    with_features = bucket_list
    if feature_levels:
        with_features = [{**bucket, "levels": feature_levels} for bucket in bucket_list]
        bucket_list = [*({**bucket, "levels": 0} for bucket in bucket_list), *with_features]
    return bucket_list, with_features[::-1][::2]


@dataclass(frozen=True)
class PrefillChoice:
    """The route of a batch with prefill chunks."""

    prefill: GraphRunner | None
    """The captured prefill to replay; None: the batch runs eagerly."""
    reason: EagerReason | Literal["captured"]
    passed_over: tuple[GraphRunner, CapturedGraph] | None = None
    """The captured prefill that holds the batch, if eager execution was measured to be faster."""
    missed: Bucket | None = None
    """What no captured prefill holds; PrefillRoutes.launched counts it."""


class PrefillRoutes:
    """Chooses between the captured prefills and eager execution."""

    def __init__(self, fresh: GraphRunner, cached: GraphRunner, feature_levels: int) -> None:
        """fresh: captured prefills of chunks without cached context. cached: those of any chunks. feature_levels:
        Decoder.feature_levels."""
        self._fresh = fresh
        self._cached = cached
        self._feature_levels = feature_levels
        self.pair_seconds = RouteSeconds(0.0, 0.0)
        """Seconds of a pair of a query and a cached key on each route."""
        self._without_memory: set[Capture] = set()
        """Buckets that are always replayed, because eager execution ran out of memory."""

    def choose(self, chunks: tuple[Chunk, ...], rows: int, decode: CapturedGraph | None) -> PrefillChoice:
        """The route of a batch with these chunks. decode: the captured step of the `rows` decode rows beside them, if
        there is one."""
        if not self._cached.enabled:
            return PrefillChoice(None, "disabled")
        required = required_prefill(chunks, self._feature_levels)
        continued = any(chunk.start for chunk in chunks)
        runners = (self._cached,) if continued else (self._fresh, self._cached)
        found = [(runner, graph) for runner in runners if (graph := runner.graph_for(required)) is not None]
        if not found:
            return PrefillChoice(None, self._cached.eager_reason(required), missed=required)
        runner, graph = min(found, key=lambda one: _replay_seconds(one[1]))
        measured, eager = graph.capture.seconds, runner.eager_seconds(required["tokens"] + rows)
        if measured is None or eager is None or graph.capture in self._without_memory:
            return PrefillChoice(runner, "captured")
        pairs = count_pairs(chunks)
        whole = RouteSeconds(
            eager=eager + pairs * self.pair_seconds.eager,
            replay=measured.replay + pairs * self.pair_seconds.replay + (_replay_seconds(decode) if rows else 0.0),
        )
        if whole.faster() == "eager":
            return PrefillChoice(None, "measured", (runner, graph))
        return PrefillChoice(runner, "captured")

    def launched(self, choice: PrefillChoice) -> None:
        """Records that a batch was launched by this choice; one that runs out of memory may get another choice."""
        if choice.missed is not None:
            self._cached.record_miss(choice.missed)

    def replay_instead(self, choice: PrefillChoice) -> PrefillChoice:
        """Called when a batch that passed over a captured prefill ran out of memory. A replay works in memory that its
        graph holds already, so this batch and every later one of its size are replayed."""
        assert choice.passed_over is not None
        runner, graph = choice.passed_over
        log.warning("prefills at %s are replayed from now on: eager ones run out of memory", dict(graph.bucket))
        self._without_memory.add(graph.capture)
        return PrefillChoice(runner, "captured")


def _replay_seconds(graph: CapturedGraph | None) -> float:
    return 0.0 if graph is None or graph.capture.seconds is None else graph.capture.seconds.replay
