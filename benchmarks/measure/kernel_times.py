"""Times of the kernels of captured work by a profiler's trace: by name and grid, and in groups."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.measure.record import Row

REPLAYS = 6
GAP_US = 200.0
"""A longer pause separates two replays."""
KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
GROUPS = {
    "attention": (
        r"sdpa|flash|fmha|_(varlen|decode|combine|paged_prefill|prefill_combine|local_attention|lengthen)_kernel"
    ),
    "adapters": r"^_(shrink|expand)_kernel",
    "GEMMs": r"gemm|gemv|nvjet|cutlass|cublas|splitK|linear_kernel",
    "norms and rotation": r"norm_kernel|rotary|rotate|_latent_kernel",
}
"""What the names of kernels contain; the first match counts, without one a kernel belongs to the rest."""
REST = "rest"


def group_of(kernel: str) -> str:
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, kernel)), REST)


def grouped(rows: Iterable[Row]) -> dict[str, float]:
    """Milliseconds of a replay for each group of kernels, and of all."""
    totals = dict.fromkeys((*GROUPS, REST), 0.0)
    for row in rows:
        totals[group_of(row["kernel"])] += row["all_us"] / 1e3
    return {**{group: total for group, total in totals.items() if total}, "all": sum(totals.values())}


def by_kernel(events: Iterable[dict[str, Any]], replays: int) -> list[Row]:
    """Events of a Chrome trace (ts and dur in us) -> for each kernel and grid the number of its calls in a replay, the
    microseconds from the end of the previous kernel to the end of one call, and those of all calls; the most expensive
    first."""
    groups: dict[tuple[str, str], list[float]] = {}
    last = None
    for event in sorted((e for e in events if e.get("cat") in KINDS), key=lambda e: e["ts"] + e["dur"]):
        end = event["ts"] + event["dur"]
        took = event["dur"] if last is None or end - last > GAP_US else end - last
        last = end
        groups.setdefault((event["name"], str(event["args"].get("grid", ""))), []).append(took)
    rows = [
        {
            "kernel": name,
            "grid": grid,
            "calls": len(times) / replays,
            "each_us": sum(times) / len(times),
            "all_us": sum(times) / replays,
        }
        for (name, grid), times in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["all_us"])


def traced(call: Callable[[], object]) -> list[Row]:
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPLAYS):
            call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return by_kernel(json.loads(path.read_text())["traceEvents"], REPLAYS)
