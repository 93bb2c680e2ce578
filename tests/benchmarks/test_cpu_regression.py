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


@pytest.fixture(scope="module")
def endless(workloads: dict[str, Workload]) -> dict[str, Workload]:
    """Those that can be called any number of times."""
    return {name: call for name, call in workloads.items() if name != "chat_step"}


@pytest.fixture(scope="module")
def alone(endless: dict[str, Workload]) -> dict[str, float]:
    """Ratios of this machine: how far those of two processors differ is another matter."""
    return ratios(endless, rounds=40)


@pytest.mark.slow
@pytest.mark.usefixtures("workloads")
def test_nothing_became_slower() -> None:
    # What became slower is so each time, what a busy neighbour delayed is not.
    assert any(slower(ratios(build()), committed()) == {} for _ in range(3))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "chat_step"])
def test_work_done_twice_is_noticed(endless: dict[str, Workload], alone: dict[str, float], name: str) -> None:
    call = endless[name]

    def twice() -> None:
        call()
        call()

    # Beside the others, which leave the caches of the processor as cold as they are in `alone`.
    assert any(list(slower(ratios({**endless, name: twice}, rounds=40), alone)) == [name] for _ in range(3))


def test_only_what_is_more_than_half_as_slow_again_counts() -> None:
    assert slower({"a": 1.49, "b": 1.51, "c": 0.5}, {"a": 1.0, "b": 1.0, "c": 1.0}) == {"b": 1.51}


def test_every_workload_has_a_committed_ratio() -> None:
    assert committed().keys() == WORKLOADS.keys()
