"""Replay equals eager under everything that padding and reused memory can hold."""

from __future__ import annotations

import collections
import gc
import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.interfaces.capturable import Bucket, BufferSpec, Capturable, Plan
from models.interfaces.media import MediaItem
from service.graphs.buckets import cheapest, cost_of
from service.graphs.buffers import Layout
from service.graphs.observations import Observations, Route
from service.graphs.pool import Capture, CaptureError, GraphPool, Interrupted, RouteSeconds
from service.graphs.runner import GraphRunner, RouteTrial, Run
from tests.support.devices import DEVICES
from tests.support.inference import no_gradients as no_gradients
from tests.support.tiny_chat import TinyEncoder, tiny_item, tiny_model

LIMIT = 64 << 20
Fill = Callable[[], Mapping[str, Tensor]]


def encoder_runner(device: str, **options: object) -> tuple[GraphRunner, Observations]:
    encoder = tiny_model(device).encoder
    observations = Observations()
    pool = GraphPool(torch.device(device), LIMIT)
    runner = GraphRunner("tiny", "encoder", encoder, encoder.default_buckets(), pool, observations, **options)
    while runner.capture_next(idle=False):
        pass
    observations.drain()
    return runner, observations


RUNNERS: dict[str, GraphRunner] = {}


def shared_runner(device: str) -> GraphRunner:
    if device not in RUNNERS:
        RUNNERS[device] = encoder_runner(device)[0]
    return RUNNERS[device]


def poison(runner: GraphRunner) -> None:
    """NaN in every static buffer and output, and in the pool: the largest captured graph is replayed on NaN."""
    largest = runner.bucket_list[-1]
    nan = torch.full((largest["patches"],), math.nan)
    ends = torch.tensor([0, largest["patches"]], dtype=torch.int32)
    pixels = torch.full((largest["patches"], 12), 255, dtype=torch.uint8)
    plan = Plan(
        arrays={"pixels": pixels.numpy(), "shift": nan.numpy(), "cu_seqlens": ends.numpy()},
        fills={"cu_seqlens": float(largest["patches"])},
        required=largest | {"sequences": 1},
    )
    assert runner.run(plan).outputs["embeds"].isnan().all()
    for bucket in runner._graphs.values():
        bucket.static.device.fill_(0xFF)
        for output in bucket.capture.outputs.values():
            output.fill_(math.nan)


def encode(runner: GraphRunner, items: Sequence[MediaItem], **options: object) -> tuple[Tensor, Run]:
    plan = runner.capturable.plan(items)
    run = runner.run(replace(plan, fills=plan.fills | {"shift": math.nan}), **options)
    return run.outputs["embeds"][: sum(item.num_embeds for item in items)].clone(), run


FRAMES = st.lists(st.integers(1, 12).map(lambda n: 2 * n), min_size=1, max_size=3)


