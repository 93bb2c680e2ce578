"""Replay equals eager under everything that padding and reused memory can hold."""

from __future__ import annotations

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
from service.graphs.observations import Observations
from service.graphs.pool import Capture, CaptureError, GraphPool, Interrupted
from service.graphs.runner import GraphRunner, Run
from tests.support.devices import DEVICES
from tests.support.inference import no_gradients as no_gradients
from tests.support.tiny_chat import TinyEncoder, tiny_item, tiny_model

LIMIT = 64 << 20
Fill = Callable[[], Mapping[str, Tensor]]


def made_runner(
    capturable: Capturable, buckets: Sequence[Bucket], pool: GraphPool, **options: object
) -> tuple[GraphRunner, Observations]:
    observations = Observations()
    return GraphRunner("tiny", "encoder", capturable, buckets, pool, observations, **options), observations


def capture_all(runner: GraphRunner, *, idle: bool = True) -> None:
    while runner.capture_next(idle=idle):
        pass


def outcomes(observations: Observations) -> dict[str, float]:
    """Captures by what became of them, since the last call."""
    return {e.labels["outcome"]: e.value for e in observations.drain() if e.name == "graph_captures_total"}


def encoder_runner(device: str, **options: object) -> tuple[GraphRunner, Observations]:
    """What it captures before readiness is captured."""
    encoder = tiny_model(device).encoder
    runner, observations = made_runner(
        encoder, encoder.default_buckets(), GraphPool(torch.device(device), LIMIT), **options
    )
    capture_all(runner, idle=False)
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


def bucket_of(runner: GraphRunner, required: Bucket) -> Bucket | None:
    """That `run` would replay."""
    graph = runner.graph_for(required)
    return None if graph is None else graph.bucket


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
def test_every_route_is_counted_with_its_reason(device: str) -> None:
    runner, observations = encoder_runner(device)
    encode(runner, [tiny_item(0, [10])])
    encode(runner, [tiny_item(0, [10])], eager="ragged")
    encode(runner, [tiny_item(0, [100])])
    encode(runner, [tiny_item(0, [2] * 20)])
    events = observations.drain()
    steps = {(e.labels["route"], e.labels["reason"]): e.value for e in events if e.name == "steps_total"}
    assert steps == {("replay", "captured"): 1, ("eager", "ragged"): 1, ("eager", "no_bucket"): 2}
    rows = {e.name: e.value for e in events if e.name.endswith("rows_total")}
    assert rows == {"replayed_rows_total": 10, "padded_rows_total": 6}
    assert [e.value for e in events if e.name == "bucket_occupancy_ratio"] == [10 / 16]


def test_replays_with_more_padding_than_the_list_means_them_to_have_are_few_misses() -> None:
    buckets = sorted(tiny_model("cpu").encoder.default_buckets(), key=cost_of)
    runner, _ = encoder_runner("cpu", before_ready=buckets[-1:])
    item, exact = [tiny_item(0, [10])], buckets[0]
    for count in range(1, 49):
        assert bucket_of(runner, runner.capturable.required(item)) == buckets[-1]
        assert encode(runner, item)[1].route == "replay" and runner.misses == count / 16
    assert runner.capture_missed() and exact in runner.captured and runner.misses == 0
    for _ in range(3):
        assert bucket_of(runner, runner.capturable.required(item)) == exact
        assert encode(runner, item)[1].route == "replay" and runner.misses == 0
    assert not runner.capture_missed()


def test_a_dense_bucket_holds_what_fills_it_and_is_captured_last() -> None:
    encoder, pool = tiny_model("cpu").encoder, GraphPool(torch.device("cpu"), LIMIT)
    general = encoder.default_buckets()
    dense = {"patches": 32, "sequences": 1, "max_seqlen": 32}
    runner, _ = made_runner(encoder, [*general, dense], pool, before_ready=general[-1:], dense_buckets=[dense])
    capture_all(runner)
    assert runner.captured == [*general[::-1], dense]
    for lengths, bucket in (([31], dense), ([32], dense), ([30], general[1]), ([14, 16], general[1])):
        assert bucket_of(runner, runner.capturable.required([tiny_item(0, lengths)])) == bucket


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
    pool = GraphPool(torch.device(device), LIMIT) if device != "cpu" else BrokenPool(torch.device("cpu"), LIMIT)
    runner, observations = made_runner(encoder, encoder.default_buckets(), pool)
    capture_all(runner)
    assert outcomes(observations) == {"captured": 2, "failed": 2}
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
    largest = Layout.of(encoder.buffer_specs(sorted(encoder.default_buckets(), key=cost_of)[1])).num_bytes
    limit = largest if device == "cpu" else 0
    pool = GraphPool(torch.device(device), limit)
    runner, observations = made_runner(encoder, encoder.default_buckets(), pool)
    capture_all(runner)
    assert outcomes(observations).get("refused", 0) >= 2 and pool.num_bytes <= limit
    _, run = encode(runner, [tiny_item(0, [90])])
    assert run.route == "eager"


