"""The sampler of a decode step alone, over a vocabulary of published size: the cost of each parameter of a request.

    python -m benchmarks.sampler            # on a GPU, or on a CPU with fewer rows
    python -m benchmarks.sampler --rows 64 --vocabulary 151936

A captured sampling step is replayed over logits that stand in for a model's: the product with the output embedding is
not part of it. `plain` is the sampler of rows without penalties and filters, all others are the full one, which a batch
uses if any of its rows needs it. floor_ms: the time to read the logits once.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.measure.record import Row, write
from benchmarks.measure.timing import milliseconds
from benchmarks.roofline import h100
from benchmarks.steps.full_size import captured, show
from models.interfaces.capturable import Plan
from models.protocol import Decoder
from service.engine.chat.slot_state import FloatColumn, IntColumn, SlotState
from service.engine.chat.steps import SampleStep, Sampling
from service.engine.start import engine_stream
from service.graphs.pool import GraphPool
from service.graphs.runner import GraphRunner

VOCABULARY = 151_936
"""Vocabulary of the Qwen families."""
ROWS = {"cuda": (1, 8, 32, 64, 128), "cpu": (1, 8)}
POOL_BYTES = 8 << 30
SPREAD = 3.0
"""Standard deviation of the logits. With it top_p 0.8 keeps a few thousand tokens, the hard case for the search."""


@dataclass(frozen=True)
class Parameters:
    """Parameters of every row of a batch. full: the sampler with penalties and filters."""

    full: bool
    floats: Mapping[FloatColumn, float] = field(default_factory=dict)
    top_k: int = 0


HOT = {FloatColumn.TEMPERATURE: 0.7}
CASES: dict[str, Parameters] = {
    "plain, greedy": Parameters(full=False),
    "plain, temperature": Parameters(full=False, floats=HOT),
    "no filter": Parameters(full=True, floats=HOT),
    "top_k 50": Parameters(full=True, floats=HOT, top_k=50),
    "top_p 0.8": Parameters(full=True, floats={**HOT, FloatColumn.TOP_P: 0.8}),
    "top_k 100, top_p 0.8": Parameters(full=True, floats={**HOT, FloatColumn.TOP_P: 0.8}, top_k=100),
    "min_p 0.05": Parameters(full=True, floats={**HOT, FloatColumn.MIN_P: 0.05}),
    "penalties": Parameters(full=True, floats={**HOT, FloatColumn.REPETITION: 1.05, FloatColumn.PRESENCE: 0.5}),
    "all": Parameters(
        full=True,
        floats={
            **HOT,
            FloatColumn.TOP_P: 0.8,
            FloatColumn.MIN_P: 0.01,
            FloatColumn.REPETITION: 1.05,
            FloatColumn.PRESENCE: 0.5,
        },
        top_k=100,
    ),
}
"""MiniCPM-V's makers recommend top_k 100 with top_p 0.8 and a repetition penalty of 1.05."""


class GivenLogits:
    """Replaces a decoder: the rows to be sampled are logits already."""

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def prepared(
    parameters: Parameters, rows: int, vocabulary: int, device: torch.device
) -> tuple[GraphRunner, Plan, SlotState]:
    """A captured step of `rows` rows, and its inputs."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    state = SlotState(rows, 1, vocabulary, device)
    fill(state, parameters, rows)
    sampling = Sampling(cast(Decoder, GivenLogits()), state, vocabulary, full=parameters.full)
    step = SampleStep(sampling, vocabulary, dtype)
    runner = captured("sampler", step.name, step, [{"rows": rows}], GraphPool(device, POOL_BYTES))
    fill(state, parameters, rows)
    generator = torch.Generator().manual_seed(rows)
    logits = (SPREAD * torch.randn(rows, vocabulary, generator=generator)).to(device, dtype)
    slots = torch.arange(1, rows + 1).numpy()
    return runner, Plan(arrays={"slots": slots}, tensors={"hidden": [logits]}, required={"rows": rows}), state


def fill(state: SlotState, parameters: Parameters, rows: int) -> None:
    """Slots 1..rows in the middle of their answers."""
    state.output_counts.zero_()
    state.ints[1 : rows + 1, IntColumn.ACTIVE] = 1
    state.ints[1 : rows + 1, IntColumn.SEED] = torch.arange(rows, device=state.ints.device)
    state.ints[1 : rows + 1, IntColumn.TOP_K] = parameters.top_k
    for column, value in parameters.floats.items():
        state.floats[1 : rows + 1, column] = value


def measure(name: str, rows: int, vocabulary: int, device: torch.device) -> Row:
    runner, plan, _ = prepared(CASES[name], rows, vocabulary, device)
    graph = runner.graph_for(plan.required)
    assert graph is not None
    runner.run(plan)  # its logits are in the static buffers now
    replay = milliseconds(graph.capture.replay, repeats=40 if device.type == "cuda" else 10)
    row: Row = {"case": name, "rows": rows, "vocabulary": vocabulary, "graph_ms": replay["median"]}
    row |= {"graph_p10_ms": replay["p10"], "graph_p90_ms": replay["p90"]}
    if device.type == "cuda":
        row["floor_ms"] = 1e3 * rows * vocabulary * 2 / h100.BYTES
    return row


@torch.inference_mode()
def measured(batches: Sequence[int], vocabulary: int, device: torch.device) -> Iterator[Row]:
    with engine_stream(device) if device.type == "cuda" else nullcontext():
        for rows in batches:
            for name in CASES:
                yield show(measure(name, rows, vocabulary, device))


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sampler", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", help="of a batch, instead of the usual ones")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    options = parser.parse_args(words)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    facts: dict[str, Any] = {"threads": torch.get_num_threads()} if device.type == "cpu" else {}
    rows = list(measured(options.rows or ROWS[device.type], options.vocabulary, device))
    return write("sampler" if device.type == "cuda" else "sampler_cpu", rows, **facts)


if __name__ == "__main__":
    print(main())
