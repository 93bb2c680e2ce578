"""Decode steps and prefills at full size with random weights: replay compared with eager and with the roofline.

python -m benchmarks.decode qwen2_vl_2b [qwen2_vl_7b minicpmv_4_5 kimi_vl_a3b qwen3_vl_4b ...]

A decode step is the whole captured step: inputs from slot state, backbone, logits, sampling, stop tokens, next inputs.
Half of the rows sample at temperature 0.7, the others are greedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.checkpoints.published import SIZES
from benchmarks.measure.record import Row, table
from benchmarks.measure.timing import host_milliseconds, milliseconds, spread
from benchmarks.roofline.decoders import decode_floor, prefill_floor
from benchmarks.steps.decoder import CONTEXT, POOL_BYTES, captured_decode, captured_prefill, fill
from benchmarks.steps.full_size import free, load, measure_each, named_models, show
from models.checkpoints.checkpoint import Quantization
from models.protocol import Decoder
from service.graphs.pool import GraphPool

BATCHES = (1, 8, 32, 64, 128)
PREFILLS = (384, 1024, 2048)


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


def measure_prefill(name: str, decoder: Decoder, tokens: int, pool: GraphPool) -> Row:
    """One sequence without cached context: eager, replayed by the runner, and its graph alone."""
    runner, plan = captured_prefill(name, decoder, tokens, pool)
    graph = runner.graph_for(plan.required)
    assert graph is not None
    eager = milliseconds(lambda: runner.run(plan, eager="disabled"))
    host = host_milliseconds(lambda: runner.run(plan, eager="disabled"))
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


def measure(
    name: str,
    directory: Path,
    device: torch.device,
    quantization: Quantization = "none",
    batches: Sequence[int] = (),
    prefills: Sequence[int] = (),
) -> list[Row]:
    """Empty sequences are BATCHES and PREFILLS."""
    decoder: Decoder = load(directory, device, quantization=quantization).decoder
    rows = []
    for batch in batches or BATCHES:
        rows.append(show(measure_decode(name, decoder, batch, GraphPool(device, POOL_BYTES))))
        free()
    for tokens in prefills or PREFILLS:
        rows.append(show(measure_prefill(name, decoder, tokens, GraphPool(device, POOL_BYTES))))
    return rows


def main() -> None:
    chat = [name for name in SIZES if name != "voxcpm2"]
    names = named_models("benchmarks.decode", __doc__, chat, ["qwen2_vl_2b"])
    print(table(measure_each("decode", names, measure)))


if __name__ == "__main__":
    main()
