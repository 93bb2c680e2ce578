"""Slicing at the published settings: 448, patches of 14, at most 9 crops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from models.interfaces import resizing
from models.interfaces.errors import InputError
from models.interfaces.media import MediaItem
from models.minicpmv.encoder import part_of, patch_rows, slice_grids
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
    (columns, rows), crops = sliced.grid, sliced.slices[1:]
    assert len(crops) == columns * rows
    whole = np.vstack([np.hstack(crops[row * columns : (row + 1) * columns]) for row in range(rows)])
    size = rule.refined_size(300, 200, sliced.grid)
    resized = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(whole, np.asarray(resized))


@settings(max_examples=60, deadline=None)
@given(st.integers(40, 400), st.integers(40, 400), st.sampled_from([1, 2, 4]))
def test_the_encoders_device_cuts_the_same_patches(width: int, height: int, merge: int) -> None:
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    picture, rule = Image.fromarray(pixels), SliceRule(scale_resolution=112, unit=14 * merge, max_slices=9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resizing, "_on_device", True)
        cuts = [slice_picture(picture, rule, may_leave=may_leave) for may_leave in (False, True)]
    items = [MediaItem("image", cut.slices, cut.arrays, 0, 0, 0, b"") for cut in cuts]
    assert items[1].frames[0].shape == pixels.shape and slice_grids(items[:1], 14) == slice_grids(items[1:], 14)
    for first in range(len(items[0].frames)):
        parts = (patch_rows([part_of(item, first, first + 2, 14)], 14, merge, torch.device("cpu")) for item in items)
        assert torch.equal(*map(torch.cat, parts))


@pytest.mark.parametrize("size", [(1, 1), (5000, 1), (1, 5000), (3000, 10)])
def test_thin_pictures_have_whole_patches(size: tuple[int, int]) -> None:
    slices = slice_picture(Image.new("RGB", size), RULE).slices
    assert all(piece.size and piece.shape[0] % 14 == piece.shape[1] % 14 == 0 for piece in slices)


def test_too_thin_pictures_are_refused() -> None:
    with pytest.raises(InputError, match="aspect ratio") as caught:
        slice_picture(Image.new("RGB", (60000, 1)), RULE)
    assert caught.value.field == "image_url"
