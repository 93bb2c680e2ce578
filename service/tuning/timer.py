"""Times a computation on the GPU as the engine runs it, replayed in a captured graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

Run = Callable[[int], object]
"""Runs once on input set number i (modulo the number of sets)."""

_REPEATS = 15


def replay_us(run: Run, calls: int) -> tuple[float, float]:
    """Median and spread (max - min without the extremes) of one call's microseconds inside a graph of `calls` calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for index in range(3):
            run(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            run(index)
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(_REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    times.sort()
    inner = times[1:-1]
    return statistics.median(times), inner[-1] - inner[0]
