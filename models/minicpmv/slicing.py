"""How a picture becomes slices: one overview and, for a large picture, a grid of refined crops.

Source: slice_image of the published processors (image_processing_minicpmv.py), which all versions share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from models.interfaces.errors import InputError
from models.interfaces.resizing import is_left, resize

MAX_PATCHES_PER_SIDE = 4096
"""Rows of the resampler's position table. Longer sides occur only for pictures of aspect ratios above 16000, which are
refused."""
MAX_SIDE = 14 * MAX_PATCHES_PER_SIDE
"""The same in pixels: all published patches have 14 a side."""

Cut = tuple[int, int, int, int, int, int]
"""How a slice is made of a picture: the height and width that it is resized to, and top, left, height and width of the
slice in that."""


@dataclass(frozen=True)
class SliceRule:
    """Geometry of slicing: slices cover about scale_resolution^2 pixels, sides are multiples of unit."""

    scale_resolution: int
    unit: int
    max_slices: int

    def overview_size(self, width: float, height: float, *, enlarge: bool) -> tuple[int, int]:
        """Width and height. enlarge: a picture of fewer pixels than a slice has is enlarged, too."""
        if width * height > self.scale_resolution**2 or enlarge:
            aspect = width / height
            # The width is computed from the height that was already truncated to an integer.
            height = int(self.scale_resolution / math.sqrt(aspect))
            width = int(height * aspect)
        return self._snap(width, self.unit), self._snap(height, self.unit)

    def grid(self, width: int, height: int) -> tuple[int, int] | None:
        """(columns, rows) of the crops, or None when the overview alone is enough."""
        wanted = min(math.ceil(width * height / self.scale_resolution**2), self.max_slices)
        if wanted <= 1:
            return None
        counts = [count for count in (wanted - 1, wanted, wanted + 1) if 1 < count <= self.max_slices]
        grids = [
            (columns, count // columns) for count in counts for columns in range(1, count + 1) if count % columns == 0
        ]
        aspect = math.log(width / height)
        best, best_error = (1, 1), math.inf
        for columns, rows in grids:
            error = abs(aspect - math.log(columns / rows))
            if error < best_error:
                best, best_error = (columns, rows), error
        return best

    def refined_size(self, width: int, height: int, grid: tuple[int, int]) -> tuple[int, int]:
        """Width and height of the whole picture before it is cut into the grid's equal cells."""
        columns, rows = grid
        cell = (self._snap(width, columns) / columns, self._snap(height, rows) / rows)
        cell_width, cell_height = self.overview_size(*cell, enlarge=True)
        return cell_width * columns, cell_height * rows

    def check_side(self, longest: int, width: int, height: int) -> None:
        """InputError if slices of a picture of `width` x `height` have a side, `longest`, that is too long."""
        if longest > MAX_SIDE:
            raise InputError("image_url", f"picture of {width} x {height} pixels: the aspect ratio is too extreme")

    def cuts(self, width: int, height: int) -> list[Cut]:
        """The overview, then the crops row by row. InputError as of `check_side`."""
        grid = self.grid(width, height)
        wide, high = self.overview_size(width, height, enlarge=grid is None)
        cuts = [(high, wide, 0, 0, high, wide)]
        if grid:
            refined_width, refined_height = self.refined_size(width, height, grid)
            wide, high = refined_width // grid[0], refined_height // grid[1]
            places = [(top, left) for top in range(0, refined_height, high) for left in range(0, refined_width, wide)]
            cuts += [(refined_height, refined_width, *place, high, wide) for place in places]
        self.check_side(max(max(cut[4:]) for cut in cuts), width, height)
        return cuts

    @staticmethod
    def _snap(length: float, multiple: int) -> int:
        return max(round(length / multiple) * multiple, multiple)


@dataclass(frozen=True, eq=False)
class SlicedPicture:
    """slices: uint8 [height, width, 3], overview first, then the crops row by row. grid: (columns, rows) or None.

    arrays: empty, or cuts int32 [slices, 6], each a Cut, if the encoder's device is to make the slices of the picture,
    which is in their place."""

    slices: tuple[np.ndarray, ...]
    grid: tuple[int, int] | None
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


def slice_sizes(frames: Sequence[np.ndarray], arrays: Mapping[str, np.ndarray]) -> list[tuple[int, int]]:
    """Height and width of each slice of an item."""
    if "cuts" in arrays:
        return [(height, width) for *_, height, width in arrays["cuts"].tolist()]
    return [(frame.shape[0], frame.shape[1]) for frame in frames]


def slice_picture(picture: Image.Image, rule: SliceRule, *, may_leave: bool = False) -> SlicedPicture:
    """Overview and crops of an RGB picture; InputError when its aspect ratio makes a side too long. may_leave: the
    encoder's device may cut it."""
    (width, height), grid = picture.size, rule.grid(*picture.size)
    cuts = rule.cuts(width, height)
    sizes = list(dict.fromkeys((wide, high) for high, wide, *_ in cuts))
    if may_leave and is_left(picture, *sizes):
        return SlicedPicture((resize(picture, width, height),), grid, {"cuts": np.array(cuts, dtype=np.int32)})
    resized = {size: resize(picture, *size) for size in sizes}
    slices = [resized[w, h][top : top + high, left : left + wide] for h, w, top, left, high, wide in cuts]
    return SlicedPicture(tuple(map(np.ascontiguousarray, slices)), grid)
