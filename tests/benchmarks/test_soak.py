"""What a soak calls left over."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.servers.footprint import Footprint
from benchmarks.soak import GROWTH_BYTES, faults

MIB = 1 << 20


def state(threads: int = 58, megabytes: int = 200, descriptors: int = 24, tasks: int = 7) -> Footprint:
    return Footprint(
        processes={"api": 1},
        descriptors={"api": descriptors},
        threads={"api": threads},
        resident_bytes={"api": megabytes * MIB},
        files=frozenset(),
        busy=(),
        tasks=tasks,
    )


def found(samples: Sequence[Footprint]) -> list[str]:
    return faults(state(), samples, samples[-1])


def test_a_pool_that_fills_late_is_no_leak() -> None:
    filling = [58, 58, 59, 60, 60, 60, 61, 61, 62, 62, 62, 62]
    assert found([state(threads=count) for count in filling]) == []


def test_threads_that_keep_coming_are_a_leak() -> None:
    (said,) = found([state(threads=58 + index) for index in range(12)])
    assert said == "threads of api: 59.5 -> 67.5"


@pytest.mark.parametrize(("megabytes", "number"), [(200, 0), (200 + 20 + (GROWTH_BYTES >> 20), 0), (280, 1)])
def test_resident_memory_may_grow_a_little(megabytes: int, number: int) -> None:
    assert len(found([state()] * 4 + [state(megabytes=megabytes)] * 4)) == number


def test_what_is_held_at_the_end_is_named() -> None:
    assert faults(state(), [state()] * 3, state(descriptors=25, tasks=9)) == [
        "descriptors of api: 24 -> 25",
        "tasks: 7 -> 9",
    ]
