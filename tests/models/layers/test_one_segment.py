"""Dense attention of one segment, and of equal segments, equals attention of segments; who gets a bucket for it."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from models.interfaces.capturable import EXACT
from models.layers import dense_segments
from models.layers.attention import varlen_attention
from models.layers.dense_segments import attend_lengthened, attend_packed, dense_buckets, far
from models.layers.packed import rotate_packed
from tests.models.kernels.checking import relative_error, replayed, wide_in_place
from tests.support.one_segment import allow_one_segment
from tests.support.one_segment import taken as taken

HEADS = 3
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def nothing_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_segments, "_refused", set())


def inputs(rows: int, padding: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """qkv, cosines, sines, cu_seqlens; what belongs to padding is NaN."""
    qkv = torch.randn(rows + padding, 3 * HEADS, width).to(dtype)
    angles = torch.randn(rows + padding, width // 2)
    qkv[rows:], angles[rows:] = float("nan"), float("nan")
    return qkv, angles.cos(), angles.sin(), torch.tensor([0, rows], dtype=torch.int32)


def reference(qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, cu_seqlens: Tensor) -> Tensor:
    """In float64, of the rotated queries and keys as they are rounded."""
    turned = qkv.clone()
    if rotary is not None:
        rotate_packed.reference(turned, 2 * HEADS, *rotary)
    q, k, v = (x.nan_to_num() for x in wide_in_place(turned)[0].chunk(3, dim=1))
    return varlen_attention.reference(q, k, v, cu_seqlens, cu_seqlens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 72, 80])
@pytest.mark.parametrize(("rows", "padding"), [(37, 0), (37, 1), (37, 91), (1, 3), (0, 4)])
def test_it_equals_attention_of_segments(rows, padding, width, dtype) -> None:
    qkv, *rest = inputs(rows, padding, width, dtype)
    expected = reference(qkv, rest[:2], rest[2])
    out = attend_lengthened(qkv, *rest)
    assert out.shape == (rows + padding, HEADS, width) and out.dtype == dtype
    assert not out[rows:].any()
    if rows:
        assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_weight_of_padding_is_nothing_even_beside_far_lower_scores(dtype) -> None:
    """Scores of a thousand below zero, which no padding with a score of zero would leave a weight to."""
    qkv, cos, sin, ends = inputs(5, 3, 64, dtype)
    qkv[:5, :HEADS], qkv[:5, HEADS : 2 * HEADS] = 11.0, -11.0
    cos[:5], sin[:5] = 1.0, 0.0
    qkv[:5, 2 * HEADS :] = 2.0
    out = attend_lengthened(qkv, cos, sin, ends)
    torch.testing.assert_close(out[:5], torch.full_like(out[:5], 2.0))
    assert far(dtype) == float(torch.tensor(far(dtype), dtype=dtype))


def test_one_segment_over_whole_rows_takes_it_and_nothing_else_does(taken) -> None:
    qkv, cos, sin, ends = inputs(50, 14, 16, torch.float32)
    expected = reference(qkv, (cos, sin), ends)
    torch.testing.assert_close(attend_packed(qkv.clone(), (cos, sin), ends, 64).double(), expected, atol=1e-5, rtol=0)
    assert taken == [64]
    two = torch.tensor([0, 20, 50], dtype=torch.int32)
    attend_packed(qkv.clone(), (cos, sin), two, 64)
    attend_packed(qkv.clone(), (cos, sin), torch.tensor([0, 50, 50], dtype=torch.int32), 64)
    attend_packed(qkv[:63].clone(), (cos[:63], sin[:63]), ends, 64)
    attend_packed(qkv.clone(), None, ends, 64)
    assert taken == [64]


def test_dense_buckets_are_for_one_segment_and_for_equal_ones_where_they_pay(monkeypatch) -> None:
    """One segment of many rows, cut to whole ones; of the equal ones those that the largest bucket could hold."""
    sizes = (1024, 2048, 2400, 16384)
    listed = [{"patches": p, "sequences": 32, "max_seqlen": p, "windows": p // 32} for p in sizes]
    weight, equal = torch.empty(1, dtype=torch.bfloat16), [(1, 256), (1, 784), (1, 4096), (2, 784), (32, 784)]
    assert dense_buckets(listed, equal, 80, 4, weight) == []
    monkeypatch.setattr(dense_segments, "on_hopper", lambda *_: True)
    one = [{"patches": p, "sequences": 1, "max_seqlen": p, "windows": w} for p, w in ((2048, 64), (2368, 75))]
    one.append({"patches": 16384, "sequences": 1, "max_seqlen": 16384, "windows": 512})
    exact = [
        {"patches": segments * patches, "sequences": segments, "max_seqlen": patches, EXACT: 1}
        for segments, patches in equal[1:4]
    ]
    assert dense_buckets(listed, equal, 80, 4, weight) == [*one, *exact]
    assert dense_buckets(listed, equal, 64, 4, weight) == exact
    assert dense_buckets(listed, equal, 128, 4, weight) == []
    # Heads of 72 are as fast in the buckets for one segment from 2048 rows on; nine patches make an embedding.
    patches = [bucket["patches"] for bucket in dense_buckets(listed, equal, 72, 9, weight)]
    assert patches == [2304, 16128, 784, 2 * 784]


@pytest.mark.gpu
@pytest.mark.parametrize("length", [0, 1, 2047, 2111, 2112])
def test_a_replayed_graph_follows_the_length(length: int, monkeypatch) -> None:
    """Of the same static buffers, which are refilled between replays."""
    allow_one_segment(monkeypatch)
    device = torch.device("cuda")
    qkv, cos, sin, ends = (x.to(device) for x in inputs(2112, 0, 80, torch.bfloat16))

    def run() -> Tensor:
        return attend_packed(qkv * 1, (cos, sin), ends, len(qkv))

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    turned = qkv.clone()
    rotate_packed.reference(turned, 2 * HEADS, cos, sin)
    ends[1] = length
    qkv[length:] = float("nan")
    graph.replay()
    torch.cuda.synchronize()
    assert not out[length:].any()
    if length:
        q, k, v = turned[:length].double().chunk(3, dim=1)
        expected = varlen_attention.reference(q, k, v, ends, ends)
        assert relative_error(out[:length], expected) < TOLERANCE[torch.bfloat16]


def ends_of(rows: int, length: int) -> Tensor:
    return torch.arange(0, rows + 1, length, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 72, 80])
@pytest.mark.parametrize(("rows", "length"), [(37, 37), (1, 1), (36, 12)])
@pytest.mark.parametrize("rotated", [False, True])
def test_equal_segments_equal_attention_of_segments(rows, length, width, dtype, rotated) -> None:
    qkv, cos, sin, _ = inputs(rows, 0, width, dtype)
    rotary = (cos, sin) if rotated else None
    expected = reference(qkv, rotary, ends_of(rows, length))
    out = attend_packed(qkv.clone(), rotary, None, length)
    assert out.shape == (rows, HEADS, width) and out.dtype == dtype
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("alone", [True, False])
def test_a_refusal_takes_the_general_attention_and_is_logged_once(alone: bool, monkeypatch, caplog) -> None:
    """Of one segment with padding behind it, and of equal ones."""
    allow_one_segment(monkeypatch)
    tried: list[int] = []

    def refuse(q: Tensor, *_: object) -> Tensor:
        tried.append(len(q))
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(dense_segments, "dense", refuse)
    qkv, *rotary, ends = inputs(50, 14, 16, torch.float32) if alone else inputs(36, 0, 16, torch.float32)
    expected = reference(qkv, rotary, ends if alone else ends_of(36, 12))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            out = attend_packed(qkv.clone(), rotary, ends if alone else None, 64 if alone else 12)
            torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)
    assert tried == [1 if alone else 3]
    assert len(caplog.records) == 1


def test_running_out_of_memory_is_no_refusal(monkeypatch) -> None:
    def fail(*_: object) -> Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(dense_segments, "dense", fail)
    qkv, *rotary, _ = inputs(36, 0, 16, torch.float32)
    with pytest.raises(torch.OutOfMemoryError):
        attend_packed(qkv, rotary, None, 36)
    assert not dense_segments._refused


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [64, 72, 80])
@pytest.mark.parametrize(("rows", "length"), [(2100, None), (784, 784), (1564, 1564), (1200, 400)])
def test_on_a_gpu_dense_attention_and_its_replay_equal_attention_of_segments(
    rows: int, length: int | None, width: int, dtype: torch.dtype, monkeypatch
) -> None:
    """Of one segment with padding behind it, and of equal ones. float32 is refused, and attends in general."""
    allow_one_segment(monkeypatch)
    device = torch.device("cuda")
    qkv, cos, sin, ends = (x.to(device) for x in inputs(rows, 0 if length else 12, width, dtype))
    expected = reference(qkv, (cos, sin), ends_of(rows, length).to(device) if length else ends)

    def run() -> Tensor:
        return attend_packed(qkv * 1, (cos, sin), None if length else ends, length or len(qkv))

    eager = run()
    for out in (eager, replayed(device, run)):
        assert not out[rows:].any()
        assert relative_error(out[:rows], expected[:rows]) < TOLERANCE[dtype]
    if dtype == torch.float32:
        kind = "equal segments" if length else "single pictures"
        assert dense_segments._refused == {(kind, width, dtype)}
    elif torch.cuda.get_device_capability() == (9, 0):
        assert not dense_segments._refused, "cuDNN refuses what it was measured to be faster at"
