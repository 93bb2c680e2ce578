"""One capturable computation and its two routes.

`run` replays the cheapest captured graph that holds the plan; if there is none, it runs forward eagerly on buffers of
the exact size and counts the reason. `capture_next` captures the buckets needed before readiness and then, part by part
while the engine idles, the rest of the list. `capture_missed` is for a busy engine: part by part, too, it captures the
bucket whose absence made calls run eagerly or with more padding.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor

from models.interfaces.capturable import Bucket, Capturable, Plan
from service.graphs.buckets import BucketKey, cheapest, cost_of, fills, fits, key_of, primary_size
from service.graphs.buffers import Layout, StaticBuffers, exact_buffers
from service.graphs.observations import EagerReason, Observations, Route
from service.graphs.pool import TIMED_REPLAYS, Capture, CaptureError, GraphPool, Interrupted, seconds_of

log = logging.getLogger(__name__)

_MAX_CHOICES = 4096
"""Number of sizes whose choice is remembered; pictures come in any number of sizes."""
_PADDED_MISS = 1 / 16
"""Share of a miss that a replay counts as, if a smaller bucket of the list would hold the plan but is not captured
yet."""


@dataclass(frozen=True)
class CapturedGraph:
    """One bucket that can be replayed, with the buffers that its graph reads."""

    bucket: Bucket
    layout: Layout
    static: StaticBuffers
    capture: Capture


@dataclass(frozen=True)
class _Choice:
    """What to do with plans of one size."""

    graph: CapturedGraph | None
    """The graph to replay; None where no captured one holds the size."""
    missed: BucketKey | None
    """The cheapest bucket of the list that holds the size, if it would be better and has not been captured yet."""


@dataclass(eq=False)
class _Unfinished:
    """A capture of which parts are left."""

    bucket: Bucket
    parts: Generator[None, None, CapturedGraph]
    seconds: float = 0.0
    """What the parts took so far."""


@dataclass(frozen=True)
class Run:
    """One call of forward."""

    outputs: Mapping[str, Tensor]
    """By name. Those of a replay have the bucket's rows and are valid until the runner's next run."""
    route: Route


class GraphRunner:
    """The captured graphs of one capturable computation.

    kind: name of the computation in metrics (encoder, decode, ...).
    on_demand: buckets of the list that are captured only once a call has missed them.
    before_ready: the buckets to capture before readiness, by default all. The largest is captured first, so that one
        block of static buffers serves all.
    dense_buckets: buckets of the list whose attention is dense, so that padding costs as much as other rows. A plan has
        to nearly fill them, and they are captured last, so that they take no memory from the others.
    capture_stream: the CUDA stream to capture a bucket on, if it is not the engine's. Kernels of a graph have its
        priority, on whichever stream they are replayed.
    fill_others: writes fillers to inputs that forward reads outside its buffers. Captures and warm-ups run forward, and
        would otherwise run it over the inputs of the last call.
    """

    def __init__(
        self,
        model: str,
        kind: str,
        capturable: Capturable,
        bucket_list: Sequence[Bucket],
        pool: GraphPool,
        observations: Observations,
        *,
        enabled: bool = True,
        on_demand: Iterable[Bucket] = (),
        before_ready: Sequence[Bucket] | None = None,
        dense_buckets: Sequence[Bucket] = (),
        capture_stream: Callable[[Bucket], torch.cuda.Stream | None] = lambda bucket: None,
        fill_others: Callable[[], object] | None = None,
    ) -> None:
        self.capturable = capturable
        self.bucket_list = sorted(bucket_list, key=cost_of)
        self._labels = {"model": model, "kind": kind}
        self._pool = pool
        self._observations = observations
        self.enabled = enabled
        self.on_demand = {key_of(bucket) for bucket in on_demand}
        """Those that no call has missed."""
        self._capture_stream = capture_stream
        self._fill_others = fill_others or (lambda: None)
        self._before_ready = {key_of(bucket) for bucket in (self.bucket_list if before_ready is None else before_ready)}
        self._dense = {key_of(bucket) for bucket in dense_buckets}
        self._graphs: dict[BucketKey, CapturedGraph] = {}
        self._failed: dict[BucketKey, Bucket] = {}
        self._refused: dict[BucketKey, Bucket] = {}
        self._choices: dict[BucketKey, _Choice] = {}
        self._static: StaticBuffers | None = None
        self._unfinished: _Unfinished | None = None
        self._missed = defaultdict[BucketKey, float](float)
        self.misses = 0.0
        """Calls since the last capture that the most missed bucket would have served; one that was replayed with more
        padding counts as _PADDED_MISS."""

    @property
    def captured(self) -> list[Bucket]:
        """Buckets that can be replayed."""
        return [graph.bucket for graph in self._graphs.values()]

    def run(self, plan: Plan, *, eager: EagerReason | None = None) -> Run:
        """Runs forward over the plan. eager: the reason why this call must not be replayed.

        The caller must cut the outputs to the plan's own rows.
        """
        if eager is None:
            choice = self._choice(plan.required)
            if choice.graph is not None:
                self._count_miss(choice, _PADDED_MISS)
                return self._replay(choice.graph, plan)
        buffers = exact_buffers(self.capturable.buffer_specs(plan.required), plan, self._pool.device)
        # Counted only once it has returned: a call that runs out of memory may be made again.
        outputs = self.capturable.forward(buffers, plan.required)
        if eager is None:
            eager = self.record_miss(plan.required)
        self._observations.count_eager_step(eager, **self._labels)
        return Run(outputs, "eager")

    def record_miss(self, required: Bucket) -> EagerReason:
        """Records a call that no captured graph holds, and returns why. The caller may run it elsewhere."""
        if not self.enabled:
            return "disabled"
        failed = self._eligible(self._failed.values(), required)
        if any(fits(bucket, required) for bucket in failed):
            return "capture_failed"
        self._count_miss(self._choice(required), 1)
        return "no_bucket"

    def _count_miss(self, choice: _Choice, weight: float) -> None:
        if choice.missed is not None:
            self.on_demand.discard(choice.missed)
            self._missed[choice.missed] += weight
            self.misses = max(self.misses, self._missed[choice.missed])

    def graph_for(self, required: Bucket) -> CapturedGraph | None:
        """The captured graph that `run` would replay."""
        return self._choice(required).graph

    def _choice(self, required: Bucket) -> _Choice:
        key = key_of(required)
        if key not in self._choices:
            if len(self._choices) >= _MAX_CHOICES:
                self._choices.clear()
            captured = cheapest(self._eligible(self.captured, required), required) if self.enabled else None
            untried = self._eligible(self._untried(), required)
            wanted = cheapest([*untried, *([] if captured is None else [captured])], required)
            self._choices[key] = _Choice(
                None if captured is None else self._graphs[key_of(captured)],
                None if wanted is None or wanted is captured else key_of(wanted),
            )
        return self._choices[key]

    def _eligible(self, buckets: Iterable[Bucket], required: Bucket) -> list[Bucket]:
        """The buckets, without the dense ones that `required` would not nearly fill."""
        return [bucket for bucket in buckets if key_of(bucket) not in self._dense or fills(bucket, required)]

    def _replay(self, graph: CapturedGraph, plan: Plan) -> Run:
        # The constants of a captured graph (max_seqlen, numbers of rows) must cover the real sizes, or rows stay
        # unwritten.
        assert fits(graph.bucket, plan.required), f"{self._labels}: {graph.bucket} for {plan.required}"
        graph.static.fill(graph.layout, plan)
        graph.capture.replay()
        name = primary_size(graph.bucket)
        real, offered = plan.required[name], graph.bucket[name]
        self._observations.count("steps_total", **self._labels, route="replay", reason="captured")
        self._observations.count("replayed_rows_total", real, **self._labels)
        self._observations.count("padded_rows_total", offered - real, **self._labels)
        self._observations.observe("bucket_occupancy_ratio", real / offered, **self._labels)
        return Run(graph.capture.outputs, "replay")

    @property
    def measured_seconds(self) -> list[tuple[int, float]]:
        """Primary size and seconds of a replay of each captured bucket that was measured."""
        graphs = [(graph.bucket, graph.capture.seconds) for graph in self._graphs.values()]
        return [(bucket[primary_size(bucket)], seconds) for bucket, seconds in graphs if seconds is not None]

    def replay_seconds(self, plan: Plan) -> float | None:
        """Seconds of a replay of this plan on a GPU, with nothing else in flight; None if no captured graph holds it.
        Not counted in metrics."""
        graph = self.graph_for(plan.required)
        if graph is None:
            return None
        graph.static.fill(graph.layout, plan)
        return min(seconds_of(graph.capture.replay, self._pool.device) for _ in range(TIMED_REPLAYS))

    def capture_next(self, *, idle: bool) -> bool:
        """Capture the next wanted bucket, or while the engine idles a part of it; False when none is wanted.

        Nothing may be in flight; requests may be served between two parts. A part is given up once GraphPool.arrived,
        and the capture begins anew.

        A bucket whose capture failed or did not fit under the byte limit is not tried again.
        """
        if self._unfinished is None:
            wanted = self._next_wanted(idle=idle)
            if wanted is None:
                return False
            self._unfinished = _Unfinished(wanted, self._make_graph(wanted))
        self._capture_part()
        while self._unfinished is not None and not idle:
            self._capture_part()
        return True

    def _next_wanted(self, *, idle: bool) -> Bucket | None:
        if not self.enabled:
            return None
        untried = [bucket for bucket in self._untried()[::-1] if key_of(bucket) not in self.on_demand]
        untried.sort(key=lambda bucket: key_of(bucket) in self._dense)
        return next((bucket for bucket in untried if idle or key_of(bucket) in self._before_ready), None)

    def capture_missed(self) -> bool:
        """Capture a part of the most missed bucket, or of the one that is unfinished; False when none was missed.
        Nothing may be in flight; requests may be served between two parts."""
        if not self._missed:
            return False
        if self._unfinished is None:
            key, _ = max(self._missed.items(), key=itemgetter(1))
            self._unfinished = _Unfinished(dict(key), self._make_graph(dict(key)))
        self._capture_part()
        return True

    @property
    def num_untried(self) -> int:
        """Buckets of the list that are still to be captured, whatever calls come."""
        return sum(key_of(bucket) not in self.on_demand for bucket in self._untried()) if self.enabled else 0

    def _untried(self) -> list[Bucket]:
        tried = self._graphs.keys() | self._failed.keys() | self._refused.keys()
        return [bucket for bucket in self.bucket_list if key_of(bucket) not in tried]

    def warm_up(self, buckets: Iterable[Bucket]) -> Iterator[None]:
        """Runs forward once at each of these buckets that has no captured graph, so that its kernels are compiled
        before later calls and captures; yields after each."""
        for bucket in buckets:
            if key_of(bucket) not in self._graphs:
                self.filler_run(bucket)()
                if self._pool.device.type == "cuda":
                    # Inputs of a later call may be copied on a stream that does not wait for this one.
                    torch.cuda.current_stream().synchronize()
                yield

    def filler_run(self, bucket: Bucket) -> Callable[[], object]:
        """Runs forward at this size, over fillers that are made now. Not counted in metrics."""
        self._fill_others()
        specs = self.capturable.buffer_specs(bucket)
        buffers = exact_buffers(specs, Plan(arrays={}, required=bucket), self._pool.device)
        return partial(self.capturable.forward, buffers, bucket)

    def _capture_part(self) -> None:
        """Do the next part of the unfinished capture."""
        assert self._unfinished is not None
        unfinished, bucket, outcome = self._unfinished, self._unfinished.bucket, ""
        started = time.monotonic()
        try:
            with torch.cuda.stream(self._capture_stream(bucket)):
                next(unfinished.parts)
        except StopIteration as made:
            outcome = "captured"
            self._graphs[key_of(bucket)] = made.value
        except Interrupted:
            log.debug("a capture of %s at %s is given up for a request", self._labels["kind"], dict(bucket))
            self._unfinished = None
            return
        except CaptureError as error:
            outcome = "refused" if error.refused else "failed"
            (self._refused if error.refused else self._failed)[key_of(bucket)] = bucket
            level = logging.INFO if error.refused else logging.WARNING  # on a small GPU many do not fit
            what = "capture of %s at %s %s, calls of this size run eagerly: %s"
            log.log(level, what, self._labels["kind"], bucket, outcome, error)
        unfinished.seconds += time.monotonic() - started
        if not outcome:
            return
        self._unfinished = None
        self._choices.clear()
        self._missed.clear()
        self.misses = 0.0
        self._observations.count("graph_captures_total", **self._labels, outcome=outcome)
        self._observations.observe("graph_capture_duration_seconds", unfinished.seconds, **self._labels)

    def _make_graph(self, bucket: Bucket) -> Generator[None, None, CapturedGraph]:
        layout = Layout.of(self.capturable.buffer_specs(bucket))
        if self._static is None or layout.num_bytes > self._static.num_bytes:
            # Graphs that were captured earlier keep reading the old block.
            self._static = self._pool.allocate(layout.num_bytes)
        static = self._static

        def fill() -> Mapping[str, Tensor]:
            self._fill_others()
            return static.fill(layout, Plan(arrays={}, required=bucket))

        capture = yield from self._pool.capture(self.capturable, bucket, fill)
        return CapturedGraph(bucket, layout, static, capture)
