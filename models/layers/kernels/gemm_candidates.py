"""Configurations of the GEMM kernel that are worth measuring for a shape on a GPU: all of them fit it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from models.layers.kernels.gemm_configs import fits, fitted_for
from models.layers.kernels.gemm_types import Shape, Tile, Variant
from models.layers.kernels.gpu import Gpu

_MOST_SPLIT_PROGRAMS = 400
"""Thread blocks beyond which inputs are not split further: they fill any GPU."""
_MANY_ROWS = (
    Tile(128, 256, 64, warps=8, stages=3),
    Tile(128, 128, 64, warps=8, stages=4),
    Tile(128, 64, 64, warps=4, stages=4),
    Tile(64, 128, 64, warps=4, stages=4),
    Tile(64, 64, 128, warps=4, stages=4),
    Tile(64, 32, 128, warps=4, stages=4),
)
_MANY_ROWS_GATED = (
    Tile(128, 128, 64, warps=8, stages=3),
    Tile(128, 128, 64, warps=8, stages=4),
    Tile(256, 64, 64, warps=8, stages=4),
    Tile(128, 64, 64, warps=8, stages=4),
    Tile(64, 128, 64, warps=8, stages=3),
    Tile(64, 64, 64, warps=4, stages=4),
    Tile(64, 32, 128, warps=4, stages=3),
)


def _few_rows(rows: int, gated: bool) -> tuple[Tile, ...]:
    """Tiles of 16 to 64 rows: small enough that two thread blocks and more share an SM."""
    least = max(16, rows)
    if gated:
        return (
            Tile(least, 64, 128, stages=3, swap=True),
            Tile(least, 64, 64, stages=6, swap=True),
            Tile(least, 128, 64, stages=4, swap=True),
            Tile(least, 32, 128, stages=4),
        )
    return (
        Tile(least, 64, 128, stages=4, swap=True),
        Tile(least, 64, 128, stages=6, swap=True),
        Tile(least, 32, 128, stages=6),
        Tile(least, 16, 256, stages=4),
    )


def candidates(shape: Shape, rows: int, gpu: Gpu) -> Iterator[Variant]:
    """Tiles with TMA, where the GPU has it, and without; rows from 65 on may be any number, fewer a power of two. A
    tile too large for the GPU gives its place to what `fitted_for` makes of it."""
    gated = shape.kind == "silu_mul"
    tiles = _few_rows(rows, gated) if rows <= 64 else _MANY_ROWS_GATED if gated else _MANY_ROWS
    ways = (False, True) if gpu.has_tma else (False,)
    found = (fitted_for(replace(tile, tma=tma), gpu, gated=gated) for tile in tiles for tma in ways)
    for tile in dict.fromkeys(found):
        if not shape.outputs % tile.columns and not shape.inputs % tile.depth and fits(tile, gpu, gated=gated):
            yield from _variants(shape, rows, tile, gpu) if shape.kind == "add_norm" else (Variant(tile),)


def _variants(shape: Shape, rows: int, tile: Tile, gpu: Gpu) -> Iterator[Variant]:
    """Both ways to a norm. Split-K makes about one thread block an SM."""
    yield Variant(tile, deferred=True)
    programs = -(-rows // tile.rows) * (shape.outputs // tile.columns)
    splits = [split for split in range(2, 9) if shape.inputs % (split * tile.depth) == 0]
    split = min(splits, key=lambda split: abs(split * programs - gpu.num_sms), default=0)
    if split and split * programs <= _MOST_SPLIT_PROGRAMS:
        yield Variant(tile, split=split)
