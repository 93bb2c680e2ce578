"""Prefills with cached context through the runner, at full size with random weights: the chosen route compared with
eager.

    python -m benchmarks.cached_prefill qwen2_vl_2b [--tiny]

Each row launches one batch again and again, sampling and uploads inside: chunks of `tokens` new positions behind
`cached` ones, alone and beside decode rows. `pictures` of the new positions are of a picture, whose rows are there,
with DeepStack's features where the family has them. --tiny takes the embedded model and any device, to try the script.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.checkpoints.published import SIZES, make
from benchmarks.measure.record import Row, record
from benchmarks.measure.timing import host_milliseconds, milliseconds
from benchmarks.steps.full_size import load
from models.checkpoints.registry import family_of
from models.interfaces.media import MediaItem, PlaceholderRange, Prompt
from models.protocol import ChatModel
from service.engine.chat.runner import ChatRunner
from service.engine.chat.scheduler_output import Chunk, SamplerNeeds, Step
from service.engine.chat.sequence import ChatSequence
from service.engine.core.worker import WorkerContext
from service.engine.start import engine_stream
from service.graphs.observations import Observations
from service.graphs.pool import GraphPool
from service.hub.catalog import embedded_models
from service.link.config import EngineConfig, MixedRoute
from service.link.messages import ChatRequest, SamplingParams

PAGE_SIZE = 16
CONTEXT = 512
ROOM = 512
"""Positions of a decode row's prompt, and of the tokens that the timed launches may add."""


@dataclass(frozen=True)
class Shape:
    """chunks of `tokens` tokens each, the first `pictures` of which belong to a picture, after `cached` positions,
    together with decode_rows."""

    chunks: int
    tokens: int
    cached: int = 0
    decode_rows: int = 0
    pictures: int = 0


SHAPES = (
    Shape(1, 64),
    Shape(1, 300),
    Shape(1, 40, 700),
    Shape(1, 300, 1024),
    Shape(8, 40, 700),
    Shape(32, 40, 700),
    Shape(1, 1500),
    Shape(1, 2048, 2048),
    Shape(1, 2048, 28_000),
    Shape(1, 40, 700, 32),
    Shape(1, 300, 1024, 32),
    Shape(1, 2016, 2016, 32),
    Shape(1, 2016, 28_000, 32),
    Shape(1, 300, pictures=256),
    Shape(1, 300, 1024, pictures=256),
    Shape(4, 300, pictures=256),
    Shape(1, 300, 1024, 32, pictures=256),
)
TINY = (Shape(1, 8), Shape(2, 8, 40), Shape(1, 16, 32, 2), Shape(1, 300, 32, 2), Shape(1, 16, 32, 2, pictures=12))


class Bench:
    """One model's runner with its own pages; slots and pages are given out once."""

    def __init__(
        self, model: ChatModel, device: torch.device, mixed_route: MixedRoute, pages: int, rows: int, most_rows: int
    ) -> None:
        """most_rows: rows of one picture at most."""
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        config = EngineConfig(models=(), mixed_route=mixed_route, page_size=PAGE_SIZE, max_running=rows)
        pool = GraphPool(device, config.graph_bytes)
        context = WorkerContext(config, device, dtype, pool, Observations(), time.monotonic)
        decoder = model.decoder
        self.axes = decoder.position_axes
        self.runner = ChatRunner("model", model, decoder.vocab_size, min(32_768, decoder.max_positions), context)
        self.runner.allocate(pages, np.zeros((rows, -(-decoder.vocab_size // 32)), np.int32))
        for runner in self.runner.graphs.runners:
            while runner.capture_next(idle=True):
                pass
        if device.type == "cuda":
            deque(self.runner.warm_up(), maxlen=0)
            self.runner.measure_cached_keys()
        self.graph_bytes, self.static_bytes = pool.graph_bytes, pool.static_bytes
        self._media = torch.randn(most_rows, self.runner.embeds_width, device=device).to(dtype)
        self._slot = self._page = 0

    def sequence(self, positions: int, room: int, picture: PlaceholderRange | None = None) -> ChatSequence:
        """A slot of its own and pages for all positions, those of a picture among them."""
        ids = np.random.default_rng(positions).integers(0, 64, positions).astype(np.int32)
        axes = np.broadcast_to(np.arange(positions, dtype=np.int32), (self.axes, positions))
        runs = () if picture is None else (picture,)
        items = tuple(MediaItem("image", (), {}, 0, 1, run.length, bytes(32)) for run in runs)
        prompt = Prompt(ids, axes, positions, items, runs)
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
        return self.runner.launch(step, lambda sequence, item: self._media).route


def whole(sequence: ChatSequence) -> Chunk:
    return Chunk(sequence, 0, sequence.num_tokens, is_last=True)


def measure(bench: Bench, shape: Shape, repeats: int) -> dict[str, float | str]:
    tokens, cached = shape.tokens, shape.cached
    bench.start_over()
    decoding = [bench.sequence(CONTEXT, ROOM) for _ in range(shape.decode_rows)]
    for sequence in decoding:
        bench.launch([whole(sequence)])
    picture = PlaceholderRange(0, cached, shape.pictures) if shape.pictures else None
    sequences = [bench.sequence(cached + tokens, 1, picture) for _ in range(shape.chunks)]
    batch = [Chunk(sequence, cached, cached + tokens, is_last=True) for sequence in sequences]
    route = bench.launch(batch, decoding)
    timed = milliseconds(lambda: bench.launch(batch, decoding), repeats=repeats)
    host = host_milliseconds(lambda: bench.launch(batch, decoding))
    return {**timed, "host": host, "route": route}


def measured(
    name: str, model: ChatModel, device: torch.device, shapes: Sequence[Shape], repeats: int
) -> Iterator[tuple[Row, dict[str, Any]]]:
    most = max(each.chunks * (each.tokens + each.cached) + each.decode_rows * (CONTEXT + ROOM) for each in shapes)
    pages = most // PAGE_SIZE + 128
    slots = max(each.chunks + each.decode_rows for each in shapes)
    most_rows = max(1, *(each.pictures for each in shapes))
    routes: tuple[MixedRoute, ...] = ("auto", "eager")
    auto, eager = (Bench(model, device, route, pages, slots, most_rows) for route in routes)
    facts = {"graph_bytes": auto.graph_bytes, "static_bytes": auto.static_bytes}
    for shape in shapes:
        chosen, against = measure(auto, shape, repeats), measure(eager, shape, repeats)
        row: Row = {**asdict(shape), "model": name, "route": chosen["route"]}
        row |= {"ms": chosen["median"], "eager_ms": against["median"], "p10_ms": chosen["p10"], "p90_ms": chosen["p90"]}
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
    shapes: Sequence[Shape] = SHAPES
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
