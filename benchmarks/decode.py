"""Decode steps and prefills at full size with random weights: replay against eager and against the floor.

python -m benchmarks.decode qwen2_vl_2b [qwen2_vl_7b minicpmv_4_5 kimi_vl_a3b]

A decode step is the whole recorded step: inputs from slot state, backbone, logits, choice, stop, next inputs. Half of
the rows sample at temperature 0.7, the others are greedy.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import floors
from benchmarks.checkpoints import make
from benchmarks.record import table, write
from benchmarks.timing import milliseconds
from models.layers.kv_cache import CacheSpec, PagedBatch
from models.layers.moe import Experts
from models.protocol import Capacity, ChatModel, Decoder, Plan
from models.registry import family_of, resolve
from service.engine.decode_step import DecodeStep, Sampling
from service.engine.engine import engine_stream
from service.engine.slot_state import Float, Int, SlotState
from service.graphs.accounting import Observations
from service.graphs.pool import GraphPool
from service.graphs.runner import GraphRunner

BATCHES = (1, 8, 32, 64, 128)
CONTEXT = 512
ROOM = 512
"""Positions that the timed steps may add."""
PREFILLS = (384, 1024, 2048)
MAX_CONTEXT = 32_768
PAGE_SIZE = 16
POOL_BYTES = 16 << 30
EXPERTS_PER_TOKEN = 6


def floor(decoder: Decoder, rows: int) -> float:
    """Seconds: every weight that `rows` tokens touch, and their keys and values, read once."""
    assert isinstance(decoder, nn.Module)
    experts = {id(p) for m in decoder.modules() if isinstance(m, Experts) for p in m.parameters()}
    num_bytes = 0.0
    for name, parameter in decoder.named_parameters():
        if name == "embed_tokens.weight" and getattr(decoder, "head", None) is not None:
            continue
        share = 1.0
        if id(parameter) in experts:
            share = 1 - (1 - EXPERTS_PER_TOKEN / parameter.shape[0]) ** rows
        num_bytes += share * parameter.numel() * parameter.element_size()
    cache = sum(spec.bytes_per_token(torch.bfloat16) for spec in decoder.cache_specs())
    return (num_bytes + rows * CONTEXT * cache) / floors.BYTES


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


def recorded_decode(name: str, decoder: Decoder, rows: int, pool: GraphPool) -> tuple[GraphRunner, Plan, SlotState]:
    """One recorded step of rows in the middle of their answers."""
    state = SlotState(rows, MAX_CONTEXT // PAGE_SIZE, decoder.vocab_size, pool.device)
    sampling = Sampling(decoder, state, decoder.vocab_size, full=False)
    step = DecodeStep(decoder, state, caches_of(decoder.cache_specs(), rows, pool.device), PAGE_SIZE, sampling)
    capacity: Capacity = {"rows": rows, "pages": MAX_CONTEXT // PAGE_SIZE}
    runner = GraphRunner(name, "decode", step, [capacity], pool, Observations())
    fill(state, rows)
    while runner.capture_next(idle=False):
        pass
    return runner, Plan(arrays={"slots": torch.arange(1, rows + 1).numpy()}, needs=capacity), state


def measure_decode(name: str, decoder: Decoder, rows: int, pool: GraphPool) -> dict[str, Any]:
    runner, plan, state = recorded_decode(name, decoder, rows, pool)
    (bucket,) = [runner.bucket_for(plan.needs)]
    assert bucket is not None, "the decode step could not be recorded"
    timings = {}
    for kind, call in (
        ("eager", lambda: runner.run(plan, eager="disabled")),
        ("replay", lambda: runner.run(plan)),
        ("graph", bucket.recording.replay),
    ):
        fill(state, rows)
        timings[kind] = milliseconds(call, repeats=10 if kind == "eager" else 40)
    fill(state, rows)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(40):
        runner.run(plan)
    host = (time.perf_counter() - begin) / 40 * 1e3
    torch.cuda.synchronize()
    least = floor(decoder, rows) * 1e3
    return {
        "model": name,
        "kind": "decode",
        "rows": rows,
        "context": CONTEXT,
        "eager_ms": timings["eager"]["median"],
        "replay_ms": timings["replay"]["median"],
        "graph_ms": timings["graph"]["median"],
        "graph_p10_ms": timings["graph"]["p10"],
        "graph_p90_ms": timings["graph"]["p90"],
        "host_ms": host,
        "floor_ms": least,
        "over_floor": timings["graph"]["median"] / least,
        "graph_bytes": pool.graph_bytes,
        "static_bytes": pool.static_bytes,
    }


def measure_prefill(name: str, decoder: Decoder, tokens: int, device: torch.device) -> dict[str, Any]:
    """One sequence without a past, eager as the engine runs it, and the same launches replayed."""
    caches = caches_of(decoder.cache_specs(), -(-tokens // (CONTEXT + ROOM)), device)
    ids = torch.randint(0, 1000, (tokens,), device=device)
    positions = torch.arange(tokens, device=device).expand(decoder.position_axes, -1)
    ends = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    batch = PagedBatch(
        caches=caches,
        page_size=PAGE_SIZE,
        slot_mapping=torch.arange(tokens, device=device) + PAGE_SIZE,
        num_decode_rows=0,
        cu_seqlens_q=ends,
        cu_seqlens_k=ends,
        max_seqlen_q=tokens,
        max_seqlen_k=tokens,
    )

    def forward() -> torch.Tensor:
        return decoder.forward(decoder.embed(ids), positions, batch)

    eager = milliseconds(forward)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(5):
        forward()
    host = (time.perf_counter() - begin) / 5 * 1e3
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(device), capture_error_mode="thread_local"):
        forward()
    replay = milliseconds(graph.replay)
    return {
        "model": name,
        "kind": "prefill",
        "rows": tokens,
        "eager_ms": eager["median"],
        "host_ms": host,
        "graph_ms": replay["median"],
        "graph_p10_ms": replay["p10"],
        "graph_p90_ms": replay["p90"],
    }


def measure(name: str, directory: Path, device: torch.device) -> list[dict[str, Any]]:
    model: ChatModel = resolve(family_of(directory).model)(directory, device, torch.bfloat16, "random")
    rows = []
    for batch in BATCHES:
        rows.append(measure_decode(name, model.decoder, batch, GraphPool(device, POOL_BYTES)))
        print(table(rows[-1:]), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    for tokens in PREFILLS:
        rows.append(measure_prefill(name, model.decoder, tokens, device))
        print(table(rows[-1:]), flush=True)
    return rows


@torch.inference_mode()
def main() -> None:
    names = sys.argv[1:] or ["qwen2_vl_2b"]
    device = torch.device("cuda", 0)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, engine_stream(device):
        for name in names:
            rows += measure(name, make(name, Path(folder)), device)
            gc.collect()
            torch.cuda.empty_cache()
            write(f"decode_{'_'.join(names)}", rows)
    print(table(rows))


if __name__ == "__main__":
    main()
