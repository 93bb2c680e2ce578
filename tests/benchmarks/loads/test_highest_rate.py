"""The search for the highest rate."""

from __future__ import annotations

from typing import Any

from benchmarks.loads.highest_rate import highest


def test_the_highest_rate_is_searched_between_holding_and_not() -> None:
    asked: list[float] = []

    def measure(rate: float) -> dict[str, Any]:
        asked.append(rate)
        return {"rate": rate, "succeeded": 1}

    rows = list(highest(measure, lambda row: row["rate"] <= 33, (20, 40, 60), 5))
    assert asked == [20, 40, 30, 35]
    assert [(row["rate"], row["sustained"]) for row in rows] == [(20, True), (40, False), (30, True), (35, False)]
    (row,) = highest(lambda rate: {"rate": rate, "succeeded": 0}, lambda row: True, (1.0,), 1.0)
    assert row["sustained"] is False
