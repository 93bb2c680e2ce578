"""GEMMs of many rows with an epilogue: persistent programs against cuBLAS with a kernel behind it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.kernels.timing import Case, Run
from models.layers.kernels.elementwise import silu_mul
from models.layers.kernels.gemm_types import Kind
from models.layers.kernels.packed import add_quick_gelu
from models.layers.kernels.wide_gemm import wide_gemm

LAYERS: tuple[tuple[str, Kind, int, int, tuple[int, ...]], ...] = (
    ("qwen2-vl encoder", "quick_gelu", 1280, 5120, (1024, 2048, 4096, 5504, 8192, 16384)),
    ("qwen2.5-vl encoder", "silu_mul", 1280, 6912, (256, 1024, 1280, 5504, 8192)),
    ("qwen2-vl 2b", "silu_mul", 1536, 17920, (256, 384, 512, 640, 1024, 1536, 2048)),
    ("qwen2-vl 7b", "silu_mul", 3584, 37888, (256, 384, 1024, 2048)),
    ("qwen2.5-vl 3b", "silu_mul", 2048, 22016, (384, 512, 1024, 2048)),
    ("qwen3-vl 2b", "silu_mul", 2048, 12288, (384, 512, 1024, 2048)),
    ("qwen3-vl 4b", "silu_mul", 2560, 19456, (384, 512, 1024, 2048)),
    ("qwen3-vl 8b", "silu_mul", 4096, 24576, (384, 512, 1024, 2048)),
    ("minicpm-v 4.0", "silu_mul", 2560, 20480, (384, 1024)),
)
"""Name, epilogue, inputs, rows of the weight, and rows of x."""
WITH_BIAS = ("qwen2-vl encoder", "qwen2.5-vl encoder")
TENSOR_CORES = 0.8e9
"""Operations per microsecond that large GEMMs reach on an H100."""


def _run(name: str, kind: Kind, inputs: int, outputs: int, rows: int, variant: str) -> Run:
    x, *weights = (torch.randn(n, inputs, device="cuda").bfloat16() for n in (rows, outputs, outputs, outputs))
    bias = torch.randn(outputs, device="cuda").bfloat16() if name in WITH_BIAS else None
    if variant == "persistent":
        return lambda i: wide_gemm(kind, x, weights[i % 3], bias)
    if kind == "silu_mul":
        return lambda i: silu_mul(F.linear(x, weights[i % 3], bias))
    return lambda i: add_quick_gelu(F.linear(x, weights[i % 3]), bias)


def cases() -> list[Case]:
    found = []
    for name, kind, inputs, outputs, rows in LAYERS:
        for count in rows:
            for variant in ("cublas", "persistent"):
                make = lambda a=(name, kind, inputs, outputs, count, variant): _run(*a)  # noqa: E731
                floor = 2 * inputs * outputs * count / TENSOR_CORES
                found.append(Case(kind, f"{name}, {count} rows", variant, make, floor, calls=12))
    return found