@pytest.mark.parametrize("device", DEVICES)
@given(lengths=st.lists(FRAMES, min_size=1, max_size=4), seed=st.integers(0, 9))
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_replay_equals_eager_with_poison_everywhere(device: str, lengths: list[list[int]], seed: int) -> None:
    runner = shared_runner(device)
    items = [tiny_item(seed + index, frames) for index, frames in enumerate(lengths)]
    expected, eager = encode(runner, items, eager="disabled")
    poison(runner)
    replayed, run = encode(runner, items)
    fits = cheapest(runner.bucket_list, runner.capturable.plan(items).required) is not None
    assert (eager.route, run.route) == ("eager", "replay" if fits else "eager")
    torch.testing.assert_close(replayed, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bucket", range(4))
def test_a_bucket_is_filled_by_one_item_and_by_its_most_sequences(device: str, bucket: int) -> None:
    runner = shared_runner(device)
    bucket = runner.bucket_list[bucket]
    patches, sequences = bucket["patches"], bucket["sequences"]
    even = [patches // sequences // 2 * 2] * sequences
    for items in ([tiny_item(1, [patches])], [tiny_item(2, even)], [tiny_item(i, [even[0]]) for i in range(sequences)]):
        poison(runner)
        expected, _ = encode(runner, items, eager="disabled")
        replayed, run = encode(runner, items)
        assert run.route == "replay"
        torch.testing.assert_close(replayed, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_every_route_is_counted_with_its_reason(device: str) -> None:
    runner, observations = encoder_runner(device)
    encode(runner, [tiny_item(0, [10])])
    encode(runner, [tiny_item(0, [10])], eager="measured")
    encode(runner, [tiny_item(0, [100])])
    encode(runner, [tiny_item(0, [2] * 20)])
    events = observations.drain()
    steps = {(e.labels["route"], e.labels["reason"]): e.value for e in events if e.name == "steps_total"}
    assert steps == {("replay", "captured"): 1, ("eager", "measured"): 1, ("eager", "no_bucket"): 2}
    rows = {e.name: e.value for e in events if e.name.endswith("rows_total")}
    assert rows == {"replayed_rows_total": 10, "padded_rows_total": 6}
    assert [e.value for e in events if e.name == "bucket_occupancy_ratio"] == [10 / 16]


def test_replays_with_more_padding_than_the_list_means_them_to_have_are_few_misses() -> None:
    buckets = sorted(tiny_model("cpu").encoder.default_buckets(), key=cost_of)
    runner, _ = encoder_runner("cpu", before_ready=buckets[-1:])
    item, exact = [tiny_item(0, [10])], buckets[0]
    for count in range(1, 49):
        assert encode(runner, item)[1].bucket == buckets[-1]
        assert runner.misses == count / 16
    assert runner.capture_missed() and exact in runner.captured and runner.misses == 0
    for _ in range(3):
        assert encode(runner, item)[1].bucket == exact and runner.misses == 0
    assert not runner.capture_missed()


def test_a_dense_bucket_holds_what_fills_it_and_is_captured_last() -> None:
    encoder, pool = tiny_model("cpu").encoder, GraphPool(torch.device("cpu"), LIMIT)
    general = encoder.default_buckets()
    dense = {"patches": 32, "sequences": 1, "max_seqlen": 32}
    runner = GraphRunner(
        "tiny",
        "encoder",
        encoder,
        [*general, dense],
        pool,
        Observations(),
        before_ready=general[-1:],
        dense_buckets=[dense],
    )
    while runner.capture_next(idle=True):
        pass
    assert runner.captured == [*general[::-1], dense]
    for lengths, bucket in (([31], dense), ([32], dense), ([30], general[1]), ([14, 16], general[1])):
        assert encode(runner, [tiny_item(0, lengths)])[1].bucket == bucket
    for _ in range(40):
        encode(runner, [tiny_item(0, [20])])
    while runner.capture_next(idle=True):
        pass
    (found,) = [bucket for bucket in runner.captured if bucket not in (*general, dense)]
    assert found["patches"] == 20 and found["sequences"] > 1, "demand made a bucket for several segments"


def test_the_captured_graph_is_asserted_to_cover_what_the_plan_needs() -> None:
    runner = shared_runner("cpu")
    plan = runner.capturable.plan([tiny_item(0, [10])])
    bucket = next(bucket for bucket in runner._graphs.values() if bucket.bucket["patches"] == 16)
    with pytest.raises(AssertionError, match=r"for .*'max_seqlen': 17"):
        runner._replay(bucket, replace(plan, required=dict(plan.required) | {"max_seqlen": 17}))
    with pytest.raises(AssertionError, match=r"for \{'patches': 10\}"):
        runner._replay(bucket, replace(plan, required={"patches": 10}))


BROKEN = (32, 48)


class Broken(TinyEncoder):
    """Cannot be captured at BROKEN numbers of patches."""

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        outputs = super().forward(buffers, bucket)
        if bucket["patches"] in BROKEN:
            outputs["embeds"].sum().item()
        return outputs


class BrokenPool(GraphPool):
    """A CPU records nothing that could fail: here it does at BROKEN numbers of patches."""

    def capture(self, capturable: Capturable, bucket: Bucket, fill: Fill) -> Generator[None, None, Capture]:
        if bucket["patches"] in BROKEN:
            raise CaptureError("operation not permitted when stream is capturing")
        return (yield from super().capture(capturable, bucket, fill))


@pytest.mark.parametrize("device", DEVICES)
def test_a_failed_capture_leaves_its_calls_eager_is_counted_and_not_tried_again(device: str) -> None:
    encoder = Broken().to(device).requires_grad_(False)
    observations = Observations()
    pool = GraphPool(torch.device(device), LIMIT) if device != "cpu" else BrokenPool(torch.device("cpu"), LIMIT)
    runner = GraphRunner("tiny", "encoder", encoder, encoder.default_buckets(), pool, observations)
    while runner.capture_next(idle=True):
        pass
    outcomes = {e.labels["outcome"]: e.value for e in observations.drain() if e.name == "graph_captures_total"}
    assert outcomes == {"captured": 2, "failed": 2}
    assert [bucket["patches"] for bucket in runner.captured] == [96, 16]
    poison_free, run = encode(runner, [tiny_item(0, [10])])
    assert run.route == "replay" and poison_free.isfinite().all()
    runner._graphs.pop(next(key for key in runner._graphs if dict(key)["patches"] == 96))
    _, run = encode(runner, [tiny_item(0, [30])])
    assert run.route == "eager"
    assert [e.labels["reason"] for e in observations.drain() if e.labels.get("route") == "eager"] == ["capture_failed"]


@pytest.mark.parametrize("device", DEVICES)
def test_captured_graphs_over_the_byte_limit_are_refused_and_smaller_ones_made(device: str) -> None:
    encoder = tiny_model(device).encoder
    observations = Observations()
    largest = Layout.of(encoder.buffer_specs(sorted(encoder.default_buckets(), key=cost_of)[1])).num_bytes
    limit = largest if device == "cpu" else 0
    pool = GraphPool(torch.device(device), limit)
    runner = GraphRunner("tiny", "encoder", encoder, encoder.default_buckets(), pool, observations)
    while runner.capture_next(idle=True):
        pass
    outcomes = {e.labels["outcome"]: e.value for e in observations.drain() if e.name == "graph_captures_total"}
    assert outcomes.get("refused", 0) >= 2 and pool.num_bytes <= limit
    _, run = encode(runner, [tiny_item(0, [90])])
    assert run.route == "eager"


@pytest.mark.gpu
def test_memory_that_another_process_takes_during_a_capture_is_not_accounted(monkeypatch: pytest.MonkeyPatch) -> None:
    free = itertools.count(64 << 30, -1 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 80 << 30))
    encoder = tiny_model("cuda").encoder
    observations = Observations()
    pool = GraphPool(torch.device("cuda"), 256 << 20)
    runner = GraphRunner("tiny", "encoder", encoder, encoder.default_buckets(), pool, observations)
    while runner.capture_next(idle=True):
        pass
    outcomes = {e.labels["outcome"]: e.value for e in observations.drain() if e.name == "graph_captures_total"}
    assert outcomes == {"captured": 4}


class Counter:
    """A capturable with slot state: adds to rows of a table by index, as a decode step does."""

    name = "counter"

    def __init__(self, device: str) -> None:
        self.table = torch.zeros((8, 4), device=device)

    def buffer_specs(self, bucket: Bucket) -> dict[str, BufferSpec]:
        rows = bucket["rows"]
        return {"slots": BufferSpec((rows,), torch.int64), "hidden": BufferSpec((rows, 4), torch.float32)}

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        rows = self.table[buffers["slots"]] + buffers["hidden"]
        self.table.index_copy_(0, buffers["slots"], rows)
        return {"sums": rows.sum(dim=1)}


@pytest.mark.parametrize("device", DEVICES)
def test_slot_state_advances_in_place_and_padding_touches_scratch_alone(device: str) -> None:
    counter = Counter(device)
    pool = GraphPool(torch.device(device), LIMIT)
    runner = GraphRunner("tiny", "decode", counter, [{"rows": 4}], pool, Observations())
    assert runner.capture_next(idle=False)
    counter.table.zero_()
    hidden = torch.arange(1.0, 9.0, device=device).view(2, 4)
    for turn in range(1, 4):
        slots = torch.tensor([5, 2]).numpy()
        plan = Plan(arrays={"slots": slots}, tensors={"hidden": [hidden[:1], hidden[1:]]}, required={"rows": 2})
        run = runner.run(plan)
        assert run.route == "replay"
        assert run.outputs["sums"][:2].tolist() == [10.0 * turn, 26.0 * turn]
    assert counter.table[[1, 3, 4, 6, 7]].abs().sum() == 0


class PartedPool(GraphPool):
    """Needs three parts for a capture, as on a GPU; each finds the fillers that it asks for."""

    def capture(self, capturable: Capturable, bucket: Bucket, fill: Fill) -> Generator[None, None, Capture]:
        for _ in range(2):
            assert all(not buffer.any() for buffer in fill().values())
            yield
        return (yield from super().capture(capturable, bucket, fill))


def test_an_idle_runner_serves_between_the_parts_of_a_capture() -> None:
    counter = Counter("cpu")
    pool = PartedPool(torch.device("cpu"), LIMIT)
    runner = GraphRunner("tiny", "decode", counter, [{"rows": 2}, {"rows": 4}], pool, Observations(), before_ready=())
    plan = Plan(arrays={"slots": torch.tensor([5, 2]).numpy()}, required={"rows": 2})
    parts = 0
    while runner.capture_next(idle=True):
        parts += 1
        assert runner.run(plan).route == ("replay" if parts >= 3 else "eager")
        assert runner.num_untried == 2 - parts // 3
    assert parts == 6 and len(runner.captured) == 2


def test_a_capture_that_is_given_up_for_a_request_begins_anew() -> None:
    class Busy(PartedPool):
        arrivals = iter((True, False, False))

        def capture(self, capturable: Capturable, bucket: Bucket, fill: Fill) -> Generator[None, None, Capture]:
            yield
            if next(self.arrivals):
                raise Interrupted
            return (yield from super().capture(capturable, bucket, fill))

    observations = Observations()
    runner = GraphRunner(
        "tiny", "decode", Counter("cpu"), [{"rows": 2}], Busy(torch.device("cpu"), LIMIT), observations
    )
    assert [runner.capture_next(idle=True) for _ in range(7)] == [True] * 6 + [False]
    assert runner.captured == [{"rows": 2}]
    (made,) = [event for event in observations.drain() if event.name == "graph_captures_total"]
    assert (made.value, made.labels["outcome"]) == (1, "captured")


def test_a_busy_runner_serves_between_the_parts_of_a_capture() -> None:
    pool = PartedPool(torch.device("cpu"), LIMIT)
    buckets = [{"rows": 2}, {"rows": 4}]
    runner = GraphRunner("tiny", "decode", Counter("cpu"), buckets, pool, Observations(), before_ready=())
    small, large = (Plan(arrays={"slots": torch.arange(rows).numpy()}, required={"rows": rows}) for rows in (2, 4))
    assert not runner.capture_missed()
    assert runner.capture_next(idle=True), "a part of the largest, while it idles"
    for _ in range(2):
        assert runner.run(small).route == "eager" and not runner.captured
        assert runner.capture_missed()
    assert runner.captured == [{"rows": 4}] and runner.misses == 0 and not runner.capture_missed()
    for _ in range(3):
        assert runner.run(small).bucket == {"rows": 4} and runner.run(large).route == "replay"
        assert runner.capture_missed()
    assert runner.run(small).bucket == {"rows": 2} and not runner.capture_missed()


def test_a_runner_on_demand_captures_what_a_call_missed() -> None:
    pool = GraphPool(torch.device("cpu"), LIMIT)
    buckets = [{"rows": 2}, {"rows": 4}]
    runner = GraphRunner(
        "tiny", "decode", Counter("cpu"), buckets, pool, Observations(), on_demand=buckets, before_ready=()
    )
    assert not runner.capture_next(idle=True) and runner.num_untried == 0
    plan = Plan(arrays={"slots": torch.tensor([5, 2]).numpy()}, required={"rows": 2})
    assert runner.run(plan).route == "eager"
    while runner.capture_next(idle=True):
        pass
    assert runner.captured == [{"rows": 2}] and runner.run(plan).route == "replay"


@pytest.mark.parametrize("device", DEVICES)
def test_an_idle_runner_captures_what_demand_shows(device: str) -> None:
    runner, _ = encoder_runner(device)
    for _ in range(40):
        encode(runner, [tiny_item(0, [60])])
    assert runner.capture_next(idle=False) is False
    while runner.capture_next(idle=True):
        pass
    assert {bucket["patches"] for bucket in runner.captured} == {16, 32, 48, 96, 64}
    expected, _ = encode(runner, [tiny_item(3, [60])], eager="disabled")
    poison(runner)
    replayed, run = encode(runner, [tiny_item(3, [60])])
    assert run.route == "replay" and run.outputs["embeds"].shape[0] == 32
    torch.testing.assert_close(replayed, expected, atol=1e-5, rtol=1e-5)


class Littering(Counter):
    """Leaves cycles that hold pinned memory and a captured graph, and then allocates until a collection is due."""

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        outputs = super().forward(buffers, bucket)
        if torch.cuda.is_current_stream_capturing():
            assert not gc.isenabled()
            outputs["sums"] += len([[] for _ in range(10_000)])
        else:
            cycle: list[Any] = [torch.empty(1 << 20, pin_memory=True), torch.cuda.CUDAGraph()]
            cycle.append(cycle)
        return outputs


@pytest.mark.gpu
def test_garbage_is_not_collected_during_a_capture() -> None:
    counter = Littering("cuda")
    runner = GraphRunner(
        "tiny", "decode", counter, [{"rows": 4}], GraphPool(torch.device("cuda"), 256 << 20), Observations()
    )
    assert runner.capture_next(idle=False) and runner.captured and gc.isenabled()


NEAR = RouteSeconds(eager=1.1, replay=1.0)
LARGE = {"patches": 48, "sequences": 6, "max_seqlen": 48}


def serve(trial: RouteTrial, seconds: dict[Route, float], calls: int) -> collections.Counter[Route]:
    taken: collections.Counter[Route] = collections.Counter()
    for _ in range(calls):
        route = trial.route()
        taken[route] += 1
        trial.observe(route, seconds[route])
    return taken


def test_what_was_not_measured_or_is_much_slower_eagerly_is_replayed_without_a_trial() -> None:
    for captured in (None, RouteSeconds(eager=12.5, replay=1.7)):
        assert serve(RouteTrial(captured), {"eager": 0.1, "replay": 1.0}, 300) == {"replay": 300}


@pytest.mark.parametrize("faster", ["eager", "replay"])
def test_both_routes_are_tried_in_turn_and_then_the_faster_one_is_taken(faster: Route) -> None:
    trial = RouteTrial(NEAR)
    seconds: dict[Route, float] = {"eager": 1.0, "replay": 1.0, faster: 0.9}
    first = serve(trial, seconds, 8)
    assert first == {"eager": 4, "replay": 4}
    assert serve(trial, seconds, 100) == {faster: 100}
    later = serve(trial, seconds, 1280)
    assert 1 <= later["eager" if faster == "replay" else "replay"] <= 10


def test_the_first_call_of_a_route_and_one_that_was_held_up_do_not_decide() -> None:
    trial = RouteTrial(NEAR)
    for route, seconds in (("eager", 90.0), ("replay", 0.1), ("eager", 0.8), ("replay", 1.0), ("eager", 50.0)):
        trial.observe(route, seconds)
    for route, seconds in (("replay", 1.0), ("eager", 0.8), ("replay", 1.0)):
        trial.observe(route, seconds)
    assert trial.route() == "eager"


def test_a_route_is_left_only_for_one_that_is_clearly_faster() -> None:
    trial = RouteTrial(NEAR)
    serve(trial, {"eager": 0.99, "replay": 1.0}, 50)
    assert trial.route() == "replay"
    serve(trial, {"eager": 0.9, "replay": 1.0}, 2000)
    assert trial.route() == "eager"
    serve(trial, {"eager": 1.0, "replay": 0.99}, 2000)
    assert trial.route() == "eager"
    serve(trial, {"eager": 1.0, "replay": 0.8}, 2000)
    assert trial.route() == "replay"


def test_a_runner_counts_trials_and_what_they_decide_as_measured() -> None:
    with torch.inference_mode():
        encoder, observations = tiny_model().encoder, Observations()
        pool = GraphPool(torch.device("cpu"), 64 << 20)
        buckets = encoder.default_buckets()
        runner = GraphRunner("tiny", "encoder", encoder, buckets, pool, observations, measured=True)
        while runner.capture_next(idle=False):
            pass
        for key, graph in runner._graphs.items():
            near = NEAR if graph.bucket["patches"] >= 48 else RouteSeconds(eager=12.0, replay=1.0)
            runner._graphs[key] = replace(graph, capture=replace(graph.capture, seconds=near))
        runner._choices.clear()
        observations.drain()
        seconds = {"eager": 0.8, "replay": 1.0}
        expected = None
        for patches in (40, 10) * 30:
            plan = encoder.plan([tiny_item(patches, [patches])])
            run = runner.run(plan)
            assert run.bucket is not None and run.bucket["patches"] == {40: 48, 10: 16}[patches]
            runner.observe(run.bucket, run.route, seconds[run.route])
            if patches == 40:
                embeds = run.outputs["embeds"][:20].clone()
                expected = embeds if expected is None else expected
                torch.testing.assert_close(embeds, expected, atol=1e-5, rtol=1e-5)
    steps = {
        (event.labels["route"], event.labels["reason"]): event.value
        for event in observations.drain()
        if event.name == "steps_total"
    }
    assert steps == {("replay", "captured"): 30 + 4, ("eager", "measured"): 26}


def test_a_trial_that_runs_out_of_memory_is_replayed_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    observations = Observations()
    with torch.inference_mode():
        encoder = tiny_model().encoder
        pool = GraphPool(torch.device("cpu"), 64 << 20)
        runner = GraphRunner("tiny", "encoder", encoder, [LARGE], pool, observations, measured=True)
        runner.capture_next(idle=False)
        for key, graph in runner._graphs.items():
            runner._graphs[key] = replace(graph, capture=replace(graph.capture, seconds=NEAR))
        observations.drain()
        plan, forward, failures = encoder.plan([tiny_item(1, [40])]), encoder.forward, list[Bucket]()
        expected = runner.run(plan).outputs["embeds"][:20].clone()

        def without_memory(buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
            if bucket["patches"] == 40:  # the exact size: the replay is of 48
                failures.append(bucket)
                raise torch.OutOfMemoryError("CUDA out of memory")
            return forward(buffers, bucket)

        monkeypatch.setattr(encoder, "forward", without_memory)
        for _ in range(300):
            run = runner.run(plan)
            assert run.route == "replay" and run.bucket == LARGE
            torch.testing.assert_close(run.outputs["embeds"][:20], expected)
            runner.observe(LARGE, run.route, 1.0)
    steps = {(e.labels["route"], e.labels["reason"]): e.value for e in observations.drain() if e.name == "steps_total"}
    assert len(failures) == 1 and steps == {("replay", "captured"): 301}
