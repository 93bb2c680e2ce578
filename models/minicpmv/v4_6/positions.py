"""Positions of MiniCPM-V 4.7: a picture and its crops lie on one canvas. Torch-free.

Everything of a picture has its first position as time. Source: the published get_rope_index of minicpmv4_7.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np

_BEFORE = (-1, -1)


@dataclass(frozen=True)
class Frame:
    """A picture, or a frame of a video: (rows, columns) of the overview and of a crop in tokens, and of the grid of
    crops, (0, 0) for none."""

    overview: tuple[int, int]
    grid: tuple[int, int]
    crop: tuple[int, int]

    @property
    def canvas(self) -> tuple[int, int]:
        if not self.grid[0]:
            return self.overview
        return self.grid[0] * self.crop[0], self.grid[1] * self.crop[1]

    @property
    def extent(self) -> int:
        """Positions until the text behind it goes on."""
        return max(self.canvas) + 1

    def places(self) -> np.ndarray:
        """int64 [2, tokens]: height and width of its tokens, markers and line breaks included, from its first position
        on. The overview is stretched over the canvas of its crops."""
        rows, columns = self.canvas
        stretched = _stretch(self.overview[0], rows), _stretch(self.overview[1], columns)
        parts = [_point(*_BEFORE), _area(*stretched), _point(rows, columns)]
        height, width = self.crop
        for row in range(self.grid[0]):
            if row:
                parts.append(_point(row * height - 1, columns))  # the line break behind the row above
            for column in range(self.grid[1]):
                top, left = row * height, column * width
                area = _area(np.arange(top, top + height), np.arange(left, left + width))
                parts += [_point(top, left), area, _point(top + height - 1, left + width - 1)]
        return np.concatenate(parts, axis=1)


def canvas_positions(
    token_ids: np.ndarray, frames: Sequence[tuple[int, Frame]], structural: Container[int]
) -> tuple[np.ndarray, int]:
    """Positions int32 [3, n] (time, height, width) of a prompt, and the next one.

    frames: with the index of each one's first token, in prompt order. structural: tokens, such as line breaks, that
    directly behind a frame have the frame's first position.
    """
    positions = np.zeros((3, len(token_ids)), dtype=np.int64)
    taken = position = first = 0
    for start, frame in [*frames, (len(token_ids), None)]:
        while taken and taken < start and int(token_ids[taken]) in structural:
            positions[:, taken] = first
            taken += 1
        positions[:, taken:start] = position + np.arange(start - taken)
        position += start - taken
        if frame is None:
            break
        places = frame.places()
        first, taken = position, start + places.shape[1]
        positions[0, start:taken] = first
        positions[1:, start:taken] = np.maximum(first + places, 0)
        position += frame.extent
    return positions.astype(np.int32), position


def _point(row: int, column: int) -> np.ndarray:
    return np.array([[row], [column]])


def _area(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    return np.stack([grid.ravel() for grid in np.meshgrid(rows, columns, indexing="ij")])


def _stretch(count: int, size: int) -> np.ndarray:
    """int64 [count]: torch.linspace(0, size - 1, count) in float32, whose second half is counted from the end, rounded
    half to even."""
    last = np.float32(size - 1)
    step = last / np.float32(max(1, count - 1))
    index = np.arange(count, dtype=np.float32)
    values = np.where(index < count // 2, step * index, last - step * (count - 1 - index))
    return np.rint(values if count > 1 else index).astype(np.int64)
