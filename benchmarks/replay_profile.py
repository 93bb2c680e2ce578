"""Where the time of a captured step goes: its kernels by name and grid, and how much later each ended than the one
before, so that what runs side by side is not counted twice.

    python -m benchmarks.replay_profile qwen2_vl_2b 1 8 32                          decode steps of so many rows
    python -m benchmarks.replay_profile voxcpm2 64 --lora 11                        rows of 11 adapters
    python -m benchmarks.replay_profile qwen3_vl_8b --encoder 448 640x480 16f       pictures, and a video of 16 frames
    python -m benchmarks.replay_profile qwen2_vl_2b --prefill 384 1024 40+700       40 tokens behind 700 cached ones
    python -m benchmarks.replay_profile qwen2_vl_7b 1 384 --quantization fp8        weights in e4m3

Every size has a file of its own, replay_profile_MODEL_..._SIZE.json: its kernels as rows, `groups_ms` for kinds of
kernels together, and `replay_ms`, the time of the step through the runner without a profiler.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.checkpoints.published import make
from benchmarks.measure.command_line import command_line
from benchmarks.measure.kernel_times import grouped, traced
from benchmarks.measure.record import table, write
from benchmarks.measure.timing import milliseconds
from benchmarks.steps import decoder, encoder, speech
from benchmarks.steps.full_size import captured, free, load
from models.checkpoints.checkpoint import Quantization
from models.checkpoints.registry import family_of, resolve
from models.protocol import VisionEncoder
from models.text.processor import ChatProcessor
from service.engine.start import engine_stream
from service.graphs.pool import GraphPool
from service.graphs.runner import Run

POOL_BYTES = 24 << 30
SIDE = 448
"""Of a square picture in a video."""
RANK = 32


Step = Callable[[], list[Run]]


def decode_step(name: str, model: Any, size: str, pool: GraphPool) -> Step:
    """Of `size` rows in the middle of their answers or utterances."""
    if name == speech.MODEL:
        runner, plan, _ = speech.captured_decode(model, int(size), pool)
    else:
        runner, plan, _ = decoder.captured_decode(name, model.decoder, int(size), pool)
    return lambda: [runner.run(plan)]


def adapted_step(name: str, model: Any, size: str, pool: GraphPool, *, adapters: int) -> Step:
    """Of `size` streams that have so many adapters."""
    bank = speech.filled_bank(model, RANK, pool.device)
    runner, plan, _ = speech.captured_decode(model, int(size), pool, bank)
    adapted = speech.with_adapters(plan, adapters)
    return lambda: [runner.run(adapted)]


def prefill_step(name: str, model: Any, size: str, pool: GraphPool) -> Step:
    """TOKENS, or TOKENS+CACHED behind so many cached ones."""
    tokens, _, cached = size.partition("+")
    runner, plan = decoder.captured_prefill(name, model.decoder, int(tokens), pool, int(cached or 0))
    return lambda: [runner.run(plan)]


def encoder_pass(name: str, model: Any, size: str, pool: GraphPool, *, directory: Path) -> Step:
    """A picture of SIDE or WIDTHxHEIGHT, or a video of FRAMESf."""
    processor: ChatProcessor = resolve(family_of(directory).processor)(directory)
    tower: VisionEncoder = model.encoder
    if size.endswith("f"):
        _, build = encoder.video(int(size[:-1]), SIDE, SIDE)
    else:
        width, _, height = size.partition("x")
        _, build = encoder.pictures(int(width), int(height or width))
    plans = encoder.plans_of(tower, build(processor), tower.default_buckets()[-1])
    buckets = [encoder.fitting_bucket(encoder.served_buckets(tower, plan), plan) for plan in plans]
    distinct = [bucket for index, bucket in enumerate(buckets) if bucket not in buckets[:index]]
    runner = captured(name, "encoder", tower, distinct, pool)
    return lambda: [runner.run(plan) for plan in plans]


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line("benchmarks.replay_profile", __doc__)
    parser.add_argument("model")
    parser.add_argument("sizes", nargs="*")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--encoder", action="store_true")
    kind.add_argument("--prefill", action="store_true")
    kind.add_argument("--lora", type=int, metavar="ADAPTERS")
    parser.add_argument("--quantization", choices=get_args(Quantization), default="none")
    return parser.parse_intermixed_args(words)


def way_of(
    given: argparse.Namespace, directory: Path
) -> tuple[str, list[str], Callable[[str, Any, str, GraphPool], Step]]:
    """Beginning of the results' names, the usual sizes, and what makes a step."""
    quantized = "" if given.quantization == "none" else f"_{given.quantization}"
    name = f"replay_profile_{given.model}{quantized}"
    if given.encoder:
        return f"{name}_encoder", ["448"], partial(encoder_pass, directory=directory)
    if given.prefill:
        return f"{name}_prefill", ["384", "1024"], prefill_step
    if given.lora is not None:
        return f"{name}_lora_{given.lora}", ["64"], partial(adapted_step, adapters=given.lora)
    return name, ["1", "8", "32"], decode_step


@torch.inference_mode()
def main(words: Sequence[str] | None = None) -> None:
    given = arguments_of(words)
    device = torch.device("cuda", 0)
    with tempfile.TemporaryDirectory() as folder, engine_stream(device):
        directory = make(given.model, Path(folder))
        model = load(directory, device, quantization=given.quantization)
        result, usual, step = way_of(given, directory)
        for size in given.sizes or usual:
            call = step(given.model, model, size, GraphPool(device, POOL_BYTES))
            taken = milliseconds(call)["median"]
            rows = traced(call)
            groups = grouped(rows)
            print(f"{given.model}, {size}: {taken:.3f} ms a replay, {sum(row['calls'] for row in rows):.0f} kernels")
            print(table([groups]))
            print(table([row | {"kernel": row["kernel"][:60]} for row in rows]), flush=True)
            facts = {"model": given.model, "size": size, "replay_ms": taken, "groups_ms": groups}
            write(f"{result}_{size.replace('+', '_behind_')}", rows, **facts)
            del call
            free()


if __name__ == "__main__":
    main()