@pytest.mark.gpu
def test_memory_that_another_process_takes_during_a_capture_is_not_accounted(monkeypatch: pytest.MonkeyPatch) -> None:
    free = itertools.count(64 << 30, -1 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 80 << 30))
    encoder = tiny_model("cuda").encoder
    runner, observations = made_runner(encoder, encoder.default_buckets(), GraphPool(torch.device("cuda"), 256 << 20))
    capture_all(runner)
    assert outcomes(observations) == {"captured": 4}


class Counter:
    """A capturable with slot state: adds to rows of a table by index, as a decode step does."""

    def __init__(self, device: str) -> None:
        self.table = torch.zeros((8, 4), device=device)

    def buffer_specs(self, bucket: Bucket) -> dict[str, BufferSpec]:
        rows = bucket["rows"]
        return {"slots": BufferSpec((rows,), torch.int64), "hidden": BufferSpec((rows, 4), torch.float32)}

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        rows = self.table[buffers["slots"]] + buffers["hidden"]
        self.table.index_copy_(0, buffers["slots"], rows)
        return {"sums": rows.sum(dim=1)}


TWO = [{"rows": 2}, {"rows": 4}]


class PartedPool(GraphPool):
    """Needs three parts for a capture, as on a GPU; each finds the fillers that it asks for."""

    def capture(self, capturable: Capturable, bucket: Bucket, fill: Fill) -> Generator[None, None, Capture]:
        for _ in range(2):
            assert all(not buffer.any() for buffer in fill().values())
            yield
        return (yield from super().capture(capturable, bucket, fill))


def test_a_capture_that_is_given_up_for_a_request_begins_anew() -> None:
    class Busy(PartedPool):
        arrivals = iter((True, False, False))

        def capture(self, capturable: Capturable, bucket: Bucket, fill: Fill) -> Generator[None, None, Capture]:
            yield
            if next(self.arrivals):
                raise Interrupted
            return (yield from super().capture(capturable, bucket, fill))

    runner, observations = made_runner(Counter("cpu"), TWO[:1], Busy(torch.device("cpu"), LIMIT))
    assert [runner.capture_next(idle=True) for _ in range(7)] == [True] * 6 + [False]
    assert runner.captured == [{"rows": 2}]
    assert outcomes(observations) == {"captured": 1}


def test_a_busy_runner_serves_between_the_parts_of_a_capture() -> None:
    runner, _ = made_runner(Counter("cpu"), TWO, PartedPool(torch.device("cpu"), LIMIT), before_ready=())
    small, large = (Plan(arrays={"slots": torch.arange(rows).numpy()}, required={"rows": rows}) for rows in (2, 4))
    assert not runner.capture_missed()
    assert runner.capture_next(idle=True), "a part of the largest, while it idles"
    for _ in range(2):
        assert runner.run(small).route == "eager" and not runner.captured
        assert runner.capture_missed()
    assert runner.captured == [{"rows": 4}] and runner.misses == 0 and not runner.capture_missed()
    for _ in range(3):
        assert bucket_of(runner, small.required) == {"rows": 4} and runner.run(large).route == "replay"
        runner.run(small)
        assert runner.capture_missed()
    assert bucket_of(runner, small.required) == {"rows": 2} and not runner.capture_missed()


def test_a_runner_on_demand_captures_what_a_call_missed() -> None:
    pool = GraphPool(torch.device("cpu"), LIMIT)
    runner, _ = made_runner(Counter("cpu"), TWO, pool, on_demand=TWO, before_ready=())
    assert not runner.capture_next(idle=True) and runner.num_untried == 0
    plan = Plan(arrays={"slots": torch.tensor([5, 2]).numpy()}, required={"rows": 2})
    assert runner.run(plan).route == "eager"
    capture_all(runner)
    assert runner.captured == [{"rows": 2}] and runner.run(plan).route == "replay"


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
    runner, _ = made_runner(Littering("cuda"), [{"rows": 4}], GraphPool(torch.device("cuda"), 256 << 20))
    assert runner.capture_next(idle=False) and runner.captured and gc.isenabled()
