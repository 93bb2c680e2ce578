"""Bicubic resizing on several processors, or left to the encoder's device. Torch-free.

There are two passes, first along the rows and then along the columns, with results rounded to bytes in between. Pillow
did the same up to version 12, and with it the preprocessing that the models were trained with; Pillow 13 starts with
the pass that leaves less work, which changes pixels. Very tall pictures are an exception: their columns are shrunk
first, as in Pillow from 12.2 on. Bands of rows, then of columns, are resized in parallel.

Pillow's weights are integers, so a GPU computes the same bytes, and faster (models/layers/resample.py): for that,
pictures are left as they are, unless they are much larger than their new sizes (`is_left`).
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise

import numpy as np
from PIL import Image

from models.interfaces import cpus

_PIXELS_OF_A_BAND = 1 << 17
"""Pixels for each thread, of the larger of the two pictures: some milliseconds of work."""
_TALL = 100
"""Height over width above which Pillow shrinks the columns first."""
_MAX_LEFT = 2
"""Maximum ratio of the pixels of a picture that is left to the device to those of its new size. Sending more would take
longer, and more of the device's memory, than it is worth."""
_LONGEST_LEFT = 8192
"""Maximum side of a picture that is left to the device. The weights of longer sides take milliseconds of the engine's
thread, and memory for as long as they are kept."""
KEPT_WEIGHTS = 64
"""Pairs of lengths whose weights are kept: 20 MB if all are of the longest."""

WEIGHT_BITS = 22
"""Fractional bits of Pillow's weights."""
_SUPPORT = 2.0
"""Reach of the bicubic filter to either side, in pixels of the smaller picture."""
_SHARPNESS = -0.5

_threads = min(8, cpus.available())
_on_device = False


def use_threads(count: int) -> None:
    """Sets the number of threads that resize pictures, for all callers together; 1: each caller uses its own thread."""
    global _threads
    _threads = count


def leave_to_device(enabled: bool) -> None:
    """Sets whether pictures may be left to the encoder's device."""
    global _on_device
    _on_device = enabled


def resized_or_left(picture: Image.Image, width: int, height: int) -> np.ndarray:
    """An RGB picture -> uint8 [height, width, 3], or in its own size if the device is to resize it."""
    return resize(picture, *(picture.size if is_left(picture, (width, height)) else (width, height)))


def is_left(picture: Image.Image, *sizes: tuple[int, int]) -> bool:
    """Whether the device is to make the pictures of these widths and heights of it."""
    small = picture.width * picture.height <= _MAX_LEFT * sum(width * height for width, height in sizes)
    small = small and max(*picture.size, *map(max, sizes)) <= _LONGEST_LEFT
    return _on_device and small and picture.height <= _TALL * picture.width


@dataclass(frozen=True)
class FrameResizer:
    """Resizes the frames of a video, one by one as they are decoded: uint8 [h, w, 3] -> [height, width, 3]. may_leave:
    the encoder's device may do it, as for `resized_or_left`."""

    height: int
    width: int
    may_leave: bool = False

    def __call__(self, frame: np.ndarray) -> np.ndarray:
        picture = Image.fromarray(frame)
        return (resized_or_left if self.may_leave else resize)(picture, self.width, self.height)

    @property
    def num_bytes(self) -> int:
        """Bytes of a resized frame; the most, where the device may resize it."""
        return 3 * self.height * self.width * (_MAX_LEFT if self.may_leave and _on_device else 1)


@lru_cache(maxsize=KEPT_WEIGHTS)
def bicubic_weights(length: int, new_length: int) -> tuple[np.ndarray, np.ndarray]:
    """How Pillow makes `new_length` pixels of a line from `length`: the first pixel that each is made from, int32
    [new_length], and the weights of that one and those after it, int32 [new_length, taps] in units of 2**-WEIGHT_BITS.
    Unused taps have weight 0. The arrays are cached: do not write to them."""
    scale = length / new_length
    stretch = max(scale, 1.0)
    support = _SUPPORT * stretch
    centres = (np.arange(new_length) + 0.5) * scale
    first = np.maximum((centres - support + 0.5).astype(np.int64), 0)
    counts = np.minimum((centres + support + 0.5).astype(np.int64), length) - first
    taps = np.arange(2 * math.ceil(support) + 1)
    weights = _bicubic((taps + first[:, None] - centres[:, None] + 0.5) * (1.0 / stretch))
    weights = np.where(taps < counts[:, None], weights, 0.0)
    # Added one after the other, as in Pillow, since the order shows in the last bit.
    weights /= np.add.accumulate(weights, axis=1)[:, -1:]
    fixed = np.trunc(weights * (1 << WEIGHT_BITS) + np.copysign(0.5, weights))
    return first.astype(np.int32), fixed.astype(np.int32)


def _bicubic(x: np.ndarray) -> np.ndarray:
    """Keys' cubic convolution, in Pillow's order of operations."""
    x, a = np.abs(x), _SHARPNESS
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def resize(picture: Image.Image, width: int, height: int) -> np.ndarray:
    """An RGB picture -> uint8 [height, width, 3]. A picture that has this size already is not changed."""
    if picture.mode != "RGB":
        picture = picture.convert("RGB")
    if picture.size == (width, height):
        return np.asarray(picture)
    picture.load()  # a file may only be open so far, and each of the threads below would load it
    if height < picture.height and picture.height > _TALL * picture.width:
        picture = _resampled(picture, picture.width, height)
    pixels = max(picture.width * picture.height, width * height)
    bands = max(1, min(_threads, pixels // _PIXELS_OF_A_BAND))
    lines = _resampled(picture, width, picture.height, bands)
    return np.asarray(_resampled(lines, width, height, bands))


def _resampled(picture: Image.Image, width: int, height: int, bands: int = 1) -> Image.Image:
    """One pass of Pillow's, in bands across the side that it changes, or none."""
    if picture.size == (width, height):
        return picture
    if bands == 1:
        return picture.resize((width, height), Image.Resampling.BICUBIC)
    of_rows = picture.height == height

    def band(span: tuple[int, int]) -> Image.Image:
        first, stop = span
        if of_rows:
            return _resampled(picture.crop((0, first, picture.width, stop)), width, stop - first)
        return _resampled(picture.crop((first, 0, stop, picture.height)), stop - first, height)

    spans, whole = _spans(height if of_rows else width, bands), Image.new("RGB", (width, height))
    for (first, _), part in zip(spans, _pool(_threads).map(band, spans), strict=True):
        whole.paste(part, (0, first) if of_rows else (first, 0))
    return whole


def _spans(length: int, count: int) -> list[tuple[int, int]]:
    """(first, stop) of `count` nearly equal parts, none of them empty."""
    borders = [length * index // count for index in range(count + 1)]
    return [(first, stop) for first, stop in pairwise(borders) if first < stop]


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="resize")
