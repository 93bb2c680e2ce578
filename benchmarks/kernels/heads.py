"""Heads over a vocabulary at few rows: cuBLAS against the vector kernel and streamed tiles."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.kernels.timing import Case
from models.layers.kernels.gemm import vocabulary_tile
from models.layers.kernels.gemm_types import Tile
from models.layers.kernels.gemv import vector_gemm
from models.layers.kernels.tiled_gemm import tiled_gemm
from service.tuning.timer import Run

BANDWIDTH = 3.0e6
"""Bytes per microsecond that a copy reaches on an H100."""
HEADS = [("qwen2-vl 2b", 1536, 151936), ("qwen2-vl 7b", 3584, 152064), ("kimi-vl a3b", 2048, 163840)]


def _run(rows: int, inputs: int, outputs: int, kind: str | Tile) -> Run:
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
    if kind == "cublas":
        return lambda i: F.linear(x, weight)
    if kind == "vector":
        return lambda i: vector_gemm(x, weight)
    tile = vocabulary_tile(x, weight) if isinstance(kind, str) else kind
    return lambda i: tiled_gemm(x, weight, None, tile)


def cases() -> list[Case]:
    found = []
    for name, inputs, outputs in HEADS:
        for rows in (1, 8, 32, 64):
            others = [Tile(max(16, rows), 64, 128), Tile(max(16, rows), 128, 64, swap=True)]
            kinds = ["cublas", "vector"] if rows == 1 else ["cublas", "chosen", *others]
            for kind in kinds:
                make = lambda a=(rows, inputs, outputs, kind): _run(*a)  # noqa: E731
                floor = inputs * outputs * 2 / BANDWIDTH
                found.append(Case("head", f"{name}, {rows} rows", str(kind), make, floor, calls=6))
    return found
