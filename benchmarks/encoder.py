"""Vision encoders at full size with random weights: replay compared with eager and with the roofline, and padding.
replay_ms: through the runner. graph_ms: the bare graph. general_graph_ms: the bare graph for any number of segments,
where a single picture has one of its own.

python -m benchmarks.encoder qwen2_vl_2b [qwen2_vl_7b minicpmv_4_5 kimi_vl_a3b qwen3_vl_4b ...]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks import floors
from benchmarks.full_size import captured, load, measure_each, show
from benchmarks.record import Row, table
from benchmarks.timing import milliseconds, spread
from models.media import MediaItem, VideoFrames, VideoMetadata
from models.processor import ChatProcessor
from models.protocol import Bucket, Plan, VisionEncoder
from models.qwen3_vl.vision import Qwen3VLEncoder
from models.registry import family_of, resolve
from service.graphs.buckets import cheapest, fills
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


_QWEN3 = [pictures(448, 448), pictures(640, 480), pictures(1024, 1024), pictures(1920, 1080), video(16, 448, 448)]
_QWEN_2_5_WORK = [pictures(224, 224), *_QWEN3]

WORK: dict[str, list[Work]] = {
    "qwen2_vl_2b": [pictures(224, 224), pictures(448, 448), pictures(1024, 1024), video(16, 448, 448)],
    "qwen2_vl_7b": [
        pictures(224, 224),
        pictures(224, 224, 8),
        pictures(448, 448),
        pictures(1024, 1024),
        video(16, 448, 448),
    ],
    "qwen2_5_vl_3b": _QWEN_2_5_WORK,
    "qwen2_5_vl_7b": _QWEN_2_5_WORK,
    "minicpmv_4_5": [
        pictures(448, 448),
        pictures(640, 480),
        pictures(1280, 720),
        pictures(1920, 1080),
        pictures(1344, 1344),
        video(64, 448, 448),
    ],
    "kimi_vl_a3b": [pictures(224, 224), pictures(448, 448), pictures(1024, 1024), pictures(224, 224, 2)],
    "qwen3_vl_2b": _QWEN3,
    "qwen3_vl_4b": _QWEN3,
    "qwen3_vl_8b": _QWEN3,
    "qwen3_vl_30b_a3b": _QWEN3,
}


def floor(name: str, encoder: VisionEncoder, plan: Plan, embeds: int) -> float:
    """Roofline of a pass in seconds, from the plan's own segments. embeds: rows that the pass puts out.

    Raises ValueError for a family whose arithmetic is not in floors.py.
    """
    if isinstance(encoder, Qwen3VLEncoder):
        vision, levels = encoder.config, len(encoder.deepstack)
        sizes = vision.depth, vision.hidden_size, vision.intermediate_size, vision.out_features
        return floors.qwen3_vl_encoder(_lengths(plan, "cu_seqlens"), *sizes, levels)
    if name.startswith("qwen2_vl"):
        return floors.qwen2_vl_encoder(_lengths(plan, "cu_seqlens"), 1536 if name.endswith("2b") else 3584)
    if name.startswith("qwen2_5_vl"):
        frames, windows = _lengths(plan, "cu_seqlens"), _lengths(plan, "cu_window_seqlens")
        return floors.qwen2_5_vl_encoder(frames, windows, 2048 if name.endswith("3b") else 3584)
    if name.startswith("kimi_vl"):
        return floors.moonvit_encoder(_lengths(plan, "cu_seqlens"))
    if name.startswith("minicpmv"):
        return floors.minicpmv_encoder(_lengths(plan, "cu_slices"), embeds // 64, 64, 4096)
    raise ValueError(f"{name} has no roofline: add its family to floor of benchmarks/encoder.py")


def _lengths(plan: Plan, name: str) -> Sequence[int]:
    return [int(length) for length in np.diff(plan.arrays[name]) if length]


def measure(name: str, directory: Path, device: torch.device) -> list[Row]:
    processor: ChatProcessor = resolve(family_of(directory).processor)(directory)
    encoder: VisionEncoder = load(directory, device).encoder
    pool = GraphPool(device, POOL_BYTES)
    rows = [show(measure_one(name, label, encoder, build(processor), pool)) for label, build in WORK[name]]
    return [*rows, {"model": name, "input": "graphs", "bytes": pool.graph_bytes, "static_bytes": pool.static_bytes}]


def plans_of(encoder: VisionEncoder, items: Sequence[MediaItem], largest: Bucket) -> list[Plan]:
    """All items in one plan, or each part in its own plan if an item is too large for the `largest` bucket."""
    parts = [part for item in items for part in encoder.split(item, largest)]
    groups = [parts] if len(parts) == len(items) else [[part] for part in parts]
    return [encoder.plan(group) for group in groups]


def measure_one(name: str, label: str, encoder: VisionEncoder, items: Sequence[MediaItem], pool: GraphPool) -> Row:
    plans = plans_of(encoder, items, encoder.default_buckets()[-1])
    chosen = [fitting_bucket(served_buckets(encoder, plan), plan) for plan in plans]
    runner = captured(name, "encoder", encoder, chosen, pool)
    replays = replays_of(runner, plans)
    eager = milliseconds(lambda: [runner.run(plan, eager="disabled") for plan in plans], repeats=10)
    replay = milliseconds(lambda: [runner.run(plan) for plan in plans])
    graph = milliseconds(lambda: [each() for each in replays])
    general = graph
    if any(bucket not in encoder.default_buckets() for bucket in chosen):
        other = captured(name, "encoder", encoder, [fitting_bucket(encoder.default_buckets(), p) for p in plans], pool)
        others = replays_of(other, plans)
        for plan in plans:
            other.run(plan)
        general = milliseconds(lambda: [each() for each in others])
    real = sum(plan.required["patches"] for plan in plans)
    offered = sum(bucket["patches"] for bucket in chosen)
    embeds = sum(item.num_embeds for item in items)
    least = sum(floor(name, encoder, plan, embeds // len(plans)) for plan in plans) * 1e3
    return {
        "model": name,
        "input": label,
        "patches": real,
        "bucket": offered,
        "padding": offered / real - 1,
        "embeds": embeds,
        "eager_ms": eager["median"],
        **spread("replay", replay),
        **spread("graph", graph),
        "general_graph_ms": general["median"],
        "floor_ms": least,
        "over_floor": replay["median"] / least,
    }


def replays_of(runner: GraphRunner, plans: Sequence[Plan]) -> list[Callable[[], None]]:
    return [found.capture.replay for plan in plans if (found := runner.graph_for(plan.required)) is not None]


def served_buckets(encoder: VisionEncoder, plan: Plan) -> list[Bucket]:
    """Those that a server would choose from for the plan, those for a single segment included."""
    general = encoder.default_buckets()
    single = [bucket for bucket in encoder.one_segment_buckets(general) if fills(bucket, plan.required)]
    return [*general, *single]


def fitting_bucket(buckets: Sequence[Bucket], plan: Plan) -> Bucket:
    """The bucket that the server would replay."""
    found = cheapest(buckets, plan.required)
    assert found is not None, f"no bucket holds {plan.required}"
    return found


if __name__ == "__main__":
    print(table([row for row in measure_each("encoder", sys.argv[1:] or list(WORK), measure) if "graph_ms" in row]))
