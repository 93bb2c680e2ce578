"""Ids into the tower's learned position table.

The published tower buckets the fractional coordinate of every patch: bucketize(arange(0, 1 - 1e-6, 1 / n),
arange(1 / side, 1, 1 / side), right=True) in float32. That is not floor(side * i / n): float32 rounding puts some
coordinates below an edge that they equal (lengths 25, 49, 50, 55, 58 up to 70), so the rounding is repeated here.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

_LANES = 8


def position_ids(rows: int, columns: int, side: int) -> np.ndarray:
    """int32 [rows * columns] of a rows x columns picture, row by row, into a table of side * side entries."""
    return (buckets(rows, side)[:, None] * side + buckets(columns, side)[None, :]).reshape(-1)


@lru_cache(maxsize=4096)
def buckets(length: int, side: int) -> np.ndarray:
    """int32 [length]: which of `side` equal parts each of `length` coordinates falls into."""
    edges = _arange_float32(1 / side, 1.0, 1 / side)
    coordinates = _arange_float32(0.0, 1 - 1e-6, float(np.float32(1) / np.float32(length)))
    ids = np.searchsorted(edges, coordinates, side="right").astype(np.int32)
    ids.flags.writeable = False
    return ids


def _arange_float32(start: float, end: float, step: float) -> np.ndarray:
    """torch.arange on a CPU, bit for bit: blocks of eight whose float32 base is stepped in float64, two at a time. Less
    than two blocks at the end are computed one by one."""
    count = math.ceil((end - start) / step)
    index = np.arange(count)
    lane = index % _LANES
    base = (start + step * (index - lane)).astype(np.float32).astype(np.float64)
    tail = count - count % (2 * _LANES)
    return np.where(index < tail, base + step * lane, start + step * index).astype(np.float32)
