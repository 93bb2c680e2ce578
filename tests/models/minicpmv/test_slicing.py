"""Slicing at the published settings: 448, patches of 14, at most 9 crops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from models.interfaces.errors import InputError
from models.minicpmv.slicing import SliceRule, slice_picture

RULE = SliceRule(scale_resolution=448, unit=14, max_slices=9)


def patches(rule: SliceRule, width: int, height: int) -> list[tuple[int, int]]:
    """(rows, columns) of the overview and of one crop."""
    grid = rule.grid(width, height)
    sizes = [rule.overview_size(width, height, enlarge=grid is None)]
    if grid:
        refined = rule.refined_size(width, height, grid)
        sizes.append((refined[0] // grid[0], refined[1] // grid[1]))
    return [(h // 14, w // 14) for w, h in sizes]


@pytest.mark.parametrize(
    ("size", "grid", "overview", "crop"),
    [
        ((448, 448), None, (32, 32), None),
        ((300, 200), None, (26, 39), None),
        ((640, 480), (2, 1), (28, 37), (39, 26)),
        ((1280, 720), (3, 2), (24, 43), (29, 35)),
        ((1920, 1080), (4, 2), (24, 43), (34, 30)),
        ((1344, 1344), (3, 3), (32, 32), (32, 32)),
        ((1600, 1000), (4, 2), (25, 40), (36, 29)),
        ((3000, 300), (6, 1), (10, 101), None),
        # The width follows from the height that was cut to an integer; of the exact height it would be one patch more.
        ((600, 240), None, (20, 50), None),
        ((640, 490), (2, 1), (28, 36), None),
    ],
)
def test_published_sizes(
    size: tuple[int, int],
    grid: tuple[int, int] | None,
    overview: tuple[int, int],
    crop: tuple[int, int] | None,
) -> None:
    assert RULE.grid(*size) == grid
    found = patches(RULE, *size)
    assert found[0] == overview
    if crop is not None:
        assert found[1] == crop


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6000), st.floats(-1.0, 1.0))
def test_slices_fill_their_bucket(width: int, log4_aspect: float) -> None:
    height = max(1, round(width * 4.0**log4_aspect))
    if max(width / height, height / width) > 4:
        return
    sizes = patches(RULE, width, height)
    assert all(986 <= rows * columns <= 1056 for rows, columns in sizes)
    grid = RULE.grid(width, height)
    assert grid is None or 2 <= math.prod(grid) <= 9


def test_crops_tile_the_refined_picture() -> None:
    rule = SliceRule(scale_resolution=84, unit=14, max_slices=9)
    pixels = np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8)
    sliced = slice_picture(Image.fromarray(pixels), rule)
    assert sliced.grid is not None
    columns, rows = sliced.grid
    crops = sliced.slices[1:]
    assert len(crops) == columns * rows
    whole = np.vstack([np.hstack(crops[row * columns : (row + 1) * columns]) for row in range(rows)])
    size = rule.refined_size(300, 200, sliced.grid)
    resized = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(whole, np.asarray(resized))


def test_one_crop_at_most_leaves_the_overview() -> None:
    picture = Image.new("RGB", (2000, 1500))
    sliced = slice_picture(picture, SliceRule(84, 14, 1))
    assert sliced.grid is None
    assert len(sliced.slices) == 1


@pytest.mark.parametrize("size", [(1, 1), (5000, 1), (1, 5000), (3000, 10)])
def test_thin_pictures_have_whole_patches(size: tuple[int, int]) -> None:
    sliced = slice_picture(Image.new("RGB", size), RULE)
    for piece in sliced.slices:
        assert piece.shape[0] % 14 == piece.shape[1] % 14 == 0
        assert piece.size > 0


def test_too_thin_pictures_are_refused() -> None:
    with pytest.raises(InputError, match="aspect ratio") as caught:
        slice_picture(Image.new("RGB", (60000, 1)), RULE)
    assert caught.value.field == "image_url"
