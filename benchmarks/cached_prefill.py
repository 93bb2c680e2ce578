"""Prefills with cached context through the runner, at full size with random weights: the chosen route beside eager.

    python -m benchmarks.cached_prefill qwen2_vl_2b [--tiny]

Each row launches one batch again and again, sampling and uploads inside: chunks of `tokens` new positions behind
`cached` ones, alone and beside decode rows. --tiny takes the embedded model and any device, to try the script.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.checkpoints import SIZES, make
from benchmarks.full_size import load
from benchmarks.record import Row, record
from benchmarks.timing import host_milliseconds, milliseconds
from models.media import Prompt
from models.protocol import ChatModel
from models.registry import family_of
from service.catalog import embedded_models
from service.engine.chat.runner import ChatRunner
from service.engine.chat.scheduler import Chunk, SamplerNeeds, Step
from service.engine.chat.sequence import ChatSequence
from service.engine.start import engine_stream
from service.engine.worker import WorkerContext
from service.graphs.observations import Observations
from service.graphs.pool import GraphPool
from service.link.config import EngineConfig, MixedRoute
from service.link.messages import ChatRequest, SamplingParams

PAGE_SIZE = 16
CONTEXT = 512
ROOM = 512
"""Positions of a decode row's prompt, and those that the timed launches may add."""
SHAPES = (
    # Chunks, new positions of each, cached ones of each, decode rows beside them.
    (1, 64, 0, 0),
    (1, 300, 0, 0),
    (1, 40, 700, 0),
    (1, 300, 1024, 0),
    (8, 40, 700, 0),
    (32, 40, 700, 0),
    (1, 1500, 0, 0),
    (1, 2048, 2048, 0),
    (1, 2048, 28_000, 0),
    (1, 40, 700, 32),
    (1, 300, 1024, 32),
    (1, 2016, 2016, 32),
    (1, 2016, 28_000, 32),
)
TINY = ((1, 8, 0, 0), (2, 8, 40, 0), (1, 16, 32, 2), (1, 300, 32, 2))


class Bench:
    """One model's runner over pages of its own; slots and pages are given out once."""

    def __init__(self, model: ChatModel, device: torch.device, mixed_route: MixedRoute, pages: int, rows: int) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        config = EngineConfig(models=(), mixed_route=mixed_route, page_size=PAGE_SIZE, max_running=rows)
        pool = GraphPool(device, config.graph_memory)
        context = WorkerContext(config, device, dtype, pool, Observations(), time.monotonic)
        decoder = model.decoder
        self.axes = decoder.position_axes
        self.runner = ChatRunner("model", model, decoder.vocab_size, min(32_768, decoder.max_positions), context)
        self.runner.allocate(pages, np.zeros((rows, -(-decoder.vocab_size // 32)), np.int32))
        for runner in self.runner.graph_runners:
            while runner.capture_next(idle=True):
                pass
        if device.type == "cuda":
            self.runner.warm_up()
        self.graph_bytes, self.static_bytes = pool.graph_bytes, pool.static_bytes
        self._slot = self._page = 0

    def sequence(self, positions: int, room: int) -> ChatSequence:
        """A slot of its own and pages for all positions."""
        ids = np.random.default_rng(positions).integers(0, 64, positions).astype(np.int32)
        prompt = Prompt(ids, np.broadcast_to(np.arange(positions, dtype=np.int32), (self.axes, positions)), positions)
        params = SamplingParams(max_tokens=room, temperature=0.0)
        made = ChatSequence(ChatRequest(str(self._slot), "model", prompt, params, 0.0), room, PAGE_SIZE)
        count = -(-(positions + room) // PAGE_SIZE)
        self._slot += 1
        made.slot, made.pages = self._slot, list(range(self._page + 1, self._page + 1 + count))
        self._page += count
        return made

    def start_over(self) -> None:
        self._slot = self._page = 0

    def launch(self, chunks: Sequence[Chunk], rows: Sequence[ChatSequence] = ()) -> str:
        slots = np.array([sequence.slot for sequence in rows], dtype=np.int64)
        pages = (CONTEXT + ROOM) // PAGE_SIZE
        greedy = SamplerNeeds(full=False, logprobs=None, guided=False)
        step = Step(slots, tuple(rows), pages if rows else 0, tuple(chunks), (), greedy)
        return self.runner.launch(step, _no_media).route


def _no_media(sequence: ChatSequence, item: int) -> torch.Tensor:
    raise AssertionError("these prompts have no pictures")


def whole(sequence: ChatSequence) -> Chunk:
    return Chunk(sequence, 0, sequence.num_tokens, is_last=True)


def measure(bench: Bench, shape: tuple[int, int, int, int], repeats: int) -> dict[str, float | str]:
    chunks, tokens, cached, rows = shape
    bench.start_over()
    decoding = [bench.sequence(CONTEXT, ROOM) for _ in range(rows)]
    for sequence in decoding:
        bench.launch([whole(sequence)])
    sequences = [bench.sequence(cached + tokens, 1) for _ in range(chunks)]
    batch = [Chunk(sequence, cached, cached + tokens, is_last=True) for sequence in sequences]
    route = bench.launch(batch, decoding)
    timed = milliseconds(lambda: bench.launch(batch, decoding), repeats=repeats)
    host = host_milliseconds(lambda: bench.launch(batch, decoding))
    return {**timed, "host": host, "route": route}


def measured(
    name: str, model: ChatModel, device: torch.device, shapes: Sequence[tuple[int, int, int, int]], repeats: int
) -> Iterator[tuple[Row, dict[str, Any]]]:
    most = max(c * (n + k) + r * (CONTEXT + ROOM) for c, n, k, r in shapes)
    pages = most // PAGE_SIZE + 128
    slots = max(chunks + rows for chunks, _, _, rows in shapes)
    routes: tuple[MixedRoute, ...] = ("auto", "eager")
    auto, eager = (Bench(model, device, route, pages, slots) for route in routes)
    facts = {"graph_bytes": auto.graph_bytes, "static_bytes": auto.static_bytes}
    for shape in shapes:
        chosen, against = measure(auto, shape, repeats), measure(eager, shape, repeats)
        row: Row = dict(zip(("chunks", "tokens", "cached", "decode_rows"), shape, strict=True))
        row |= {"model": name, "route": chosen["route"], "ms": chosen["median"], "eager_ms": against["median"]}
        row |= {"p10_ms": chosen["p10"], "p90_ms": chosen["p90"]}
        yield row | {"host_ms": chosen["host"], "eager_host_ms": against["host"]}, facts


@torch.inference_mode()
def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cached_prefill", description=__doc__)
    parser.add_argument("model", nargs="?", default="qwen2_vl_2b", choices=[n for n in SIZES if n != "voxcpm2"])
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args(words)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name, repeats = arguments.model, 20
    shapes: Sequence[tuple[int, int, int, int]] = SHAPES
    with tempfile.TemporaryDirectory() as folder, engine_stream(device):
        if arguments.tiny:
            name, shapes, repeats = "tiny", TINY, 3
            directory = next(Path(path) for path in embedded_models() if family_of(Path(path)).kind == "chat")
        else:
            directory = make(name, Path(folder))
        model: ChatModel = load(directory, device, dtype)
        return record(f"cached_prefill_{name}", measured(name, model, device, shapes, repeats), model=name)


if __name__ == "__main__":
    main()
