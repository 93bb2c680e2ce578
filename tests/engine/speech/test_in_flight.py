"""When the next step may be chosen, on a clock that only the tests move."""

from __future__ import annotations

from typing import Any, cast

import pytest

from service.engine.speech.runner import Launch
from service.engine.speech.worker import LEAD, MAX_IN_FLIGHT, InFlight


class Results:
    def __init__(self) -> None:
        self.arrived = False

    def ready(self) -> bool:
        return self.arrived


def launched(rows: int) -> Launch:
    row = cast(Any, (None, 0))
    return Launch([row] * rows, cast(Any, Results()), "decode", "replay")


def arrive(step: Launch) -> None:
    cast(Any, step.readback).arrived = True


def read(flights: InFlight, rows: int, seconds: float) -> None:
    """One step of so many rows, whose results take this long to be read and sent."""
    step = launched(rows)
    flights.add(step, 0.0, 0.0)
    arrive(step)
    assert flights.pop(0.0) is step
    flights.note_read(seconds)


def test_the_next_step_is_chosen_shortly_before_the_running_one_ends() -> None:
    flights = InFlight(lambda: 0.0, on_gpu=True)
    assert flights.has_room and flights.near_end(0.0) and flights.backlog(0.0) == 0.0
    flights.add(launched(4), 0.0, 0.020)
    assert flights.has_room and not flights.near_end(0.015) and flights.near_end(0.020 - LEAD)
    flights.add(launched(4), 0.016, 0.020)
    assert not flights.has_room and flights.backlog(0.016) == pytest.approx(0.024)


def test_a_prefill_without_results_leaves_room_for_the_step_behind_it() -> None:
    flights = InFlight(lambda: 0.0, on_gpu=True)
    flights.add(launched(64), 0.0, 0.020)
    flights.add(launched(0), 0.016, 0.005)
    assert flights.has_room
    flights.add(launched(64), 0.017, 0.020)
    assert not flights.has_room and len(flights) == MAX_IN_FLIGHT + 1
    idle = InFlight(lambda: 0.0, on_gpu=True)
    for _ in range(MAX_IN_FLIGHT + 1):
        assert idle.has_room
        idle.add(launched(0), 0.0, 0.001)
    assert not idle.has_room


@pytest.mark.parametrize("rows, soon", [(256, True), (16, False)])
def test_a_step_behind_a_prefill_is_chosen_before_results_that_take_longer_to_read(rows: int, soon: bool) -> None:
    flights = InFlight(lambda: 0.0, on_gpu=True)
    for _ in range(100):
        read(flights, 256, 0.0128)
    flights.add(launched(rows), 0.0, 0.040)
    assert not flights.near_end(0.030)  # Nothing is behind it: late arrivals may still take part.
    flights.add(launched(0), 0.036, 0.006)
    assert flights.near_end(0.036) == soon
    assert flights.near_end(0.042)


def test_results_are_taken_in_order_and_correct_when_the_gpu_is_free() -> None:
    flights = InFlight(lambda: 0.0, on_gpu=True)
    first, second = launched(2), launched(2)
    flights.add(first, 0.0, 0.020)
    flights.add(second, 0.0, 0.010)
    arrive(second)
    assert flights.pop(0.005) is None and flights.oldest is first
    arrive(first)
    assert flights.pop(0.012) is first and flights.free_at == pytest.approx(0.022)
    assert flights.pop(0.013) is second and flights.free_at == pytest.approx(0.013)
    assert flights.pop(0.014) is None and not flights and flights.backlog(0.0) == 0.0


def test_on_a_cpu_a_launch_is_done_when_it_returns() -> None:
    clock = [5.0]
    flights = InFlight(lambda: clock[0], on_gpu=False)
    flights.add(launched(1), 4.0, 9.0)
    assert flights.free_at == 5.0 and flights.near_end(4.0)
