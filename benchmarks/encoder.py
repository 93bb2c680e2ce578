"""Encoders at full size with random weights: replay compared with eager and with the roofline, and padding.
replay_ms: through the runner. graph_ms: the bare graph. general_graph_ms: the bare graph for any number of segments,
where a single picture has one of its own. plan_ms: what precedes a pass, such as the log-mel features of audio.

python -m benchmarks.encoder qwen2_vl_2b [qwen2_vl_7b minicpmv_4_6 kimi_vl_a3b qwen3_vl_4b ...]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.measure.record import Row, table
from benchmarks.measure.timing import milliseconds, spread
from benchmarks.roofline.encoders import encoder_floor
from benchmarks.steps.encoder import Work, audio, fitting_bucket, pictures, plans_of, replays_of, served_buckets, video
from benchmarks.steps.full_size import captured, load, measure_each, named_models, show
from models.checkpoints.registry import family_of, resolve
from models.interfaces.media import MediaItem
from models.protocol import VisionEncoder
from models.text.processor import ChatProcessor
from service.graphs.pool import GraphPool

POOL_BYTES = 24 << 30


_QWEN2 = [pictures(224, 224), pictures(448, 448), pictures(1024, 1024), video(16, 448, 448)]
_QWEN3 = [pictures(448, 448), pictures(640, 480), pictures(1024, 1024), pictures(1920, 1080), video(16, 448, 448)]
_AUDIO = [audio(3), audio(30), audio(120), audio(4, 8)]
_QWEN_2_5_WORK = [pictures(224, 224), *_QWEN3]

WORK: dict[str, list[Work]] = {
    "qwen2_vl_2b": _QWEN2,
    "qwen2_vl_7b": [*_QWEN2, pictures(224, 224, 8)],
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
    "minicpmv_4_6": [pictures(448, 448), pictures(1280, 720), pictures(1920, 1080), video(64, 448, 448)],
    "kimi_vl_a3b": [pictures(224, 224), pictures(448, 448), pictures(1024, 1024), pictures(224, 224, 2)],
    "qwen3_vl_2b": _QWEN3,
    "qwen3_vl_4b": _QWEN3,
    "qwen3_vl_8b": _QWEN3,
    "qwen3_vl_30b_a3b": _QWEN3,
    "qwen3_asr_0_6b": _AUDIO,
    "qwen3_asr_1_7b": _AUDIO,
}


def measure(name: str, directory: Path, device: torch.device) -> list[Row]:
    processor: ChatProcessor = resolve(family_of(directory).processor)(directory)
    encoder: VisionEncoder = load(directory, device).encoder
    pool = GraphPool(device, POOL_BYTES)
    rows = [show(measure_one(name, label, encoder, build(processor), pool)) for label, build in WORK[name]]
    return [*rows, {"model": name, "input": "graphs", "bytes": pool.graph_bytes, "static_bytes": pool.static_bytes}]


def measure_one(name: str, label: str, encoder: VisionEncoder, items: Sequence[MediaItem], pool: GraphPool) -> Row:
    plans = plans_of(encoder, items, encoder.default_buckets()[-1])
    chosen = [fitting_bucket(served_buckets(encoder, plan), plan) for plan in plans]
    runner = captured(name, "encoder", encoder, chosen, pool)
    replays = replays_of(runner, plans)
    planned = milliseconds(lambda: plans_of(encoder, items, encoder.default_buckets()[-1]), repeats=10)
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
    least = sum(encoder_floor(encoder, plan, embeds // len(plans)) for plan in plans) * 1e3
    return {
        "model": name,
        "input": label,
        "patches": real,
        "bucket": offered,
        "padding": offered / real - 1,
        "embeds": embeds,
        "plan_ms": planned["median"],
        "eager_ms": eager["median"],
        **spread("replay", replay),
        **spread("graph", graph),
        "general_graph_ms": general["median"],
        "floor_ms": least,
        "over_floor": replay["median"] / least,
    }


def main() -> None:
    rows = measure_each("encoder", named_models("benchmarks.encoder", __doc__, WORK, WORK), measure)
    print(table([row for row in rows if "graph_ms" in row]))


if __name__ == "__main__":
    main()
