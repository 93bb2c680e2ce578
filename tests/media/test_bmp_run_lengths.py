"""Run-length encoded BMPs: Pillow's pixels, with work that grows with the file and not with what it claims to be."""

from __future__ import annotations

import io
import random
import struct
import sys
from types import FrameType
from typing import Any

import pytest
from PIL import Image
from PIL.BmpImagePlugin import BmpRleDecoder

from service.media.bmp_run_lengths import use_for_bmp
from service.media.image_decode import decode_image, load_decoders
from service.media.limits import ImageLimits

END_OF_LINE, END_OF_PICTURE = b"\0\0", b"\0\1"


def bmp(width: int, height: int, runs: bytes, *, bits: int = 8) -> bytes:
    """height: negative for a file that begins with the uppermost line."""
    palette = b"".join(bytes((shade, 255 - shade, shade // 2, 0)) for shade in range(1 << bits))
    start = 14 + 40 + len(palette)
    method = {8: 1, 4: 2}[bits]
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, method, len(runs), 0, 0, 1 << bits, 0)
    return b"BM" + struct.pack("<IHHI", start + len(runs), 0, 0, start) + head + palette + runs


def random_runs(draw: random.Random, bits: int) -> bytes:
    """All commands, some of them beyond the picture, and sometimes bytes that are none."""
    runs = bytearray()
    for _ in range(draw.randint(0, 30)):
        kind = draw.random()
        if kind < 0.4:
            runs += bytes((draw.randint(1, 14), draw.randrange(256)))
        elif kind < 0.6:
            runs += END_OF_LINE
        elif kind < 0.65:
            runs += END_OF_PICTURE
        elif kind < 0.75:
            runs += bytes((0, 2, draw.randint(0, 4), draw.randint(0, 2)))
        elif kind < 0.95:
            count = draw.randint(3, 9)
            length = count if bits == 8 else (count + 1) // 2
            runs += bytes((0, count)) + draw.randbytes(length + length % 2)
        else:
            runs += draw.randbytes(draw.randint(0, 3))
    return bytes(runs) + (b"\0\2\0\xff\0\2\0\xff" if draw.random() < 0.7 else b"")


def pixels(data: bytes) -> bytes | None:
    """None for a picture that is refused."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.convert("RGB").tobytes()
    except (OSError, ValueError):
        return None


@pytest.mark.parametrize("bits", [4, 8])
def test_pixels_are_those_of_pillow(bits: int) -> None:
    draw = random.Random(bits)
    files = [
        bmp(draw.randint(1, 12), draw.choice((1, -1)) * draw.randint(1, 6), random_runs(draw, bits), bits=bits)
        for _ in range(3000)
    ]
    ours = [pixels(data) for data in files]
    Image.register_decoder("bmp_rle", BmpRleDecoder)
    try:
        assert ours == [pixels(data) for data in files]
    finally:
        use_for_bmp()
    assert sum(picture is not None for picture in ours) > 1000


@pytest.mark.parametrize(
    ("bits", "runs"),
    [(8, b"\1\7" + END_OF_LINE), (8, b"\1\7" + b"\0\2\0\1"), (4, b"\xff\x12" + END_OF_LINE)],
    ids=["ends of lines", "moves", "runs"],
)
def test_a_small_file_of_a_large_picture_is_little_work(bits: int, runs: bytes) -> None:
    width, height = 100_000, 10
    data = bmp(width, height, runs * height, bits=bits)
    lines = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    load_decoders()  # the first picture would import them
    before = sys.gettrace()
    sys.settrace(count)
    try:
        assert decode_image(data, field="image", limits=ImageLimits()).size == (width, height)
    finally:
        sys.settrace(before)
    assert lines < width
