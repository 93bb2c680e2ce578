"""Times of kernels under CUDA-graph replay, over rotating inputs, written as JSON with what they ran on."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.measure.record import commit


class WrongResult(Exception):
    """A variant gives a wrong result."""


FAILURES = (OutOfResources, WrongResult, RuntimeError)
"""Errors of one variant (RuntimeError: those of CUDA and Triton); the others are still measured."""
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


@dataclass(frozen=True)
class Case:
    """One measurement: `make` builds the inputs and returns what to time; `floor_us` is what the bytes or operations
    need at the measured rates of the card."""

    group: str
    shape: str
    variant: str
    make: Callable[[], Run]
    floor_us: float | None = None
    calls: int = 32


@dataclass(frozen=True)
class Row:
    group: str
    shape: str
    variant: str
    median_us: float
    spread_us: float
    floor_us: float | None


def named(load: Callable[[], list[Case]], name: str) -> list[Case]:
    """The cases of a group, or of the shapes that begin with `name`."""
    found = load()
    chosen = [case for case in found if case.group == name or case.shape.startswith(name)]
    if not chosen:
        raise ValueError(f"no group {name!r} among {list(dict.fromkeys(case.group for case in found))}, and no shape")
    return chosen


def _compile(cases: Sequence[Case]) -> None:
    for case in cases:
        with suppress(*FAILURES):
            case.make()(0)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def compile_all(load: Callable[[], list[Case]], workers: int = 12) -> None:
    """Run every case once, in several processes, so that Triton's cache on disk holds every kernel."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile_share, [load] * workers, range(workers), [workers] * workers))


def _compile_share(load: Callable[[], list[Case]], index: int, count: int) -> None:
    _compile(load()[index::count])


def measure(cases: Iterable[Case]) -> list[Row]:
    rows = []
    for case in cases:
        try:
            median, spread = replay_us(case.make(), case.calls)
        except FAILURES as error:
            print(f"{case.group:14} {case.shape:34} {case.variant:22} {error}")
            continue
        row = Row(case.group, case.shape, case.variant, round(median, 2), round(spread, 2), case.floor_us)
        rows.append(row)
        floor = "" if row.floor_us is None else f" {row.floor_us:8.2f}"
        print(f"{row.group:14} {row.shape:34} {row.variant:32} {row.median_us:9.2f} +-{row.spread_us:5.2f}{floor}")
        torch.cuda.empty_cache()
    return rows


def hardware() -> dict[str, str]:
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "matmul": f"allow_tf32={torch.backends.cuda.matmul.allow_tf32}, "
        f"cudnn.allow_tf32={torch.backends.cudnn.allow_tf32}, bf16 reduced-precision reduction "
        f"{torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction}",
    }


def write(name: str, rows: Sequence[Row], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    report = {"hardware": hardware(), "unit": "us per call, median of graph replays", "rows": [asdict(r) for r in rows]}
    (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
