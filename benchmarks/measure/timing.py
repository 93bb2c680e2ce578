"""Times of work that is launched from Python: on the device by CUDA events around each call, and on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def milliseconds(call: Callable[[], object], *, repeats: int = 20, warm_up: int = 3) -> dict[str, float]:
    """Median and spread (10th to 90th percentile) of one call; on a CPU by the wall clock."""
    for _ in range(warm_up):
        call()
    times = [_once(call) for _ in range(repeats)]
    ordered = sorted(times)
    return {
        "median": statistics.median(times),
        "p10": ordered[len(ordered) // 10],
        "p90": ordered[(9 * len(ordered)) // 10],
    }


def spread(name: str, taken: dict[str, float]) -> dict[str, float]:
    """What `milliseconds` gives, as fields of a row."""
    return {f"{name}{key}_ms": taken[of] for key, of in (("", "median"), ("_p10", "p10"), ("_p90", "p90"))}


def host_milliseconds(call: Callable[[], object], *, repeats: int = 5) -> float:
    """Mean time until one call returns, whatever it has launched: what a step costs the host."""
    _wait_for_device()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    taken = time.perf_counter() - begin
    _wait_for_device()
    return taken / repeats * 1e3


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _once(call: Callable[[], object]) -> float:
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
