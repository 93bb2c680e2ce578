"""Where the time of a captured step goes: its kernels by name and grid, and how much later each ended than the one
before, so that what runs side by side is not counted twice.

python -m benchmarks.replay_profile voxcpm2|qwen2_vl_2b|... [ROWS ...]
python -m benchmarks.replay_profile qwen2_vl_2b|minicpmv_4_5|kimi_vl_a3b --encoder [SIDE ...]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import decode, encoder, speech_steps
from benchmarks.checkpoints import make
from benchmarks.full_size import captured, load
from benchmarks.record import Row, table, write
from benchmarks.timing import milliseconds
from models.registry import family_of, resolve
from service.engine.start import engine_stream
from service.graphs.pool import GraphPool

POOL_BYTES = 24 << 30
REPLAYS = 6
GAP_US = 200.0
"""A longer pause separates two replays."""
KINDS = ("kernel", "gpu_memcpy", "gpu_memset")


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


def steps(
    name: str, directory: Path, model: Any, sizes: list[int], pool: GraphPool, *, encodes: bool
) -> Iterator[tuple[int, Callable[[], object]]]:
    """The call for each size: a decode step of that many rows, or the encoder on a square of that side."""
    for size in sizes:
        if encodes:
            processor = resolve(family_of(directory).processor)(directory)
            _, build = encoder.pictures(size, size)
            plan = model.encoder.plan(build(processor))
            bucket = encoder.fitting_bucket(encoder.served_buckets(model.encoder, plan), plan)
            runner = captured(name, "encoder", model.encoder, [bucket], pool)
        elif name == speech_steps.MODEL:
            runner, plan, _ = speech_steps.captured_decode(model, size, pool)
        else:
            runner, plan, _ = decode.captured_decode(name, model.decoder, size, pool)
        yield size, partial(runner.run, plan)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay_profile", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("sizes", nargs="*", type=int)
    parser.add_argument("--encoder", action="store_true")
    arguments = parser.parse_intermixed_args()
    name, encodes = arguments.model, arguments.encoder
    device = torch.device("cuda", 0)
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, engine_stream(device):
        directory = make(name, Path(folder))
        model, pool = load(directory, device), GraphPool(device, POOL_BYTES)
        sizes = arguments.sizes or ([448] if encodes else [1, 8, 32])
        for size, call in steps(name, directory, model, sizes, pool, encodes=encodes):
            whole = milliseconds(call)["median"] * 1e3
            rows = traced(call)
            print(f"{name}, {size}: {whole:.0f} us a replay, {sum(row['calls'] for row in rows):.0f} kernels")
            print(table([row | {"kernel": row["kernel"][:60]} for row in rows]), flush=True)
            found += [{"size": size, "replay_us": whole, **row} for row in rows]
    write(f"replay_profile_{name}{'_encoder' if encodes else ''}", found)


if __name__ == "__main__":
    main()
