"""Dense attention of equal segments equals attention of segments; who gets a bucket for it."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from models.interfaces.capturable import EXACT
from models.layers import dense_segments
from models.layers.attention import varlen_attention
from models.layers.dense_segments import attend_packed, exact_buckets
from models.layers.packed import rotate_packed
from tests.models.kernels.checking import relative_error, replayed, upcast

HEADS = 3
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def nothing_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_segments, "_refused", set())


def inputs(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    angles = torch.randn(rows, width // 2)
    return torch.randn(rows, 3 * HEADS, width).to(dtype), (angles.cos(), angles.sin())


def reference(qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, length: int) -> Tensor:
    """In float64, of the rotated queries and keys as they are rounded."""
    turned = qkv.clone()
    if rotary is not None:
        rotate_packed.reference(turned, 2 * HEADS, *rotary)
    q, k, v = upcast(turned)[0].chunk(3, dim=1)
    ends = torch.arange(0, len(qkv) + 1, length, dtype=torch.int32)
    return varlen_attention.reference(q, k, v, ends, ends, qkv.shape[2] ** -0.5, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 72, 80])
@pytest.mark.parametrize(("rows", "length"), [(37, 37), (1, 1), (36, 12)])
@pytest.mark.parametrize("rotated", [False, True])
def test_it_equals_attention_of_segments(rows, length, width, dtype, rotated) -> None:
    qkv, angles = inputs(rows, width, dtype)
    rotary = angles if rotated else None
    expected = reference(qkv, rotary, length)
    out = attend_packed(qkv.clone(), rotary, None, length)
    assert out.shape == (rows, HEADS, width) and out.dtype == dtype
    assert relative_error(out, expected) < TOLERANCE[dtype]


def test_a_refusal_takes_the_general_attention_and_is_said_once(monkeypatch, caplog) -> None:
    tried: list[int] = []

    def refuse(q: Tensor, *_: object) -> Tensor:
        tried.append(q.shape[0])
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(dense_segments, "dense", refuse)
    qkv, rotary = inputs(36, 16, torch.float32)
    expected = reference(qkv, rotary, 12)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            out = attend_packed(qkv.clone(), rotary, None, 12)
            torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)
    assert tried == [3]
    assert len(caplog.records) == 1


def test_running_out_of_memory_is_no_refusal(monkeypatch) -> None:
    def fail(*_: object) -> Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(dense_segments, "dense", fail)
    qkv, rotary = inputs(36, 16, torch.float32)
    with pytest.raises(torch.OutOfMemoryError):
        attend_packed(qkv, rotary, None, 36)
    assert not dense_segments._refused


def test_exact_buckets_are_those_that_pay_and_that_the_list_could_hold(monkeypatch) -> None:
    listed = [{"patches": p, "sequences": 32, "max_seqlen": p} for p in (1024, 4800)]
    alone = [(1, patches) for patches in (256, 784, 4096, 8160)]
    weight = torch.empty(1, dtype=torch.bfloat16)
    assert exact_buckets(listed, alone, 64, weight) == []
    monkeypatch.setattr(dense_segments, "on_hopper", lambda *_: True)
    assert exact_buckets(listed, alone, 64, weight) == [
        {"patches": patches, "sequences": 1, "max_seqlen": patches, EXACT: 1} for _, patches in alone[1:3]
    ]
    frames = {"patches": 2 * 784, "sequences": 2, "max_seqlen": 784, EXACT: 1}
    assert exact_buckets(listed, [(2, 784), (8, 784)], 64, weight) == [frames]
    assert [bucket["patches"] for bucket in exact_buckets(listed, alone, 72, weight)] == [784]
    assert exact_buckets(listed, alone, 128, weight) == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [64, 72, 80])
@pytest.mark.parametrize(("rows", "length"), [(784, 784), (1564, 1564), (1200, 400)])
def test_on_a_gpu_it_equals_attention_of_segments_and_its_replay_too(rows, length, width, dtype) -> None:
    """float32 is refused, and attends in general."""
    device = torch.device("cuda")
    qkv, rotary = inputs(rows, width, dtype)
    expected = reference(qkv, rotary, length)
    there, angles = qkv.to(device), (rotary[0].to(device), rotary[1].to(device))

    def run() -> Tensor:
        return attend_packed(there * 1, angles, None, length)

    eager = run()
    for out in (eager, replayed(device, run)):
        assert relative_error(out, expected) < TOLERANCE[dtype]
    if dtype == torch.float32:
        assert dense_segments._refused == {("equal segments", width, dtype)}
    elif torch.cuda.get_device_capability() == (9, 0):
        assert not dense_segments._refused, "cuDNN refuses what it was measured to be faster at"
