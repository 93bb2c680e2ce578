"""Work on the CPU has not become 1.5 times as much as it was: calls, operations of torch and their multiplications,
which are the same on every machine. How long they take is measured by `python -m benchmarks.cpu`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cpu import LIMIT, WORKLOADS, Workload, build, committed

pytestmark = pytest.mark.slow


class Work(NamedTuple):
    """calls: of functions, in Python and from it; operations: of torch; flops: of its matrix products."""

    calls: int
    operations: int
    flops: int


KNOWN = {
    "chat_step": Work(634, 10, 0),
    "tokens_to_client": Work(3124, 0, 0),
    "packing": Work(555, 144, 0),
    "encoder": Work(815, 183, 1_901_854_720),
    "speech_step": Work(3250, 1902, 20_013_504),
}
"""Of one call on Python 3.11 and torch 2.13; LIMIT leaves room for others."""


class Operations(TorchDispatchMode):
    """Counts those that run in it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


def calls_of(call: Workload) -> int:
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count


def work_of(call: Workload) -> Work:
    with torch.inference_mode():
        call()  # what only the first one does
        calls = min(calls_of(call) for _ in range(3))
        with Operations() as operations:
            call()
        with FlopCounterMode(display=False) as flops:
            call()
    return Work(calls, operations.count, flops.get_total_flops())


def more(work: Work, known: Work) -> list[str]:
    """Names of what is more than LIMIT times as much as it was."""
    return [name for name, now, was in zip(Work._fields, work, known, strict=True) if now > LIMIT * was]


@pytest.fixture(scope="module")
def workloads() -> Iterator[dict[str, Workload]]:
    threads = torch.get_num_threads()
    yield build()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", WORKLOADS)
def test_nothing_became_more_work(workloads: dict[str, Workload], name: str) -> None:
    work = work_of(workloads[name])
    assert more(work, KNOWN[name]) == [], f"{work} instead of {KNOWN[name]}"


def test_every_workload_has_a_committed_ratio() -> None:
    assert committed().keys() == WORKLOADS.keys() == KNOWN.keys()
