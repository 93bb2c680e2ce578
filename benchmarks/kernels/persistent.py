"""Gated GEMMs of many rows: persistent programs against cuBLAS with a kernel behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.kernels.timing import Case
from models.layers.kernels.elementwise import silu_mul
from models.layers.kernels.persistent_gemm import TILE, persistent_gemm
from service.tuning.timer import Run

LAYERS: Mapping[str, tuple[int, int, tuple[int, ...]]] = {
    "qwen2.5-vl encoder": (1280, 3456, (256, 1024, 1280, 5504, 8192)),
    "qwen2-vl 2b": (1536, 8960, (640, 1024, 1536, 2048)),
    "qwen2-vl 7b": (3584, 18944, (256, 384, 1024, 2048)),
    "qwen2.5-vl 3b": (2048, 11008, (384, 512, 1024, 2048)),
    "qwen3-vl 2b": (2048, 6144, (384, 512, 1024, 2048)),
    "qwen3-vl 4b": (2560, 9728, (384, 512, 1024, 2048)),
    "qwen3-vl 8b": (4096, 12288, (384, 512, 1024, 2048)),
    "minicpm-v 4.0": (2560, 10240, (384, 1024)),
}
"""Inputs, outputs, and rows of x; fewer rows of Qwen2-VL-2B are in the table of tiles (gemm_table_sm90)."""
WITH_BIAS = ("qwen2.5-vl encoder",)
MOST = 0.97
"""Time here as a share of cuBLAS's up to which it is the choice."""
TENSOR_CORES = 0.8e9
"""Operations per microsecond that large GEMMs reach on an H100."""


def _run(name: str, rows: int, variant: str) -> Run:
    inputs, outputs, _ = LAYERS[name]
    x, *weights = (torch.randn(n, inputs, device="cuda").bfloat16() for n in (rows, *(3 * [2 * outputs])))
    bias = torch.randn(2 * outputs, device="cuda").bfloat16() if name in WITH_BIAS else None
    if variant == "persistent":
        return lambda i: persistent_gemm(x, weights[i % 3], bias)
    return lambda i: silu_mul(F.linear(x, weights[i % 3], bias))


def cases() -> list[Case]:
    found = []
    for name, (inputs, outputs, rows) in LAYERS.items():
        for count in rows:
            for variant in ("cublas", "persistent"):
                make = lambda a=(name, count, variant): _run(*a)  # noqa: E731
                floor = 4 * inputs * outputs * count / TENSOR_CORES
                found.append(Case("gated", f"{name}, {count} rows", variant, make, floor, calls=12))
    return found


def faster(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], tuple[tuple[int, int], ...]]:
    """models.layers.kernels.persistent_gemm.FASTER_SM_90 of a result: of each number of rows that is faster those of
    its last tile, and all between two such numbers of which one is at most twice the other."""
    times = {(row["shape"], row["variant"]): row["median_us"] for row in rows}
    found: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}
    for name, (inputs, outputs, counts) in LAYERS.items():
        spans: list[tuple[int, int]] = []
        before = 0
        for count in counts:
            shape = f"{name}, {count} rows"
            if times[shape, "persistent"] > MOST * times[shape, "cublas"]:
                before = 0
                continue
            if count <= 2 * before:
                spans[-1] = spans[-1][0], count
            else:
                spans.append(((count - 1) // TILE.rows * TILE.rows + 1, count))
            before = count
        if spans:
            found[inputs, outputs] = tuple(spans)
    return found
