"""Linear layers of few rows: weight-streaming kernels by tile against cuBLAS, one layer at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.kernels.timing import Case
from models.layers.fused import silu_mul
from models.layers.kernels import tiled_gemm
from models.layers.kernels.gemm_types import Tile
from models.layers.norms import add_rms_norm
from service.tuning.timer import Run

BANDWIDTH = 3.0e6
"""Bytes per microsecond that a copy reaches on an H100."""

PLAIN = [("locdit qkv", 1024, 2560), ("lm qkv", 2048, 2560), ("qwen2b qkv", 1536, 2048)]
GATED = [("locdit", 1024, 4096), ("lm", 2048, 6144), ("qwen2b", 1536, 8960)]
ADDED = [
    ("locdit o", 2048, 1024),
    ("locdit down", 4096, 1024),
    ("lm o", 2048, 2048),
    ("lm down", 6144, 2048),
    ("qwen2b down", 8960, 1536),
]
TILES = {
    "16x128x4": Tile(64, 16, 128, stages=4),
    "16x256x4": Tile(64, 16, 256, stages=4),
    "32x128x4": Tile(64, 32, 128, stages=4),
    "32x128x6": Tile(64, 32, 128, stages=6),
    "32x256x4": Tile(64, 32, 256, stages=4),
    "64x128x4": Tile(64, 64, 128, stages=4),
}


def _random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def _weights(rows: int, inputs: int) -> list[torch.Tensor]:
    """Enough copies to leave the L2 cache behind."""
    copies = max(2, min(24, int(200e6 / (rows * inputs * 2))))
    return [_random(rows, inputs, scale=inputs**-0.5) for _ in range(copies)]


def _plain(rows: int, inputs: int, width: int, tile: Tile | None) -> Run:
    x, weights = _random(rows, inputs), _weights(width, inputs)
    if tile is None:
        return lambda i: F.linear(x, weights[i % len(weights)])
    return lambda i: tiled_gemm.tiled_gemm(x, weights[i % len(weights)], None, tile)


def _gated(rows: int, inputs: int, inner: int, tile: Tile | None) -> Run:
    x, weights = _random(rows, inputs), _weights(2 * inner, inputs)
    if tile is None:
        return lambda i: silu_mul.reference(F.linear(x, weights[i % len(weights)]))
    return lambda i: tiled_gemm.tiled_gemm(x, weights[i % len(weights)], None, tile, "silu_mul")


def _added(rows: int, inputs: int, width: int, tile: Tile | None, split: int) -> Run:
    x, weights, residual, norm = _random(rows, inputs), _weights(width, inputs), _random(rows, width), _random(width)
    if tile is None:
        return lambda i: add_rms_norm.reference(F.linear(x, weights[i % len(weights)]), residual, norm, 1e-5)
    return lambda i: tiled_gemm.split_gemm_add_norm(
        x, weights[i % len(weights)], None, residual, norm, 1e-5, split=split, tile=tile
    )


def cases() -> list[Case]:
    found = []
    for rows in (1, 22):
        for name, inputs, width in PLAIN:
            floor = inputs * width * 2 / BANDWIDTH
            for variant, tile in [("torch", None), *TILES.items()]:
                make = lambda a=(rows, inputs, width, tile): _plain(*a)  # noqa: E731
                found.append(Case("linear", f"{rows} rows, {name}", variant, make, floor))
        for name, inputs, inner in GATED:
            floor = inputs * inner * 4 / BANDWIDTH
            for variant, tile in [("torch", None), *TILES.items()]:
                make = lambda a=(rows, inputs, inner, tile): _gated(*a)  # noqa: E731
                found.append(Case("linear+silu", f"{rows} rows, {name}", variant, make, floor))
        for name, inputs, width in ADDED:
            floor = inputs * width * 2 / BANDWIDTH
            splits = [s for s in (1, 2, 4, 5, 7) if inputs % (s * 256) == 0 and 64 <= width // 32 * s <= 300]
            variants: dict[str, tuple[Tile | None, int]] = {"torch": (None, 1)}
            for split in splits[:3]:
                for name_of_tile in ("16x256x4", "32x128x6", "32x256x4"):
                    variants[f"{name_of_tile} split {split}"] = TILES[name_of_tile], split
            for variant, (tile, split) in variants.items():
                make = lambda a=(rows, inputs, width, tile, split): _added(*a)  # noqa: E731
                found.append(Case("linear+norm", f"{rows} rows, {name}", variant, make, floor))
    return found
