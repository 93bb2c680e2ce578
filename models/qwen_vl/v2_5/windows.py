"""Attention windows of a frame.

A frame's embedding rows (2x2 patches each, in raster order) are cut into squares of `window` rows and columns from the
top left; the last ones of a row or column are smaller. The tower computes window after window, with the rows inside a
window in raster order, so that a window is a run of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from models.qwen_vl.patches import block_coordinates

_CACHED_GRIDS = 64


@dataclass(frozen=True, eq=False)
class WindowedFrame:
    """order: int64 [units], the number in raster order of the embedding row at each place. lengths: int32 [windows],
    patches of each. coordinates: int32 [patches, 2], row and column of the patch at each place."""

    order: np.ndarray
    lengths: np.ndarray
    coordinates: np.ndarray


def num_windows(rows: int, columns: int, window: int) -> int:
    """Number of windows in a frame of `rows` x `columns` embedding rows."""
    return -(-rows // window) * -(-columns // window)


@lru_cache(maxsize=_CACHED_GRIDS)
def windowed_frame(h: int, w: int, merge: int, window: int) -> WindowedFrame:
    """Windows of a frame of h x w patches."""
    rows, columns = h // merge, w // merge
    raster = np.arange(rows * columns, dtype=np.int64).reshape(rows, columns)
    windows = [
        raster[top : top + window, left : left + window].ravel()
        for top in range(0, rows, window)
        for left in range(0, columns, window)
    ]
    order = np.concatenate(windows)
    lengths = np.array([len(part) for part in windows], dtype=np.int32) * merge**2
    coordinates = block_coordinates(h, w, merge).reshape(-1, merge**2, 2)[order].reshape(-1, 2)
    return WindowedFrame(order, lengths, coordinates)
