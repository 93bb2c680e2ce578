"""Pictures and videos of the Qwen-VL families as media items. Torch-free.

The frames of an item are the picture, or the frames of the video. Encoders take them in pairs, repeat the last one of
an odd number, and resize those that were left in their original size (models/interfaces/resizing.py). The item's array
grid_thw int32 [3] has the number of frame pairs, and the rows and columns of patches in a frame of the final size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image

from models.interfaces.media import MediaItem, MediaKind, media_digest
from models.interfaces.resizing import resized_or_left
from models.qwen_vl.config import ImageSettings, VisionConfig
from models.qwen_vl.pictures import smart_resize

_LOW_DETAIL_PIXELS = 512 * 512


def grid_of(item: MediaItem) -> tuple[int, int, int]:
    """(t, h, w): frame pairs, and rows and columns of patches in a frame."""
    t, h, w = (int(size) for size in item.arrays["grid_thw"])
    return t, h, w


def picture_item(
    picture: Image.Image,
    images: ImageSettings,
    vision: VisionConfig,
    settings: bytes,
    *,
    detail: str = "auto",
    source: bytes | None = None,
) -> MediaItem:
    """A picture, resized to multiples of vision.factor pixels: within the checkpoint's limits, and with detail "low" at
    most 512 x 512 pixels. Raises InputError for one more oblong than 200:1. settings, source: as of vision_item."""
    max_pixels = min(images.max_pixels, _LOW_DETAIL_PIXELS) if detail == "low" else images.max_pixels
    min_pixels = min(images.min_pixels, max_pixels)
    height, width = smart_resize(
        picture.height, picture.width, factor=vision.factor, min_pixels=min_pixels, max_pixels=max_pixels
    )
    frame = resized_or_left(picture, width, height)
    return vision_item("image", (frame,), (height, width), vision, settings, source=source)


def vision_item(
    kind: MediaKind,
    frames: Sequence[np.ndarray],
    size: tuple[int, int],
    vision: VisionConfig,
    settings: bytes,
    *,
    arrays: Mapping[str, np.ndarray] | None = None,
    source: bytes | None = None,
) -> MediaItem:
    """The item of `frames`, resized to `size` (height, width) or left to the encoder.

    settings, source: passed to models.interfaces.media.media_digest. arrays: int32, in addition to grid_thw, and part
    of the digest.
    """
    height, width = size
    pairs = -(-len(frames) // vision.temporal_patch_size)
    grid = np.array([pairs, height // vision.patch_size, width // vision.patch_size], dtype=np.int32)
    patches = int(grid.prod())
    arrays = {"grid_thw": grid, **(arrays or {})}
    return MediaItem(
        kind=kind,
        frames=tuple(frames),
        arrays=arrays,
        num_patches=patches,
        num_sequences=pairs,
        num_embeds=patches // vision.merged_patches,
        # The final size is in the grid. The size of the frames would only tell whether a device resizes them.
        digest=media_digest(kind, frames if source is None else (), arrays, settings, source),
    )
