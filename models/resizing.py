"""Bicubic resizing on several processors. Torch-free.

Two passes with whole bytes in between, first along the rows and then along the columns: what Pillow did up to version
12, and with it the preprocessing that the models were trained with. Pillow 13 begins with the pass that leaves less
work, which changes pixels. Very tall pictures are the exception: their columns are shrunk first, as Pillow does it from
12.2 on. Rows are independent in the first pass and columns in the second, so bands of them are resized in parallel;
Pillow releases the interpreter lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import TypeVar

import numpy as np
from PIL import Image

from models import cpus

T = TypeVar("T")
U = TypeVar("U")

_PIXELS_OF_A_BAND = 1 << 17
"""Pixels of the larger picture from which threads are used: some milliseconds of work, where starting a thread takes a
fraction of one."""

_TALL = 100
"""Height over width from which on Pillow shrinks the columns first."""

_threads = min(8, cpus.available())
_local = threading.local()
"""`resizes` is set in the threads of the pool, which must not wait for each other."""


def use_threads(count: int) -> None:
    """Sets the number of threads that resize pictures for all callers together; 1: the callers' own threads."""
    global _threads
    _threads = count


def resize(picture: Image.Image, width: int, height: int) -> np.ndarray:
    """An RGB picture -> uint8 [height, width, 3]. A picture that has this size already is not changed."""
    if picture.mode != "RGB":
        picture = picture.convert("RGB")
    picture.load()  # of a file that was only opened: the threads below would all do it
    if height < picture.height and picture.height > _TALL * picture.width:
        picture = _resampled(picture, picture.width, height)
    bands = _number_of_bands(max(picture.width * picture.height, width * height))
    return _along_columns(_along_rows(picture, width, bands), height, bands)


def each(step: Callable[[T], U], items: Sequence[T]) -> list[U]:
    """step(item) for all items, several at a time: the frames of a video."""
    if len(items) == 1 or _threads == 1 or _in_pool():
        return [step(item) for item in items]
    return list(_pool(_threads).map(step, items))


def _along_rows(picture: Image.Image, width: int, bands: int) -> Image.Image:
    """RGB of any width -> RGB of `width`, as high as it was."""
    if picture.width == width:
        return picture
    if bands == 1:
        return _resampled(picture, width, picture.height)
    spans = _spans(picture.height, bands)
    parts = _pool(_threads).map(
        lambda span: _resampled(picture.crop((0, span[0], picture.width, span[1])), width, span[1] - span[0]), spans
    )
    whole = Image.new("RGB", (width, picture.height))
    for (first, _), part in zip(spans, parts, strict=True):
        whole.paste(part, (0, first))
    return whole


def _along_columns(picture: Image.Image, height: int, bands: int) -> np.ndarray:
    """RGB of any height -> uint8 [height, width, 3], as wide as it was."""
    if bands == 1 or picture.height == height:
        return np.asarray(_resampled(picture, picture.width, height))
    spans = _spans(picture.width, bands)
    parts = _pool(_threads).map(
        lambda span: np.asarray(
            _resampled(picture.crop((span[0], 0, span[1], picture.height)), span[1] - span[0], height)
        ),
        spans,
    )
    return np.concatenate(list(parts), axis=1)


def _resampled(picture: Image.Image, width: int, height: int) -> Image.Image:
    """One pass of Pillow's, or none."""
    if picture.size == (width, height):
        return picture
    return picture.resize((width, height), Image.Resampling.BICUBIC)


def _spans(length: int, count: int) -> list[tuple[int, int]]:
    """(first, stop) of `count` nearly equal parts, none of them empty."""
    borders = [length * index // count for index in range(count + 1)]
    return [(first, stop) for first, stop in pairwise(borders) if first < stop]


def _number_of_bands(pixels: int) -> int:
    return 1 if _in_pool() else max(1, min(_threads, pixels // _PIXELS_OF_A_BAND))


def _in_pool() -> bool:
    return getattr(_local, "resizes", False)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    def mark() -> None:
        _local.resizes = True

    return ThreadPoolExecutor(threads, thread_name_prefix="resize", initializer=mark)
