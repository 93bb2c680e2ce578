"""Pictures that the encoder's device resizes: the bytes are those that Pillow makes on a processor."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from models.interfaces import resizing
from models.interfaces.media import MediaItem, MediaKind
from models.interfaces.resizing import FrameResizer, resize
from models.layers.resample import resized
from models.qwen_vl.config import VisionConfig
from models.qwen_vl.encoder import patch_rows
from models.qwen_vl.items import vision_item

SIDES = st.integers(1, 130)
FUSES_PRODUCTS = platform.machine().lower() not in ("x86_64", "amd64", "i386", "i686")
"""Whether compilers fuse Pillow's multiplications and additions there, so that a weight's last bit may differ."""
CONFIG = VisionConfig(
    depth=1,
    hidden_size=32,
    num_heads=2,
    intermediate_size=64,
    out_features=32,
    channels=3,
    patch_size=14,
    temporal_patch_size=2,
    merge_size=2,
)


@pytest.fixture
def left() -> Iterator[None]:
    resizing.leave_to_device(True)
    yield
    resizing.leave_to_device(False)


def noise(width: int, height: int) -> np.ndarray:
    return np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def on_device(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    return resized(torch.from_numpy(pixels)[None], height, width)[0].numpy()


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).max() <= int(FUSES_PRODUCTS)


@settings(deadline=None, max_examples=150)
@given(SIDES, SIDES, SIDES, SIDES)
def test_the_bytes_are_pillows(width: int, height: int, wide: int, high: int) -> None:
    pixels = noise(width, height)
    if height > 100 * width:
        return  # never left to the device
    assert_same(on_device(pixels, wide, high), resize(Image.fromarray(pixels), wide, high))


@pytest.mark.parametrize(
    ("size", "to"), [((1024, 768), (1036, 756)), ((1920, 1080), (1372, 784)), ((300, 400), (28, 28))]
)
def test_the_bytes_of_photographs_sizes(size: tuple[int, int], to: tuple[int, int]) -> None:
    pixels = noise(*size)
    pixels[: size[1] // 2] = (pixels[: size[1] // 2] > 127) * np.uint8(255)  # edges that overshoot both ends
    assert_same(on_device(pixels, *to), resize(Image.fromarray(pixels), *to))


@pytest.mark.parametrize(
    ("size", "leaves"), [((90, 60), True), ((84, 56), True), ((200, 160), False), ((3, 310), False)]
)
def test_an_item_has_the_same_patches_wherever_it_is_resized(left: None, size: tuple[int, int], leaves: bool) -> None:
    pictures = [noise(*size), noise(*size)[::-1].copy()]
    cpu, resizer = torch.device("cpu"), FrameResizer(56, 84, may_leave=True)

    def item_of(
        kind: MediaKind, count: int, size: tuple[int, int] = (56, 84), source: bytes | None = None
    ) -> MediaItem:
        frames = [FrameResizer(*size, may_leave=True)(picture) for picture in pictures[:count]]
        return vision_item(kind, frames, size, CONFIG, b"", source=source or None)

    item = item_of("video", 2)
    assert {frame.shape for frame in item.frames} == {(size[1], size[0], 3) if leaves else (56, 84, 3)}
    assert resizer.num_bytes >= item.frames[0].nbytes
    resizing.leave_to_device(False)
    there = item_of("video", 2)
    assert {frame.shape for frame in there.frames} == {(56, 84, 3)}
    assert item.num_patches == there.num_patches
    named = [item_of("image", 1, source=b"a file").digest]
    resizing.leave_to_device(True)
    named.append(item_of("image", 1, source=b"a file").digest)
    named.append(item_of("image", 1, (84, 56), b"a file").digest)
    assert named[0] == named[1] != named[2], "caches know a picture by its file and its final size"
    found, expected = patch_rows(item, CONFIG, cpu), patch_rows(there, CONFIG, cpu)
    assert_same(found.numpy(), expected.numpy())


@pytest.mark.parametrize(("width", "height"), [(8192, 30), (8193, 30), (30, 8193), (30, 2900)])
def test_sides_whose_weights_would_be_many_are_not_left(left: None, width: int, height: int) -> None:
    frame = resizing.resized_or_left(Image.new("RGB", (width, height)), width - 2, height + 2)
    assert frame.shape[:2] == ((height, width) if max(width, height + 2) <= 8192 else (height + 2, width - 2))


def test_other_modes_are_left_as_rgb(left: None) -> None:
    grey = Image.fromarray(noise(60, 40)).convert("L")
    frame = resizing.resized_or_left(grey, 56, 28)
    np.testing.assert_array_equal(frame, np.asarray(grey.convert("RGB")))


def test_nothing_is_left_unless_it_is_asked_for() -> None:
    assert resizing.resized_or_left(Image.fromarray(noise(60, 40)), 56, 28).shape == (28, 56, 3)
