"""Decode steps and prefills at full size with random weights: replay compared with eager and with the roofline.

python -m benchmarks.decode qwen2_vl_2b [qwen2_vl_7b minicpmv_4_5 kimi_vl_a3b qwen3_vl_4b ...]

A decode step is the whole captured step: inputs from slot state, backbone, logits, sampling, stop tokens, next inputs.
Half of the rows sample at temperature 0.7, the others are greedy.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from benchmarks.decoder_floors import decode_floor, prefill_floor
from benchmarks.full_size import captured, free, load, measure_each, show
from benchmarks.record import Row, table
from benchmarks.timing import host_milliseconds, milliseconds, spread
from models.checkpoint import Quantization
from models.layers.kv_cache import CacheSpec, PagedBatch
from models.protocol import Bucket, Decoder, Plan
from service.engine.chat.slot_state import Float, Int, SlotState
from service.engine.chat.steps import CachedPrefillStep, DecodeStep, PrefillStep, Sampling
from service.graphs.pool import GraphPool
from service.graphs.runner import GraphRunner

BATCHES = (1, 8, 32, 64, 128)
CONTEXT = 512
ROOM = 512
"""Number of positions that the timed steps may add."""
PREFILLS = (384, 1024, 2048)
MAX_CONTEXT = 32_768
PAGE_SIZE = 16
POOL_BYTES = 16 << 30


def fill(state: SlotState, rows: int) -> None:
    """Slots 1..rows as after a prefill of CONTEXT tokens, pages in a shuffled order."""
    generator = torch.Generator().manual_seed(rows)
    per_row = (CONTEXT + ROOM) // PAGE_SIZE
    pages = torch.randperm(rows * per_row, generator=generator).view(rows, per_row).int() + 1
    state.block_tables[1 : rows + 1, :per_row] = pages.to(state.block_tables.device)
    ints = torch.zeros((rows, len(Int)), dtype=torch.int64)
    ints[:, Int.TOKEN] = torch.randint(0, 1000, (rows,), generator=generator)
    ints[:, Int.LENGTH] = CONTEXT
    ints[:, Int.POSITION] = CONTEXT
    ints[:, Int.ACTIVE] = 1
    ints[:, Int.SEED] = torch.arange(rows)
    state.ints[1 : rows + 1] = ints.to(state.ints.device)
    state.floats[1 : rows + 1 : 2, Float.TEMPERATURE] = 0.7


def caches_of(specs: list[CacheSpec], rows: int, device: torch.device) -> list[dict[str, torch.Tensor]]:
    pages = rows * (CONTEXT + ROOM) // PAGE_SIZE + 1
    caches = [spec.allocate(pages, PAGE_SIZE, device, torch.bfloat16) for spec in specs]
    for cache in caches:
        for rows_of in cache.values():
            rows_of.normal_()
    return caches


def captured_decode(name: str, decoder: Decoder, rows: int, pool: GraphPool) -> tuple[GraphRunner, Plan, SlotState]:
    """One captured step of rows in the middle of their answers."""
    state = SlotState(rows, MAX_CONTEXT // PAGE_SIZE, decoder.vocab_size, pool.device)
    sampling = Sampling(decoder, state, decoder.vocab_size, full=False)
    step = DecodeStep(decoder, state, caches_of(decoder.cache_specs(), rows, pool.device), PAGE_SIZE, sampling)
    bucket: Bucket = {"rows": rows, "pages": MAX_CONTEXT // PAGE_SIZE}
    fill(state, rows)
    runner = captured(name, "decode", step, [bucket], pool)
    return runner, Plan(arrays={"slots": torch.arange(1, rows + 1).numpy()}, required=bucket), state


def measure_decode(name: str, decoder: Decoder, rows: int, pool: GraphPool) -> Row:
    runner, plan, state = captured_decode(name, decoder, rows, pool)
    graph = runner.graph_for(plan.required)
    assert graph is not None
    timings = {}
    for kind, call in (
        ("eager", lambda: runner.run(plan, eager="disabled")),
        ("replay", lambda: runner.run(plan)),
        ("graph", graph.capture.replay),
    ):
        fill(state, rows)
        timings[kind] = milliseconds(call, repeats=10 if kind == "eager" else 40)
    fill(state, rows)
    host = host_milliseconds(lambda: runner.run(plan), repeats=40)
    least = decode_floor(decoder, rows, CONTEXT) * 1e3
    return {
        "model": name,
        "kind": "decode",
        "rows": rows,
        "context": CONTEXT,
        "eager_ms": timings["eager"]["median"],
        **spread("replay", timings["replay"]),
        **spread("graph", timings["graph"]),
        "host_ms": host,
        "floor_ms": least,
        "over_floor": timings["replay"]["median"] / least,
        "graph_bytes": pool.graph_bytes,
        "static_bytes": pool.static_bytes,
    }


def captured_prefill(
    name: str, decoder: Decoder, tokens: int, pool: GraphPool, cached: int = 0
) -> tuple[GraphRunner, Plan]:
    """One captured prefill of a text of `tokens` tokens behind `cached` positions, as the engine replays it."""
    device = pool.device
    pages = -(-(cached + tokens) // PAGE_SIZE)
    caches = caches_of(decoder.cache_specs(), -(-pages * PAGE_SIZE // (CONTEXT + ROOM)), device)
    hidden = decoder.embed(torch.randint(0, 1000, (tokens,), device=device))
    sizes = PAGE_SIZE, hidden.shape[1], hidden.dtype
    required = {"tokens": tokens, "sequences": 1}
    positions = np.arange(cached, cached + tokens)
    arrays: dict[str, np.ndarray] = {
        "positions": np.tile(positions[:, None], (1, decoder.position_axes)),
        "slot_mapping": positions + PAGE_SIZE,
        "cu_seqlens": np.array([0, tokens], dtype=np.int32),
    }
    step: PrefillStep | CachedPrefillStep
    if cached:
        state = SlotState(1, pages, decoder.vocab_size, device)
        state.block_tables[1, :pages] = torch.arange(1, pages + 1, dtype=torch.int32, device=device)
        step = CachedPrefillStep(decoder, state, caches, *sizes)
        arrays |= {"slots": np.array([1]), "seq_lens": np.array([cached + tokens], dtype=np.int32)}
    else:
        step = PrefillStep(decoder, caches, *sizes)
    if decoder.feature_levels:
        required = required | {"levels": 0}
    plan = Plan(arrays, tensors={"hidden": [hidden]}, fills={"cu_seqlens": tokens}, required=required)
    return captured(name, step.name, step, [required], pool), plan


def measure_prefill(name: str, decoder: Decoder, tokens: int, pool: GraphPool) -> Row:
    """One sequence without cached context, eagerly as in the engine, replayed by the runner, and its graph alone."""
    device = pool.device
    caches = caches_of(decoder.cache_specs(), -(-(tokens + PAGE_SIZE) // (CONTEXT + ROOM)), device)
    ids = torch.randint(0, 1000, (tokens,), device=device)
    positions = torch.arange(tokens, device=device).expand(decoder.position_axes, -1)
    ends = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    slots = torch.arange(tokens, device=device) + PAGE_SIZE
    batch = PagedBatch.of_new_prompts(caches, PAGE_SIZE, slots, ends)

    def forward() -> torch.Tensor:
        return decoder.forward(decoder.embed(ids), positions, batch)

    eager = milliseconds(forward)
    host = host_milliseconds(forward)
    runner, plan = captured_prefill(name, decoder, tokens, pool)
    graph = runner.graph_for(plan.required)
    assert graph is not None
    replay = milliseconds(lambda: runner.run(plan))
    least = prefill_floor(decoder, tokens) * 1e3
    return {
        "model": name,
        "kind": "prefill",
        "rows": tokens,
        "eager_ms": eager["median"],
        "host_ms": host,
        **spread("replay", replay),
        **spread("graph", milliseconds(graph.capture.replay)),
        "floor_ms": least,
        "over_floor": replay["median"] / least,
    }


def measure(name: str, directory: Path, device: torch.device, quantization: Quantization = "none") -> list[Row]:
    decoder: Decoder = load(directory, device, quantization=quantization).decoder
    rows = []
    for batch in BATCHES:
        rows.append(show(measure_decode(name, decoder, batch, GraphPool(device, POOL_BYTES))))
        free()
    return [
        *rows,
        *(show(measure_prefill(name, decoder, tokens, GraphPool(device, POOL_BYTES))) for tokens in PREFILLS),
    ]


if __name__ == "__main__":
    print(table(measure_each("decode", sys.argv[1:] or ["qwen2_vl_2b"], measure)))
