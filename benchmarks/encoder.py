"""Vision encoders at full size with random weights: replay against eager and against the floor, padding waste.

python -m benchmarks.encoder qwen2_vl_2b [qwen2_vl_7b minicpmv_4_5 kimi_vl_a3b]
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks import floors
from benchmarks.checkpoints import make
from benchmarks.record import table, write
from benchmarks.timing import milliseconds
from models.media import MediaItem, VideoFrames, VideoMetadata
from models.processor import ChatProcessor
from models.protocol import Capacity, ChatModel, Plan, VisionEncoder
from models.registry import family_of, resolve
from service.engine.engine import engine_stream
from service.graphs.accounting import Observations
from service.graphs.buckets import cheapest
from service.graphs.pool import GraphPool
from service.graphs.runner import GraphRunner

POOL_BYTES = 24 << 30
Work = tuple[str, Callable[[ChatProcessor], list[MediaItem]]]


def pictures(width: int, height: int, count: int = 1) -> Work:
    def build(processor: ChatProcessor) -> list[MediaItem]:
        rng = np.random.default_rng(width * 7 + height + count)
        arrays = [rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for _ in range(count)]
        return [processor.image(Image.fromarray(array)) for array in arrays]

    return f"{count} x " * (count > 1) + f"{width}x{height}", build


def video(frames: int, width: int, height: int, fps: float = 2.0) -> Work:
    def build(processor: ChatProcessor) -> list[MediaItem]:
        rng = np.random.default_rng(frames)
        pictures = tuple(rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for _ in range(frames))
        times = tuple(index / fps for index in range(frames))
        metadata = VideoMetadata(num_frames=frames, fps=fps, duration=frames / fps, height=height, width=width)
        return [processor.video(VideoFrames(pictures, tuple(range(frames)), times, metadata, requested_fps=fps))]

    return f"{frames} frames {width}x{height}", build


WORK: dict[str, list[Work]] = {
    "qwen2_vl_2b": [pictures(224, 224), pictures(448, 448), pictures(1024, 1024), video(16, 448, 448)],
    "qwen2_vl_7b": [
        pictures(224, 224),
        pictures(224, 224, 8),
        pictures(448, 448),
        pictures(1024, 1024),
        video(16, 448, 448),
    ],
    "minicpmv_4_5": [
        pictures(448, 448),
        pictures(640, 480),
        pictures(1280, 720),
        pictures(1920, 1080),
        pictures(1344, 1344),
        video(64, 448, 448),
    ],
    "kimi_vl_a3b": [pictures(224, 224), pictures(448, 448), pictures(1024, 1024), pictures(224, 224, 2)],
}


def floor(name: str, plan: Plan, embeds: int) -> float:
    """Seconds, from the plan's own segments."""
    if name.startswith("qwen2_vl"):
        return floors.qwen2_vl_encoder(_lengths(plan, "cu_seqlens"), 1536 if name.endswith("2b") else 3584)
    if name.startswith("kimi_vl"):
        return floors.moonvit_encoder(_lengths(plan, "cu_seqlens"))
    return floors.minicpmv_encoder(_lengths(plan, "cu_slices"), embeds // 64, 64, 4096)


def _lengths(plan: Plan, name: str) -> Sequence[int]:
    return [int(length) for length in np.diff(plan.arrays[name]) if length]


def measure(name: str, directory: Path, device: torch.device) -> list[dict[str, Any]]:
    family = family_of(directory)
    processor: ChatProcessor = resolve(family.processor)(directory)
    model: ChatModel = resolve(family.model)(directory, device, torch.bfloat16, "random")
    encoder = model.encoder
    pool = GraphPool(device, POOL_BYTES)
    work = [(label, build(processor)) for label, build in WORK[name]]
    ladder = encoder.default_ladder()
    rows = [_measure_one(name, label, encoder, items, pool, ladder) for label, items in work]
    return [*rows, {"model": name, "input": "graphs", "bytes": pool.graph_bytes, "static_bytes": pool.static_bytes}]


def _measure_one(
    name: str,
    label: str,
    encoder: VisionEncoder,
    items: list[MediaItem],
    pool: GraphPool,
    ladder: Sequence[Capacity],
) -> dict[str, Any]:
    parts = [part for item in items for part in encoder.split(item, ladder[-1])]
    groups = [parts] if len(parts) == len(items) else [[part] for part in parts]
    plans = [encoder.plan(group) for group in groups]
    chosen = [rung(ladder, plan) for plan in plans]
    runner = GraphRunner(name, "encoder", encoder, chosen, pool, Observations())
    while runner.capture_next(idle=False):
        pass
    eager = milliseconds(lambda: [runner.run(plan, eager="disabled") for plan in plans], repeats=10)
    replay = milliseconds(lambda: [runner.run(plan) for plan in plans])
    recordings = [bucket.recording for plan in plans if (bucket := runner.bucket_for(plan.needs)) is not None]
    assert len(recordings) == len(plans), f"{label}: a bucket could not be recorded"
    graph = milliseconds(lambda: [recording.replay() for recording in recordings])
    real = sum(plan.needs["patches"] for plan in plans)
    offered = sum(capacity["patches"] for capacity in chosen)
    embeds = sum(item.num_embeds for item in items)
    least = sum(floor(name, plan, embeds // len(plans)) for plan in plans) * 1e3
    row = {
        "model": name,
        "input": label,
        "patches": real,
        "bucket": offered,
        "waste": offered / real - 1,
        "embeds": embeds,
        "eager_ms": eager["median"],
        "replay_ms": replay["median"],
        "graph_ms": graph["median"],
        "graph_p10_ms": graph["p10"],
        "graph_p90_ms": graph["p90"],
        "floor_ms": least,
        "over_floor": graph["median"] / least,
    }
    print(table([row]), flush=True)
    return row


def rung(ladder: Sequence[Capacity], plan: Plan) -> Capacity:
    """The bucket that the server would replay."""
    found = cheapest(ladder, plan.needs)
    assert found is not None, f"no bucket holds {plan.needs}"
    return found


@torch.inference_mode()
def main() -> None:
    names = sys.argv[1:] or list(WORK)
    device = torch.device("cuda", 0)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, engine_stream(device):
        for name in names:
            rows += measure(name, make(name, Path(folder)), device)
            gc.collect()
            torch.cuda.empty_cache()
            write(f"encoder_{'_'.join(names)}", rows)
    print(table([row for row in rows if "graph_ms" in row]))


if __name__ == "__main__":
    main()
