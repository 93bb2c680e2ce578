"""The predicted time of a kernel on an H100: a launch, and the largest of its arithmetic in whole waves of tiles, its
bytes of device memory, and what one SM can load. Written beside every measurement, so that a miss shows."""

from __future__ import annotations

from math import ceil

from models.layers.kernels.gemm_types import Kind, Tile

LAUNCH_US = 2.0
BYTES = 3.0e6
"""Bytes of device memory per microsecond, measured with a copy."""
FLOPS = 798e6
"""bf16 operations per microsecond, measured by a GEMM of 8192 x 8192 x 8192."""
PROCESSORS = 132
LOADS = 64 * 1.7e3
"""Bytes per microsecond from L2 into one SM: 64 a clock."""
CUBLAS = (Tile(128, 256, 64), Tile(128, 128, 64), Tile(64, 128, 64), Tile(128, 64, 64), Tile(64, 64, 64))
"""Tiles of which cuBLAS is assumed to choose the best."""


def gemm_us(kind: Kind, rows: int, inputs: int, outputs: int, tile: Tile, split: int = 1) -> float:
    """One GEMM with its epilogue; the partial sums of split-K are written as float32."""
    weights = 2 if kind == "silu_mul" else 1
    waves = ceil(ceil(rows / tile.rows) * ceil(outputs / tile.columns) * split / PROCESSORS)
    share = inputs / split
    arithmetic = waves * 2 * tile.rows * tile.columns * weights * share / (FLOPS / PROCESSORS)
    loads = waves * 2 * (tile.rows + tile.columns * weights) * share / LOADS
    residual = 2 if kind == "add_norm" else 0
    written = 4 * split if split > 1 else 2 + residual
    moved = 2 * inputs * (weights * outputs + rows) + rows * outputs * (written + residual)
    return LAUNCH_US + max(arithmetic, loads, moved / BYTES)


def around_us(kind: Kind, rows: int, outputs: int, split: int = 0) -> float:
    """The kernel that follows a GEMM without an epilogue; split: partial sums that a norm adds, 0: a rounded result."""
    values = {"plain": 0, "silu_mul": 6, "quick_gelu": 4, "add_norm": 6 + (4 * split or 2)}[kind]
    return LAUNCH_US + rows * outputs * values / BYTES if values else 0.0


def cublas_us(kind: Kind, rows: int, inputs: int, outputs: int) -> float:
    """cuBLAS and the kernel that follows it."""
    columns = outputs * (2 if kind == "silu_mul" else 1)
    gemm = min(gemm_us("plain", rows, inputs, columns, tile) for tile in CUBLAS)
    return gemm + around_us(kind, rows, outputs)


def variant_us(kind: Kind, rows: int, inputs: int, outputs: int, tile: Tile, split: int, deferred: bool) -> float:
    if kind != "add_norm" or deferred:
        return gemm_us(kind, rows, inputs, outputs, tile)
    gemm = gemm_us("plain", rows, inputs, outputs, tile, split)
    return gemm + around_us(kind, rows, outputs, split)
