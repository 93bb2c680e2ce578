"""One capturable computation and its two routes.

`run` replays the cheapest captured graph that holds the plan; if there is none, it runs forward eagerly on buffers of
the exact size and counts the reason. `capture_next` captures the buckets needed before readiness and then, part by part
while the engine idles, the rest of the list and whatever demand proposes. `capture_missed` is for a busy engine: part
by part, too, it captures the bucket whose absence made calls run eagerly or with more padding.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor

from models.interfaces.capturable import Bucket, Capturable, Plan
from service.graphs.buckets import BucketKey, cheapest, cost_of, fills, fits, key_of, primary_size, round_up
from service.graphs.buffers import Layout, StaticBuffers, exact_buffers
from service.graphs.observations import EagerReason, Observations, Route
from service.graphs.pool import TIMED_REPLAYS, Capture, CaptureError, GraphPool, Interrupted, RouteSeconds, seconds_of

log = logging.getLogger(__name__)

_MIN_CALLS = 16.0
"""Calls before anything is proposed."""
_MIN_GAIN = 0.05
"""Share of the currently computed rows that a new captured graph must save."""
_HALVE_AT = 4096.0
"""Calls after which all counts are halved, so that old demand fades."""


class Demand:
    """Calls by their required sizes, rounded up; old calls count less."""

    def __init__(self, bucket_list: Sequence[Bucket]) -> None:
        self._bucket_list = bucket_list
        self._calls: dict[BucketKey, float] = {}
        self._total = 0.0

    def rounded(self, required: Bucket) -> BucketKey | None:
        """`required` with its primary size rounded up, and with the other sizes of the next larger bucket of the list,
        so that a captured graph also serves calls of similar sizes; None if it is larger than every bucket."""
        bucket = cheapest(self._bucket_list, required)
        if bucket is None:
            return None
        name = primary_size(bucket)
        return key_of(dict(bucket) | {name: min(bucket[name], round_up(required[name]))})

    def note(self, key: BucketKey | None) -> None:
        """Counts a call of these sizes (`rounded`). None is not counted: no captured graph could serve it."""
        if key is None:
            return
        self._calls[key] = self._calls.get(key, 0.0) + 1.0
        self._total += 1.0
        if self._total > _HALVE_AT:
            self._calls = {key: calls / 2 for key, calls in self._calls.items() if calls >= 1.0}
            self._total = sum(self._calls.values())

    def propose(self, captured: Iterable[Bucket], unavailable: Iterable[Bucket]) -> Bucket | None:
        """The bucket that would save the most padded rows; None when none would save a twentieth of all rows.

        A call that runs eagerly now counts double.
        """
        if self._total < _MIN_CALLS:
            return None
        captured = list(captured)
        barred = {key_of(bucket) for bucket in (*captured, *unavailable)}
        calls = [(dict(key), count) for key, count in self._calls.items()]
        now = [_size(cheapest(captured, required)) or 2 * _size(required) for required, _ in calls]
        best, best_gain = None, _MIN_GAIN * sum(size * count for size, (_, count) in zip(now, calls, strict=True))
        for candidate, _ in calls:
            if key_of(candidate) in barred:
                continue
            gain = sum(
                max(0, size - _size(candidate)) * count
                for size, (required, count) in zip(now, calls, strict=True)
                if fits(candidate, required)
            )
            if gain > best_gain:
                best, best_gain = candidate, gain
        return best


def _size(bucket: Bucket | None) -> int:
    return bucket[primary_size(bucket)] if bucket else 0


# Which route a captured bucket takes if its capture could not decide it: measured on calls in service.
#
# A capture is timed on fillers. If eager execution is not much slower there, the first calls of the bucket alternate
# between the routes, and the one with the shorter median is taken from then on. Now and then a call takes the other
# route, so that a change is noticed.

_NEAR = 1.5
"""A bucket is always replayed if its eager call takes longer than this many replays at the capture."""
_SAMPLES = 5
"""Number of latest durations that are kept of each route."""
_ENOUGH = 3
"""Number of durations of each route that a choice needs."""
_GAIN = 0.03
"""The other route must be faster by this share to replace the one in use."""
_EVERY = 128
"""Calls between two samples of the route that is not in use."""


class RouteTrial:
    """The trial of one captured bucket. `route` returns the route of the next call, `observe` records how long a call
    took."""

    def __init__(self, captured: RouteSeconds | None) -> None:
        """captured: seconds at the capture; None without a GPU, where nothing is measured."""
        self._open = captured is not None and captured.eager <= _NEAR * captured.replay
        self._seconds: dict[Route, deque[float]] = {"replay": deque(maxlen=_SAMPLES), "eager": deque(maxlen=_SAMPLES)}
        self._warm: set[Route] = set()
        self._current: Route = "replay"
        self._calls = 0

    def route(self) -> Route:
        if not self._open:
            return "replay"
        self._calls += 1
        other: Route = "eager" if self._current == "replay" else "replay"
        if min(map(len, self._seconds.values())) < _ENOUGH:
            return other if self._calls % 2 == 0 else self._current
        return other if self._calls % _EVERY == 0 else self._current

    def close(self) -> None:
        """Ends the trial because eager calls fail: every later call is replayed."""
        self._open = False

    def observe(self, route: Route, seconds: float) -> None:
        """Records the duration of a call. The first call of a route does not count, since it may allocate and choose
        kernels."""
        if route not in self._warm:
            self._warm.add(route)
            return
        self._seconds[route].append(seconds)
        if min(map(len, self._seconds.values())) >= _ENOUGH:
            medians = {name: statistics.median(taken) for name, taken in self._seconds.items()}
            self._current = RouteSeconds(**medians).faster(self._current, gain=_GAIN)


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
    rounded: BucketKey | None
    """The size as demand counts it."""


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
    bucket: Bucket | None = None
    """The captured bucket that holds the plan, if any, whichever route was taken."""


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
    measured: buckets whose eager call is not much slower than a replay at the capture are tried on both routes in
        service; from then on calls take the route that is faster by the durations given to `observe`.
    fill_others: writes fillers to inputs that forward reads outside its buffers. Captures and warm-ups run forward, and
        would otherwise run it over the inputs of the last call.

    `misses` and Demand are separate on purpose. A miss is a bucket of the list that has not been captured yet for lack
    of idle time, and that a busy engine needs now or would gain from. Demand proposes sizes between those of the list,
    once the list is captured.
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
        measured: bool = False,
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
        self._trials: dict[BucketKey, RouteTrial] | None = {} if measured else None
        self._before_ready = {key_of(bucket) for bucket in (self.bucket_list if before_ready is None else before_ready)}
        self._dense = {key_of(bucket) for bucket in dense_buckets}
        self._graphs: dict[BucketKey, CapturedGraph] = {}
        self._failed: dict[BucketKey, Bucket] = {}
        self._refused: dict[BucketKey, Bucket] = {}
        self._choices: dict[BucketKey, _Choice] = {}
        self._static: StaticBuffers | None = None
        self._unfinished: _Unfinished | None = None
        self._demand = Demand([bucket for bucket in self.bucket_list if key_of(bucket) not in self._dense])
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
            if (graph := choice.graph) is not None:
                self._demand.note(choice.rounded)
                self._count_miss(choice, _PADDED_MISS)
                tried = self._run_eagerly_on_trial(graph, plan)
                return self._replay(graph, plan) if tried is None else tried
        # Counted only once it has returned: a call that runs out of memory may be made again.
        outputs = self._forward(plan)
        if eager is None:
            eager = self.record_miss(plan.required)
        self._observations.count_eager_step(eager, **self._labels)
        return Run(outputs, "eager")

    def _forward(self, plan: Plan) -> Mapping[str, Tensor]:
        buffers = exact_buffers(self.capturable.buffer_specs(plan.required), plan, self._pool.device)
        return self.capturable.forward(buffers, plan.required)

    def _run_eagerly_on_trial(self, graph: CapturedGraph, plan: Plan) -> Run | None:
        """An eager call, if the trial of its bucket chooses that route; None if the plan is to be replayed. A call that
        runs out of memory is replayed, and so is every later one, since a replay works in memory that its graph already
        holds."""
        if self._trials is None or self._trial(graph).route() == "replay":
            return None
        try:
            outputs = self._forward(plan)
        except torch.OutOfMemoryError as error:
            log.warning("%s at %s is replayed from now on: %s", self.capturable.name, dict(graph.bucket), error)
            self._trial(graph).close()
            return None
        self._observations.count_eager_step("measured", **self._labels)
        return Run(outputs, "eager", graph.bucket)

    def _trial(self, graph: CapturedGraph) -> RouteTrial:
        assert self._trials is not None
        key = key_of(graph.bucket)
        if key not in self._trials:
            self._trials[key] = RouteTrial(graph.capture.seconds)
        return self._trials[key]

    def observe(self, bucket: Bucket, route: Route, seconds: float) -> None:
        """Records how long a call of this captured bucket took in service; for runners with `measured`."""
        if self._trials is not None:
            self._trial(self._graphs[key_of(bucket)]).observe(route, seconds)

    def record_miss(self, required: Bucket) -> EagerReason:
        """Records a call that no captured graph holds, and returns why. The caller may run it elsewhere."""
        choice = self._choice(required)
        self._demand.note(choice.rounded)
        reason = self.eager_reason(required)
        if reason == "no_bucket":
            self._count_miss(choice, 1)
        return reason

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
                self._demand.rounded(required),
            )
        return self._choices[key]

    def _eligible(self, buckets: Iterable[Bucket], required: Bucket) -> list[Bucket]:
        """The buckets, without the dense ones that `required` would not nearly fill."""
        return [bucket for bucket in buckets if key_of(bucket) not in self._dense or fills(bucket, required)]

    def eager_reason(self, required: Bucket) -> EagerReason:
        """Why `run` would replay no captured graph, if none holds the call."""
        if not self.enabled:
            return "disabled"
        failed = self._eligible(self._failed.values(), required)
        return "capture_failed" if any(fits(bucket, required) for bucket in failed) else "no_bucket"

    def _replay(self, graph: CapturedGraph, plan: Plan) -> Run:
        # The constants of a captured graph (max_seqlen, numbers of rows) must cover the real sizes, or rows stay
        # unwritten.
        assert fits(graph.bucket, plan.required), f"{self.capturable.name}: {graph.bucket} for {plan.required}"
        graph.static.fill(graph.layout, plan)
        graph.capture.replay()
        name = primary_size(graph.bucket)
        real, offered = plan.required[name], graph.bucket[name]
        self._observations.count("steps_total", **self._labels, route="replay", reason="captured")
        self._observations.count("replayed_rows_total", real, **self._labels)
        self._observations.count("padded_rows_total", offered - real, **self._labels)
        self._observations.observe("bucket_occupancy_ratio", real / offered, **self._labels)
        return Run(graph.capture.outputs, "replay", graph.bucket)

    @property
    def measured_seconds(self) -> list[tuple[int, RouteSeconds]]:
        """Primary size and seconds of each captured bucket that was measured."""
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
        wanted = next((bucket for bucket in untried if idle or key_of(bucket) in self._before_ready), None)
        if wanted is None and idle:
            wanted = self._demand.propose(self.captured, (*self._failed.values(), *self._refused.values()))
        return wanted

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
            log.debug("a capture of %s at %s is given up for a request", self.capturable.name, dict(bucket))
            self._unfinished = None
            return
        except CaptureError as error:
            outcome = "refused" if error.refused else "failed"
            (self._refused if error.refused else self._failed)[key_of(bucket)] = bucket
            level = logging.INFO if error.refused else logging.WARNING  # on a small GPU many do not fit
            what = "capture of %s at %s %s, calls of this size run eagerly: %s"
            log.log(level, what, self._labels["kind"], bucket, outcome, error)
        seconds = time.monotonic() - started
        log.debug("part of a capture of %s at %s: %.3f s", self.capturable.name, dict(bucket), seconds)
        unfinished.seconds += seconds
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
