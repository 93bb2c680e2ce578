"""What a media item's digest tells apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models.interfaces.media import DIGEST_BYTES, media_digest, source_digest

GRID = {"grid": np.array([1, 2, 2], np.int32)}


def frames(*shapes: tuple[int, int], value: int = 0) -> Sequence[np.ndarray]:
    return [np.full((*shape, 3), value, np.uint8) for shape in shapes]


def test_a_source_stands_for_pixels_and_for_nothing_else() -> None:
    source, other = source_digest(b"a picture's file"), source_digest(b"another's")
    base = media_digest("image", frames((4, 6)), GRID, b"settings", source)
    assert media_digest("image", frames((4, 6), value=9), GRID, b"settings", source) == base
    changed = [
        media_digest("image", frames((4, 6)), GRID, b"settings", other),
        media_digest("image", frames((4, 6)), GRID, b"settings"),
        media_digest("video", frames((4, 6)), GRID, b"settings", source),
        media_digest("image", frames((6, 4)), GRID, b"settings", source),
        media_digest("image", frames((4, 6), (4, 6)), GRID, b"settings", source),
        media_digest("image", frames((4, 6)), {"grid": np.array([1, 4, 1], np.int32)}, b"settings", source),
        media_digest("image", frames((4, 6)), GRID, b"other settings", source),
    ]
    assert len({base, *changed}) == 1 + len(changed)
    assert {len(digest) for digest in changed} == {DIGEST_BYTES}


def test_pixels_count_where_there_is_no_source() -> None:
    one, other = (media_digest("image", frames((4, 6), value=value), GRID, b"") for value in (0, 1))
    assert one != other
