"""Blocks of the GEMV with weights in e4m3, chosen by the whole decode step of one row: the fastest configuration in
isolation, repeated on the same operands, need not be the fastest between other kernels.

    python -m benchmarks.kernels.e4m3_steps qwen7b     on a GPU: writes results/kernels/e4m3_steps_qwen2_vl_7b.json

One shape after the other, each with the best of those before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.kernels.e4m3 import BLOCKS, MODELS, blocks_name
from benchmarks.kernels.gemms import Part
from benchmarks.measure.record import Row, table
from benchmarks.measure.timing import milliseconds
from benchmarks.steps import decoder as steps
from benchmarks.steps.full_size import free, load, measure_each, named_models
from models.layers.kernels import gemm_configs
from models.layers.kernels.gemm_types import Blocks, Kind, Shape
from models.protocol import Decoder
from service.graphs.pool import GraphPool

SIZES = {"qwen2b": "qwen2_vl_2b", "qwen7b": "qwen2_vl_7b"}
"""Names of benchmarks.checkpoints.published."""


def shape_of(part: Part) -> Shape:
    """Blocks of a GEMV; all of them add the residual."""
    kind: Kind = "silu_mul" if part.kind == "silu_mul" else "plain"
    return Shape(kind, part.inputs, part.outputs, True)


def measure(model: str, name: str, directory: Path, device: torch.device) -> list[Row]:
    decoder: Decoder = load(directory, device, quantization="fp8").decoder
    chosen = dict(gemm_configs.SM_90_E4M3_BLOCKS)
    rows: list[Row] = []
    with patch.object(gemm_configs, "SM_90_E4M3_BLOCKS", chosen):
        for part in MODELS[model]:
            found = list(_tried(decoder, name, part, chosen, device))
            best = min(found, key=lambda one: one[1])[0]
            chosen[shape_of(part)] = best
            rows += (
                {"shape": f"{model} {part.name}", "blocks": blocks_name(blocks), "graph_ms": ms, "best": blocks == best}
                for blocks, ms in found
            )
    return rows


def _tried(
    decoder: Decoder, name: str, part: Part, chosen: dict[Shape, Blocks], device: torch.device
) -> Iterator[tuple[Blocks, float]]:
    """Milliseconds of the step with each of the blocks."""
    for blocks in BLOCKS:
        if part.outputs % blocks.outputs:
            continue
        chosen[shape_of(part)] = blocks
        runner, plan, state = steps.captured_decode(name, decoder, 1, GraphPool(device, steps.POOL_BYTES))
        graph = runner.graph_for(plan.required)
        assert graph is not None
        steps.fill(state, 1)
        ms = milliseconds(graph.capture.replay, repeats=40)["median"]
        print(part.name, blocks_name(blocks), round(ms, 4), flush=True)
        yield blocks, ms
        free()


def main() -> None:
    for model in named_models("benchmarks.kernels.e4m3_steps", __doc__, SIZES, SIZES):
        print(table(measure_each("kernels/e4m3_steps", [SIZES[model]], partial(measure, model))))


if __name__ == "__main__":
    main()
