"""The highest rate that a server sustains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]


def highest(
    measure: Callable[[float], Row], sustained: Callable[[Row], bool], rates: Sequence[float], resolution: float
) -> list[Row]:
    """Rows by rate, each with `sustained`: the rates one after the other up to the first that is not sustained, then
    halvings of the gap below it until it is at most `resolution`."""
    rows: list[Row] = []

    def holds(rate: float) -> bool:
        row = measure(rate)
        row["sustained"] = bool(row["succeeded"]) and sustained(row)
        rows.append(row)
        return bool(row["sustained"])

    low = 0.0
    for high in rates:
        if not holds(high):
            break
        low = high
    else:
        return rows
    while high - low > resolution:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return sorted(rows, key=lambda row: row["rate"])
