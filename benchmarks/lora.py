"""VoxCPM2 at full size with random weights: the decode step of rows with adapters, compared with rows without.

python -m benchmarks.lora [--rank 32] [ROWS ...]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.checkpoints.published import make
from benchmarks.measure.record import Row, table, write
from benchmarks.measure.timing import milliseconds
from benchmarks.steps.full_size import captured, free, load, show
from benchmarks.steps.speech import CONTEXT, MODEL, PAGE_SIZE, caches_of, filled_bank, live_state, with_adapters
from models.interfaces.capturable import Plan
from models.layers.adapters import LoraBank
from models.protocol import SpeechModel
from service.engine.start import engine_stream
from service.graphs.pool import GraphPool

ROWS = (1, 8, 64)
ADAPTERS = (0, 1, 11, 32)
RUNS = 5
REPEATS = 20


def measure(model: SpeechModel, bank: LoraBank, rows: int, pool: GraphPool) -> list[Row]:
    """One state for all variants, which take turns in each run."""
    state, steps = live_state(model, rows, pool.device), model.solver_steps[0]
    caches = caches_of(model, rows, pool.device)
    required = {"rows": rows}
    plain = captured(MODEL, "decode", model.decode_step(steps, state, caches, PAGE_SIZE), [required], pool)
    adapted = captured(MODEL, "decode", model.decode_step(steps, state, caches, PAGE_SIZE, bank), [required], pool)
    slots = {"slots": np.arange(1, rows + 1, dtype=np.int64)}
    variants = {"base graph": (plain, Plan(slots, required))}
    for distinct in ADAPTERS:
        if distinct <= rows:
            variants[f"{distinct} adapters"] = adapted, with_adapters(Plan(slots, required), distinct)
    medians: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(RUNS):
        for name, (runner, plan) in variants.items():
            state["length"].fill_(CONTEXT)
            medians[name].append(milliseconds(lambda r=runner, p=plan: r.run(p), repeats=REPEATS)["median"])  # type: ignore[misc]
    base = statistics.median(medians["base graph"])
    return [
        show(
            {
                "streams": rows,
                "variant": name,
                "rank": bank.layout.rank,
                "decode_ms": (median := statistics.median(taken)),
                "least_ms": min(taken),
                "most_ms": max(taken),
                "over_base": median / base - 1,
                "bank_bytes": bank.table.numel() * bank.table.element_size(),
                "graph_bytes": pool.graph_bytes,
            }
        )
        for name, taken in medians.items()
    ]


def load_ms(bank: LoraBank) -> float:
    """One adapter from pinned memory into its slot."""
    host = torch.zeros(bank.layout.size, dtype=torch.bfloat16).pin_memory()
    return milliseconds(lambda: bank.table[0].copy_(host, non_blocking=True))["median"]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lora", description=__doc__)
    parser.add_argument("rows", nargs="*", type=int, default=list(ROWS), metavar="ROWS")
    parser.add_argument("--rank", type=int, default=32)
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    name = "lora" if arguments.rank == 32 else f"lora_rank_{arguments.rank}"
    with tempfile.TemporaryDirectory() as folder, engine_stream(device):
        model: SpeechModel = load(make(MODEL, Path(folder)), device)
        bank = filled_bank(model, arguments.rank, device)
        rows: list[Row] = []
        for count in sorted(arguments.rows, reverse=True):
            rows = measure(model, bank, count, GraphPool(device, 24 << 30)) + rows
            free()
            write(name, rows, adapter_load_ms=load_ms(bank))
    print(table(rows))


if __name__ == "__main__":
    main()
