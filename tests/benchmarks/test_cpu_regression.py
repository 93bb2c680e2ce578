"""Work on the CPU has not become 1.5 times slower than it was, measured against a fixed reference in the same run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.cpu import WORKLOADS, Workload, build, committed, ratios, slower


@pytest.fixture(scope="module")
def workloads() -> Iterator[dict[str, Workload]]:
    threads = torch.get_num_threads()
    yield build()
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_nothing_became_slower(workloads: dict[str, Workload]) -> None:
    assert slower(ratios(workloads), committed()) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "chat_step"])
def test_work_done_twice_is_noticed(workloads: dict[str, Workload], name: str) -> None:
    call = workloads[name]

    def twice() -> None:
        call()
        call()

    assert list(slower(ratios({name: twice}, rounds=40), committed())) == [name]


def test_only_what_is_more_than_half_as_slow_again_counts() -> None:
    assert slower({"a": 1.49, "b": 1.51, "c": 0.5}, {"a": 1.0, "b": 1.0, "c": 1.0}) == {"b": 1.51}


def test_every_workload_has_a_committed_ratio() -> None:
    assert committed().keys() == WORKLOADS.keys()
