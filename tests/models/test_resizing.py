"""Pictures are resized in threads, with Pillow's bytes."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from models.interfaces import resizing
from models.interfaces.resizing import resize

BICUBIC = Image.Resampling.BICUBIC
SIDES = st.integers(1, 90)


@pytest.fixture(autouse=True, params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Bands of a thousand pixels, on as many threads."""
    count: int = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resizing, "_PIXELS_OF_A_BAND", 1000)
        patch.setattr(resizing, "_threads", count)
        yield count
    resizing._pool(count).shutdown()
    resizing._pool.cache_clear()


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


@settings(max_examples=30, deadline=None)
@given(SIDES, SIDES, SIDES, SIDES)
def test_rows_are_resized_before_columns_with_bytes_in_between(width: int, height: int, wide: int, high: int) -> None:
    picture = noise(width, height)
    expected = picture.resize((wide, height), BICUBIC).resize((wide, high), BICUBIC)
    np.testing.assert_array_equal(resize(picture, wide, high), np.asarray(expected))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 7), st.integers(101, 150), st.integers(14, 90), st.floats(0.02, 0.5))
def test_the_columns_of_very_tall_pictures_are_shrunk_first(width: int, ratio: int, wide: int, share: float) -> None:
    """The versions of Pillow that are allowed agree about them where they shrink by half and more."""
    picture = noise(width, width * ratio)
    high = max(1, int(share * width * ratio))
    np.testing.assert_array_equal(resize(picture, wide, high), np.asarray(picture.resize((wide, high), BICUBIC)))


def test_other_modes_are_made_rgb() -> None:
    grey = noise(60, 40).convert("L")
    np.testing.assert_array_equal(resize(grey, 30, 50), resize(grey.convert("RGB"), 30, 50))


def test_a_file_that_was_only_opened_is_read_once(tmp_path: Path) -> None:
    noise(90, 80).save(tmp_path / "picture.png")
    for _ in range(20):
        with Image.open(tmp_path / "picture.png") as picture:
            np.testing.assert_array_equal(resize(picture, 50, 40), resize(noise(90, 80), 50, 40))
