"""Which streams take part in a decode step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from service.engine.speech.forecast import Forecast
from service.engine.speech.stream import Stream


def most_urgent(ready: Sequence[Stream], slacks: Mapping[Stream, float]) -> Stream:
    """Whose number of solver steps the next decode step has."""

    def rank(stream: Stream) -> tuple[bool, float, float]:
        return (not stream.waits_for_first_patch, slacks.get(stream, math.inf), stream.last_launch)

    return min(ready, key=rank)


def choose_rows(
    group: Sequence[Stream],
    slacks: Mapping[Stream, float],
    forecast: Forecast,
    *,
    horizon: float,
    far_ahead: float,
    cheapest: bool,
    background: bool,
    room_wanted: bool,
    prefill_before: float,
) -> tuple[Stream, ...]:
    """Streams of one number of solver steps, in the bucket with most rows per second. First patches and streams with
    less slack than `horizon` are always among them, as far as the largest bucket holds them.

    far_ahead: streams with more slack come after those without a live listener. room_wanted: streams with enough slack
    are ordered by the patches they have left, so that one ends soon. cheapest: only rows that need the step take part.
    background: streams without a live listener come before all others.
    prefill_before: seconds of the prefill right before this step, which count with it: prompts come between decode
    steps however large these are.
    """

    def rank(stream: Stream) -> tuple[int, float]:
        if stream.waits_for_first_patch:
            return (0, -math.inf)
        slack = slacks.get(stream, 0.0) if stream.live else math.inf
        if background and not stream.live:
            return (-1, stream.last_launch)
        if slack < horizon:
            return (0, slack)
        if room_wanted:
            return (1, forecast.patches_left(stream))
        if stream.live:
            return (3 if slack > far_ahead else 1, slack)
        return (2, stream.last_launch)

    solver_steps, buckets = group[0].solver_steps, forecast.buckets
    ranked = sorted(group, key=rank)
    most = min(len(group), buckets[-1])
    urgent = min(most, max(1, sum(rank(stream)[0] <= 0 for stream in group)))
    counts = sorted({*(bucket for bucket in buckets if urgent <= bucket <= most), most})

    def rows_per_second(count: int) -> float:
        return count / (prefill_before + forecast.decode(solver_steps, count))

    return tuple(ranked[: counts[0] if cheapest else max(counts, key=rows_per_second)])
