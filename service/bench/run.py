"""Runs a load with client processes of their own and sums up what they saw."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np

from service.bench.spec import AnyLoad, Assignment, Record

PREPARATION_SECONDS = 3.0

Report = Callable[[Record], None]


class BenchError(Exception):
    """A client process failed; its own words are on standard error."""


def run_load(
    load: AnyLoad,
    *,
    processes: int = 1,
    preparation: float = PREPARATION_SECONDS,
    report: Report = lambda record: None,
) -> list[Record]:
    """Every process prepares its requests within `preparation` seconds, then all begin together.

    report: called with each measured record as it comes, in threads. Raises BenchError.
    """
    if load.warmup:
        warm = msgspec.structs.replace(load, requests=load.warmup, concurrency=1, rate=0.0, warmup=0)
        _run_process(Assignment(warm, time.time(), load.seed + 1_000_003, 1, load.warmup), lambda record: None)
    processes = max(1, min(processes, load.requests, load.concurrency or load.requests))
    begin = time.time() + preparation
    arrivals = _poisson_arrivals(load) if load.rate else None
    assignments = []
    for index in range(processes):
        offsets = tuple(float(t) for t in arrivals[index::processes]) if arrivals is not None else ()
        count = len(range(index, load.requests, processes))
        lanes = len(range(index, load.concurrency, processes))
        assignments.append(Assignment(load, begin, load.seed * 1009 + index, lanes, count, offsets))
    with ThreadPoolExecutor(processes) as pool:
        shares = list(pool.map(lambda assignment: _run_process(assignment, report), assignments))
    return sorted((record for share in shares for record in share), key=lambda record: record.start)


def _poisson_arrivals(load: AnyLoad) -> np.ndarray:
    """Seconds after the beginning, [requests]."""
    return np.cumsum(np.random.default_rng(load.seed).exponential(1 / load.rate, load.requests))


def _run_process(assignment: Assignment, report: Report) -> list[Record]:
    command = [sys.executable, "-m", "service.bench.client"]
    records = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(assignment))
            process.stdin.close()
            for line in process.stdout:
                records.append(msgspec.json.decode(line, type=Record))
                report(records[-1])
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise BenchError(f"a load client ended with status {process.returncode}")
    return records


def summary(load: AnyLoad, records: list[Record]) -> dict[str, Any]:
    """Counts, rates and quantiles (seconds) over the successful requests, plus every kind of failure."""
    good = [record for record in records if not record.error]
    result: dict[str, Any] = {
        "load": msgspec.to_builtins(msgspec.structs.replace(load, api_key=None)),
        "requests": len(records),
        "succeeded": len(good),
        "refused": sum(record.error == "refused" for record in records),
        "failed": sum(record.error == "failed" for record in records),
    }
    if not good:
        return result
    wall = max(r.start + r.duration for r in good) - min(r.start for r in good)
    result |= {
        "wall_seconds": wall,
        "requests_per_second": len(good) / wall,
        "first": _quantiles([r.first for r in good]),
        "duration": _quantiles([r.duration for r in good]),
        "gap": _quantiles([gap for r in good for gap in r.gaps]),
        "cached_tokens": sum(r.cached_tokens for r in good),
    }
    if load.rate:
        result["delay"] = _quantiles([r.delay for r in good])
    if any(r.tokens for r in good):
        result["tokens_per_second"] = sum(r.tokens for r in good) / wall
        result["prompt_tokens_mean"] = float(np.mean([r.prompt_tokens for r in good]))
        result["completion_tokens_mean"] = float(np.mean([r.tokens for r in good]))
    if any(r.audio for r in good):
        result["audio_seconds"] = sum(r.audio for r in good)
        result["audio_seconds_per_second"] = result["audio_seconds"] / wall
        result["realtime_factor"] = _quantiles([r.duration / r.audio for r in good if r.audio])
        result["streams_with_underrun"] = sum(r.underrun > 0 for r in good)
        result["underrun_seconds"] = sum(r.underrun for r in good)
    return result


def _quantiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    p10, p50, p90, p95, p99 = np.quantile(values, (0.1, 0.5, 0.9, 0.95, 0.99))
    return {
        "mean": float(np.mean(values)),
        "p10": float(p10),
        "p50": float(p50),
        "p90": float(p90),
        "p95": float(p95),
        "p99": float(p99),
        "max": float(np.max(values)),
    }
