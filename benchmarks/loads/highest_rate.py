"""The highest rate that a server sustains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks.measure.record import Row


def highest(
    measure: Callable[[float], Row], sustained: Callable[[Row], bool], rates: Sequence[float], resolution: float
) -> Iterator[Row]:
    """Rows as they are measured, each with `sustained`: first the rates in order up to the first one that is not
    sustained, then bisection of the gap below it until it is at most `resolution`."""

    def judged(rate: float) -> Row:
        row = measure(rate)
        return {**row, "sustained": bool(row["succeeded"]) and sustained(row)}

    low = 0.0
    for high in rates:
        row = judged(high)
        yield row
        if not row["sustained"]:
            break
        low = high
    else:
        return
    while high - low > resolution:
        middle = (low + high) / 2
        row = judged(middle)
        yield row
        low, high = (middle, high) if row["sustained"] else (low, middle)
