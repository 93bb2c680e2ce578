"""Servers on a GPU of 8, 12 and 16 GiB, which a larger one is made into.

    python -m benchmarks.small_gpu MODEL [--expandable-segments]

This process takes the rest of the GPU's memory, so that a server that wants more than the small one has runs out of it,
as it would there; the engine is told the small GPU's size. Full size in the published layout, random weights read from
disk where there is a writer of them. Each server answers many requests at once, then pictures of 2048 x 2048 or long
texts, then one picture of the largest size that the processor does not shrink. That may be too large for the GPU:
`largest_refusals` says how it was refused. `free_bytes_least`: of the small GPU's memory, seen every POLL_SECONDS from
the server's start to its end; that of a load ends with it. The row also has what the log says of memory
(benchmarks.servers.memory_log). --expandable-segments: with that setting of PyTorch's allocator, whose segments grow.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoints.published import make
from benchmarks.checkpoints.served import served_directory
from benchmarks.checkpoints.weights import can_write, write_weights
from benchmarks.measure.record import Row, record
from benchmarks.servers.memory_log import memory_facts
from benchmarks.servers.own_engine import serve_with
from benchmarks.servers.process import Server, random_weights, serve
from service.cli.bench.run import run_load, summary
from service.cli.bench.spec import AnyLoad, ChatLoad, Record, SpeechLoad
from service.engine import start
from service.link.config import Channel, EngineConfig

ENTRY = "benchmarks.small_gpu:engine"
GPU_BYTES = "SMALL_GPU_BYTES"
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
GIB = 1 << 30
SHARE = 0.97
"""Of the GiB in a GPU's name that the driver gives to programs."""
POLL_SECONDS = 0.02
STREAMS = 64
SPEECH = "voxcpm2"


@dataclass(frozen=True)
class Case:
    """gib: in the name of the GPU."""

    gib: int
    model: str
    quantization: str = "none"


CASES = (
    Case(8, "qwen2_vl_2b"),
    Case(8, "qwen3_vl_2b"),
    Case(8, SPEECH),
    Case(12, "qwen2_5_vl_3b"),
    Case(16, "qwen3_vl_4b"),
    Case(16, "qwen2_vl_7b", "fp8"),
)


class _SmallProperties:
    """torch.cuda.get_device_properties of the GPU, but for its size."""

    def __init__(self, properties: Any, num_bytes: int) -> None:
        self._properties = properties
        self.total_memory = num_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._properties, name)


def shrink(num_bytes: int) -> None:
    """Makes torch say in this process that its GPU has `num_bytes`."""
    free_and_total, properties = torch.cuda.mem_get_info, torch.cuda.get_device_properties
    torch.cuda.mem_get_info = lambda *device: (min(num_bytes, free_and_total(*device)[0]), num_bytes)
    torch.cuda.get_device_properties = lambda *device: _SmallProperties(properties(*device), num_bytes)  # type: ignore[assignment]


def engine(config: EngineConfig, channel: Channel) -> None:
    """An EngineEntry."""
    shrink(int(os.environ[GPU_BYTES]))
    start.serve(config, channel)


@contextmanager
def rest_taken(num_bytes: int) -> Iterator[None]:
    """Takes the first GPU's memory but for `num_bytes`."""
    torch.cuda.empty_cache()
    taken = torch.empty(torch.cuda.mem_get_info(0)[0] - num_bytes, dtype=torch.uint8, device="cuda:0")
    try:
        yield
    finally:
        del taken
        torch.cuda.empty_cache()


@contextmanager
def least_free() -> Iterator[Callable[[], int]]:
    """The least free memory of the first GPU that was seen so far, in bytes."""
    seen, ended = [torch.cuda.mem_get_info(0)[0]], threading.Event()

    def poll() -> None:
        while not ended.wait(POLL_SECONDS):
            seen[0] = min(seen[0], torch.cuda.mem_get_info(0)[0])

    watcher = threading.Thread(target=poll)
    watcher.start()
    try:
        yield lambda: seen[0]
    finally:
        ended.set()
        watcher.join()


def largest_side(directory: Path) -> int:
    """Pixels along the side of the largest square picture that a checkpoint's processor leaves as it is."""
    settings = json.loads((directory / "preprocessor_config.json").read_text())
    return math.isqrt(settings.get("max_pixels") or settings["size"]["longest_edge"])


