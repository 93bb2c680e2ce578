"""One capturable computation and its two routes.

`run` replays the cheapest recording that holds the plan, or runs forward on buffers of the exact size and counts why.
`capture_next` makes recordings: the ladder's hot rungs before readiness, the rest and what demand shows while idle;
`capture_missed` makes the one that a busy engine does without.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.protocol import Capacity, Capturable, Plan
from service.graphs.accounting import EagerReason, Observations, Route
from service.graphs.buckets import CapacityKey, cheapest, cost_of, fits, key_of, leading, shortfall
from service.graphs.buffers import Layout, StaticBuffers, exact_buffers
from service.graphs.demand import Demand
from service.graphs.pool import CaptureError, GraphPool, Recording

log = logging.getLogger(__name__)

_MOST_CHOICES = 4096
"""Remembered needs; images come in endless sizes."""


@dataclass(frozen=True)
class Bucket:
    capacity: Capacity
    layout: Layout
    static: StaticBuffers
    recording: Recording


@dataclass(frozen=True)
class Run:
    """outputs: by name; a replay's have the bucket's rows and are valid until the next run of the same runner."""

    outputs: Mapping[str, Tensor]
    route: Route


class GraphRunner:
    """kind names the computation in metrics (encoder, decode, ...), model whose it is. hot: the part of the ladder to
    record before readiness, all of it by default; with its largest rung first, one block of buffers serves all. stream:
    the one that `run` is called on, if it is not the engine's."""

    def __init__(
        self,
        model: str,
        kind: str,
        capturable: Capturable,
        ladder: Sequence[Capacity],
        pool: GraphPool,
        observations: Observations,
        *,
        enabled: bool = True,
        hot: Sequence[Capacity] | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.capturable = capturable
        self.ladder = sorted(ladder, key=cost_of)
        self._labels = {"model": model, "kind": kind}
        self._pool = pool
        self._observations = observations
        self._enabled = enabled
        self._stream = stream
        self._hot = {key_of(capacity) for capacity in (self.ladder if hot is None else hot)}
        self._buckets: dict[CapacityKey, Bucket] = {}
        self._failed: dict[CapacityKey, Capacity] = {}
        self._refused: dict[CapacityKey, Capacity] = {}
        self._choices: dict[CapacityKey, Bucket | None] = {}
        self._static: StaticBuffers | None = None
        self._demand = Demand(self.ladder)
        self._missed: Counter[CapacityKey] = Counter()
        self.misses = 0
        """Eager calls since the last capture that the most missed rung would have replayed."""

    @property
    def recorded(self) -> list[Capacity]:
        """Capacities that can be replayed."""
        return [bucket.capacity for bucket in self._buckets.values()]

    def run(self, plan: Plan, *, eager: EagerReason | None = None) -> Run:
        """Runs forward over the plan. `eager` names why this call is not to be replayed.

        The caller cuts the outputs to the plan's own rows.
        """
        if eager is None:
            self._demand.note(plan.needs)
            bucket = self.bucket_for(plan.needs)
            if bucket is not None:
                return self._replay(bucket, plan)
            eager = self._reason(plan.needs)
            if eager == "no_bucket" and (rung := cheapest(self._untried(), plan.needs)) is not None:
                key = key_of(rung)
                self._missed[key] += 1
                self.misses = max(self.misses, self._missed[key])
        self._observations.count_eager_step(eager, **self._labels)
        buffers = exact_buffers(self.capturable.buffer_specs(plan.needs), plan, self._pool.device)
        return Run(self.capturable.forward(buffers, plan.needs), "eager")

    def bucket_for(self, needs: Capacity) -> Bucket | None:
        """The recording that `run` would replay."""
        key = key_of(needs)
        if key not in self._choices:
            capacity = cheapest(self.recorded, needs) if self._enabled else None
            if len(self._choices) >= _MOST_CHOICES:
                self._choices.clear()
            self._choices[key] = None if capacity is None else self._buckets[key_of(capacity)]
        return self._choices[key]

    def _reason(self, needs: Capacity) -> EagerReason:
        if not self._enabled:
            return "disabled"
        return "capture_failed" if any(fits(capacity, needs) for capacity in self._failed.values()) else "no_bucket"

    def _replay(self, bucket: Bucket, plan: Plan) -> Run:
        # What a recording baked in (max_seqlen, row counts) must cover the real values, or rows stay unwritten.
        lack = shortfall(bucket.capacity, plan.needs)
        assert lack is None, f"{self.capturable.name}: {lack}"
        bucket.static.fill(bucket.layout, plan)
        bucket.recording.replay()
        name = leading(bucket.capacity)
        real, offered = plan.needs[name], bucket.capacity[name]
        self._observations.count("steps_total", **self._labels, route="replay", reason="captured")
        self._observations.count("replayed_rows_total", real, **self._labels)
        self._observations.count("padded_rows_total", offered - real, **self._labels)
        self._observations.observe("bucket_occupancy_ratio", real / offered, **self._labels)
        return Run(bucket.recording.outputs, "replay")

    def capture_next(self, *, idle: bool) -> bool:
        """Makes the next wanted recording; False when none is wanted. Nothing may be in flight.

        A capacity that failed or did not fit under the byte limit is remembered and not tried again.
        """
        if not self._enabled:
            return False
        rungs = (c for c in reversed(self._untried()) if idle or key_of(c) in self._hot)
        wanted = next(rungs, None)
        if wanted is None and idle:
            wanted = self._demand.propose(self.recorded, (*self._failed.values(), *self._refused.values()))
        if wanted is None:
            return False
        self._capture(wanted)
        return True

    def capture_missed(self) -> bool:
        """Makes the recording of the most missed rung; False when none was missed. Nothing may be in flight."""
        for key, _ in self._missed.most_common(1):
            self._capture(dict(key))
            return True
        return False

    def _untried(self) -> list[Capacity]:
        tried = self._buckets.keys() | self._failed.keys() | self._refused.keys()
        return [capacity for capacity in self.ladder if key_of(capacity) not in tried]

    def warm_up(self, capacities: Iterable[Capacity]) -> None:
        """Runs forward once at those capacities that have no recording: later calls and captures find its kernels
        compiled. Nothing is counted."""
        for capacity in capacities:
            if key_of(capacity) not in self._buckets:
                specs = self.capturable.buffer_specs(capacity)
                buffers = exact_buffers(specs, Plan(arrays={}, needs=capacity), self._pool.device)
                self.capturable.forward(buffers, capacity)

    def _capture(self, capacity: Capacity) -> None:
        started = time.monotonic()
        outcome = "captured"
        try:
            with torch.cuda.stream(self._stream):
                self._buckets[key_of(capacity)] = self._record(capacity)
        except CaptureError as error:
            outcome = "refused" if error.refused else "failed"
            (self._refused if error.refused else self._failed)[key_of(capacity)] = capacity
            log.warning("capture %s, calls of this size run eagerly: %s", outcome, error)
        self._choices.clear()
        self._missed.clear()
        self.misses = 0
        self._observations.count("graph_captures_total", **self._labels, outcome=outcome)
        self._observations.observe("graph_capture_duration_seconds", time.monotonic() - started, **self._labels)

    def _record(self, capacity: Capacity) -> Bucket:
        layout = Layout.of(self.capturable.buffer_specs(capacity))
        if self._static is None or layout.num_bytes > self._static.num_bytes:
            # Earlier recordings keep the block that they were recorded over.
            self._static = self._pool.allocate(layout.num_bytes)
        buffers = self._static.fill(layout, Plan(arrays={}, needs=capacity))
        return Bucket(capacity, layout, self._static, self._pool.record(self.capturable, capacity, buffers))
