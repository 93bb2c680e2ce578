"""What a run is measured to take of a GPU's memory, and what captures make of it, on a device that is only counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count, islice

import pytest
import torch
from torch import Tensor

from models.interfaces.capturable import Bucket, BufferSpec, Capturable
from service.engine.memory import peak_bytes
from service.graphs import pool as pool_module
from service.graphs.pool import (
    Capture,
    CaptureError,
    GraphPool,
    Interrupted,
    Segment,
    bytes_beyond,
    claim_workspace,
    peak_segments,
    release_cached,
)
from tests.support.fake_cuda import GPU, FakeCuda

MIB = 1 << 20


@pytest.mark.parametrize(
    ("allocated", "segments", "num_bytes", "rest"),
    [
        (300, [200, 140], 340, []),  # whole segments
        (300, [200, 40], 300, [60]),  # the rest in gaps of segments that are live
        (300, [300], 300, []),
        (0, [], 0, []),
    ],
)
def test_a_run_takes_its_segments_or_what_it_allocates_if_that_is_more(
    monkeypatch: pytest.MonkeyPatch, allocated: int, segments: list[int], num_bytes: int, rest: list[int]
) -> None:
    cuda = FakeCuda(monkeypatch)
    cuda.hold(1000, [700, 500])
    cuda.run(700, [500, 200])  # without `empty_cache` what this leaves would hold the run
    found = peak_segments(lambda: cuda.run(allocated, segments), GPU)
    assert found == [Segment("large", size) for size in segments + rest]
    assert peak_bytes(lambda: cuda.run(allocated, segments), GPU) == num_bytes


@pytest.mark.parametrize(
    ("held", "more"),
    [
        ([], 190),
        ([100], 90),
        ([100, 60, 30], 0),
        ([190], 0),  # a free segment is divided
        ([30] * 10, 160),  # and does not grow
        ([90, 20], 100),
    ],
)
def test_segments_of_a_pool_hold_no_larger_ones(held: list[int], more: int) -> None:
    needed = [Segment("large", size) for size in (60, 30, 100)]
    assert bytes_beyond((Segment("large", size) for size in held), needed) == more
    assert bytes_beyond((Segment("small", size) for size in held), needed) == 190


class Work:
    """A capturable whose forward allocates so many MiB in segments of these sizes."""

    def __init__(self, cuda: FakeCuda, allocated: int, segments: Sequence[int]) -> None:
        self._cuda = cuda
        self._allocated = allocated
        self._segments = segments

    def buffer_specs(self, bucket: Bucket) -> dict[str, BufferSpec]:
        return {}

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        self._cuda.run(self._allocated * MIB, [size * MIB for size in self._segments])
        return {"rows": torch.zeros(2)}


def capture(pool: GraphPool, work: Capturable) -> Capture:
    parts = pool.capture(work, {"rows": 1}, dict)
    while True:
        try:
            next(parts)
        except StopIteration as made:
            return made.value


def captured(pool: GraphPool, work: Capturable) -> bool:
    """Whether a capture was made, not refused."""
    try:
        capture(pool, work)
    except CaptureError as error:
        assert error.refused
        return False
    return True


@pytest.mark.parametrize(("seconds", "replays"), [(0.001, 3), (0.05, 1)])
def test_a_capture_has_one_eager_run_and_few_long_replays(
    monkeypatch: pytest.MonkeyPatch, seconds: float, replays: int
) -> None:
    """Each of them is a part, for which requests have to wait."""
    cuda, done, stamps = FakeCuda(monkeypatch), list[str](), count()
    monkeypatch.setattr(FakeCuda.CUDAGraph, "replay", lambda graph: done.append("replay"))
    monkeypatch.setattr(pool_module.time, "perf_counter", lambda: seconds * next(stamps))
    work = Work(cuda, 10, [10])
    forward = work.forward
    work.forward = lambda buffers, bucket: (done.append("forward"), forward(buffers, bucket))[1]
    parts, shown = GraphPool(GPU, 300 * MIB).capture(work, {"rows": 1}, dict), list[list[str]]()
    made = None
    while made is None:
        try:
            next(parts)
        except StopIteration as stop:
            made = stop.value
        shown.append(done[:])
        done.clear()
    assert shown == [["forward"], ["forward"], *[["replay"]] * replays]
    assert made.seconds == pytest.approx(seconds)
    assert made.outputs["rows"].shape == (2,)


def test_segments_that_a_capture_would_reserve_count_against_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    pool = GraphPool(GPU, 300 * MIB)
    assert not captured(pool, Work(cuda, 290, [200, 140]))
    assert captured(pool, Work(cuda, 290, [200, 92])) and pool.graph_bytes == 292 * MIB
    cuda.outside = 4 * MIB
    assert captured(pool, Work(cuda, 270, [180, 90])), "the segments of the larger one hold it"
    assert pool.graph_bytes == 296 * MIB


@pytest.mark.parametrize("segments", [[80, 80, 80], [65, 65, 65]], ids=["larger", "smaller"])
def test_larger_captures_do_not_outgrow_the_limit(monkeypatch: pytest.MonkeyPatch, segments: list[int]) -> None:
    """Whether they need more or less in all than what the pool holds."""
    cuda = FakeCuda(monkeypatch)
    cuda.outside = 10 * MIB  # is no room in the pool
    pool = GraphPool(GPU, 400 * MIB)
    assert captured(pool, Work(cuda, 200, [20] * 10))
    assert not captured(pool, Work(cuda, sum(segments), segments))
    assert captured(pool, Work(cuda, 165, [55] * 3)) and pool.num_bytes < pool.limit_bytes


class Layered(Work):
    """Allocates in its first module, before its second one."""

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        outputs = super().forward(buffers, bucket)
        return {name: torch.nn.Identity()(value) for name, value in outputs.items()}


def test_a_request_ends_an_eager_run_and_a_recording_which_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(pool_module, "_LOOK_EVERY", 0.0)
    pool, work = GraphPool(GPU, 300 * MIB), Layered(cuda, 100, [100])
    assert captured(pool, Work(cuda, 60, [60])) and pool.graph_bytes == 60 * MIB
    before = pool.static_bytes
    for done in range(2):
        parts = pool.capture(work, {"rows": 1}, dict)
        deque(islice(parts, done), maxlen=0)
        pool.arrived = lambda: True
        with pytest.raises(Interrupted):
            next(parts)
        work.forward({}, {"rows": 1})  # looks no more
        pool.arrived = lambda: False
        assert pool.static_bytes == before
    assert captured(pool, work) and pool.static_bytes == 2 * before
    assert pool.graph_bytes == 160 * MIB, "what a recording that was given up has added to the pool counts once"


class Scratch:
    """A capturable that fills a tensor of each of these MiB at a time."""

    def __init__(self, *sizes: int) -> None:
        self._sizes = sizes

    def buffer_specs(self, bucket: Bucket) -> dict[str, BufferSpec]:
        return {}

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        filled = [torch.ones(size * MIB, dtype=torch.uint8, device="cuda") for size in self._sizes]
        return {"sums": torch.stack([one[:2].sum() for one in filled])}


SMALL_SEGMENTS = 4 * MIB
"""Outputs are small, and lie outside of the memory pool."""


@pytest.mark.gpu
def test_on_a_gpu_captures_stay_within_the_limit() -> None:
    device, stream = torch.device("cuda"), torch.cuda.Stream()
    pool = GraphPool(device, 280 * MIB)
    with torch.cuda.stream(stream):
        release_cached(device)
        before = torch.cuda.memory_reserved(device)
        assert captured(pool, Scratch(*[12] * 8))
        assert not captured(pool, Scratch(*[60] * 4)), "what the pool holds is too small for these"
        assert captured(pool, Scratch(12, 12)) and captured(pool, Scratch(60))
        release_cached(device)
        taken = torch.cuda.memory_reserved(device) - before
        assert taken - SMALL_SEGMENTS <= pool.graph_bytes <= pool.limit_bytes


class LayeredScratch(Scratch):
    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        return {name: torch.nn.Identity()(value) for name, value in super().forward(buffers, bucket).items()}


@pytest.mark.gpu
@pytest.mark.parametrize("others", [True, False])
def test_on_a_gpu_a_recording_that_is_given_up_is_made_again(monkeypatch: pytest.MonkeyPatch, others: bool) -> None:
    """Whether or not there are other graphs in its memory pool."""
    monkeypatch.setattr(pool_module, "_LOOK_EVERY", 0.0)
    device, work = torch.device("cuda"), LayeredScratch(30, 30)
    pool = GraphPool(device, 280 * MIB)
    with torch.cuda.stream(torch.cuda.Stream()):
        release_cached(device)
        before = torch.cuda.memory_reserved(device)
        kept = [capture(pool, Scratch(12))] if others else []
        parts = pool.capture(work, {"rows": 1}, dict)
        next(parts)
        pool.arrived = lambda: True
        with pytest.raises(Interrupted):
            next(parts)
        pool.arrived = None
        kept.append(capture(pool, work))
        kept[-1].outputs["sums"].zero_()
        kept[-1].replay()
        assert kept[-1].outputs["sums"].tolist() == [2, 2]
        release_cached(device)
        assert torch.cuda.memory_reserved(device) - before - SMALL_SEGMENTS <= pool.graph_bytes <= pool.limit_bytes


@pytest.mark.gpu
def test_on_a_gpu_a_run_takes_what_it_fills() -> None:
    device = torch.device("cuda")
    found = peak_segments(lambda: Scratch(30, 50).forward({}, {}), device)
    assert 80 * MIB <= sum(segment.num_bytes for segment in found) <= 90 * MIB
    assert bytes_beyond([Segment("large", 60 * MIB), Segment("large", 40 * MIB)], found) <= 2 * MIB


@pytest.mark.gpu
def test_on_a_gpu_a_large_run_leaves_nothing_behind() -> None:
    device = torch.device("cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        claim_workspace(device)
        release_cached(device)
        before = torch.cuda.memory_reserved(device)
        filled = torch.ones(500 * MIB, dtype=torch.uint8, device=device)
        del filled
        factor = torch.ones((2048, 2048), dtype=torch.bfloat16, device=device)
        assert float((factor @ factor)[0, 0]) == 2048
        del factor
        release_cached(device)
        assert torch.cuda.memory_reserved(device) == before