def loads(server: Server, model: str, directory: Path) -> Iterator[tuple[str, AnyLoad]]:
    """What is asked of a server, one load after the other, and the name of each. directory: of its checkpoint."""
    common: dict[str, Any] = {"url": server.url, "model": server.models()[0], "warmup": 0}
    if model == SPEECH:
        yield "speech", SpeechLoad(**common, requests=2 * STREAMS, seed=1, concurrency=STREAMS, seconds=10)
        yield "long", SpeechLoad(**common, requests=8, seed=2, concurrency=8, text_words=150, seconds=60)
        return
    chat: dict[str, Any] = {"text_characters": 0, "text_words": 128, "output_tokens": 128}
    yield "chat", ChatLoad(**common, **chat, requests=2 * STREAMS, seed=1, concurrency=STREAMS)
    yield "large", ChatLoad(**common, **chat, requests=8, seed=2, concurrency=4, width=2048, height=2048)
    side = largest_side(directory)
    yield "largest", ChatLoad(**common, **chat, requests=1, seed=3, concurrency=1, width=side, height=side)


def counts(load: AnyLoad, records: list[Record]) -> Row:
    """What became of a load's requests. refusals: number by status and the server's words."""
    found = summary(load, records)
    refusals = Counter(f"{record.status}: {record.message}" for record in records if record.error == "refused")
    return {
        **{key: found[key] for key in ("requests", "succeeded", "refused", "failed")},
        "refusals": dict(refusals),
        "failures": found.get("failures", {}),
        "wall_s": found.get("wall_seconds"),
        "prompt_tokens": found.get("prompt_tokens_mean"),
    }


def measure(case: Case, folder: Path, environment: Mapping[str, str]) -> Row:
    """environment: further variables of the server."""
    directory = make(case.model, folder) if case.model == SPEECH else served_directory(case.model, folder)
    written = can_write(directory)
    if written:
        write_weights(directory)
    flags = ["--model", str(directory)] if written else random_weights([directory])
    num_bytes = round(SHARE * case.gib * GIB)
    row: Row = {"gib": case.gib, "model": case.model, "quantization": case.quantization, "gpu_bytes": num_bytes}
    with (
        rest_taken(num_bytes),
        least_free() as free,
        serve(
            *flags,
            *("--quantization", case.quantization, "--api-processes", "1"),  # Several start the package's own engine.
            environment={GPU_BYTES: str(num_bytes), **environment},
            program=("benchmarks.small_gpu", "serve"),
        ) as server,
    ):
        server.wait_until_idle()
        row |= {"ready_s": server.ready_seconds, "captures": server.samples("reprise_graph_captures_total", "outcome")}
        row |= {"free_bytes_least_idle": free(), "pages": server.samples("reprise_kv_cache_pages", "state")}
        for name, load in loads(server, case.model, directory):
            found = counts(load, run_load(load)) | {"free_bytes_least": free()}
            row |= {f"{name}_{key}": value for key, value in found.items()}
        facts = server.facts()
        row |= {name: facts[name] for name in ("steps", "preemptions", "graph_bytes", "gpu_memory_bytes")}
        log = server.log.read_text()
        row |= {"memory_retries": server.samples("reprise_memory_retries_total", "kind", "outcome")}
        return row | {"free_bytes_least": free(), "out_of_memory": log.count("out of memory")} | memory_facts(log)


def row_of(case: Case, folder: Path, environment: Mapping[str, str]) -> Row:
    """What was measured; of a server that did not start its log's end."""
    try:
        return measure(case, folder, environment)
    except RuntimeError as error:
        found = {"gib": case.gib, "model": case.model, "quantization": case.quantization}
        return {**found, "error": str(error)[-2000:]}


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.small_gpu", description=__doc__)
    parser.add_argument("model", choices=[case.model for case in CASES])
    parser.add_argument("--expandable-segments", action="store_true")
    chosen = parser.parse_args(words)
    name, environment = f"small_gpu_{chosen.model}", dict[str, str]()
    if chosen.expandable_segments:
        name, environment = f"{name}_expandable_segments", EXPANDABLE
    with tempfile.TemporaryDirectory() as folder:
        (case,) = (case for case in CASES if case.model == chosen.model)
        return record(name, [(row_of(case, Path(folder), environment), {})])


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve_with(ENTRY, sys.argv[2:])
    else:
        main()
