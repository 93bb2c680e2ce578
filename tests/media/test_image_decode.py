"""Pictures are decoded to upright RGB, in the process and in a worker, or refused."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import simplejpeg
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from models.interfaces.errors import InputError
from service.confined.workers import Worker, WorkerLimits
from service.media.image_decode import (
    DECODING_BYTES,
    MAX_CHUNKS,
    MAX_FILLING,
    MAX_LARGE_SCANS,
    MAX_SCANS,
    MAX_SEGMENTS,
    MOST_STEPS,
    SCAN,
    PixelImage,
    decode_image,
    open_image,
    read_image,
)
from service.media.loader import DECODER
from service.media.messages import ImageLimits
from tests.media.samples import encoded, mutations, picture, tried
from tests.support.slow import slow

FIELD = "messages[0].content[1].image_url"
LIMITS = ImageLimits(max_pixels=1_000_000)


@pytest.fixture(scope="module", autouse=True, params=["here", slow("worker")])
def decoder(request: pytest.FixtureRequest) -> Iterator[Callable[..., Image.Image]]:
    """Where pictures are decoded: in this process, or in a confined one, with the same results and refusals."""
    if request.param == "here":
        Decode.image = decode_image
        yield decode_image
        return
    worker = Worker(WorkerLimits(), DECODER)
    Decode.image = lambda data, **options: worker.run(lambda channel: read_image(channel, data, **options))
    yield Decode.image
    assert worker.alive and not worker.lost, "every refusal leaves the worker ready for the next picture"
    worker.close()


class Decode:
    image: ClassVar[Callable[..., Image.Image]]


def decode(data: bytes) -> Image.Image:
    return Decode.image(data, field=FIELD, limits=LIMITS)


def refusal(data: bytes) -> str:
    with pytest.raises(InputError) as caught:
        decode(data)
    assert caught.value.field == FIELD
    message = str(caught.value)
    assert "0x" not in message and "<" not in message and "PIL" not in message and "/" not in message
    return message


def png(width: int, height: int, body: bytes = b"", *, depth: int = 8, colour: int = 2) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "JPEG", "WEBP", "AVIF"])
def test_pictures_equal_a_plain_open(format: str) -> None:
    data = encoded(picture(500, 350), format, **({"speed": 10} if format == "AVIF" else {}))
    assert np.array_equal(decode(data), Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_animations_give_their_first_frame(format: str) -> None:
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:])
    assert decode(data).getpixel((5, 5))[0] > 240
    assert decode(data).size == (20, 10)


@pytest.mark.parametrize(
    ("format", "mode"), [("PNG", "RGBA"), ("WEBP", "RGBA"), ("PNG", "LA"), ("PNG", "P"), ("GIF", "RGBA")]
)
def test_transparency_is_laid_on_white(format: str, mode: str) -> None:
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    clear.paste((0, 0, 0, 255), (0, 0, 4, 8))
    data = encoded(clear.convert(mode), format, **({"lossless": True} if format == "WEBP" else {}))
    result = decode(data)
    assert result.mode == "RGB"
    assert result.getpixel((1, 4)) == (0, 0, 0)
    assert result.getpixel((6, 4)) == (255, 255, 255)


@pytest.mark.parametrize(
    ("depth", "colour", "samples", "clear"),
    [
        (2, 0, b"\x60", [1]),
        (4, 0, b"\x37", [3]),
        (16, 0, b"\x12\x34\x12\x35", [0x1234]),
        (16, 2, b"\x12\x34\x56\x78\x9a\xbc\0\0\0\0\0\0", [0x1234, 0x5678, 0x9ABC]),
    ],
)
def test_one_transparent_colour_is_laid_on_white(depth: int, colour: int, samples: bytes, clear: list[int]) -> None:
    data = png(2, 1, b"\0" + samples, depth=depth, colour=colour)
    pixels = decode(with_chunk(data, b"tRNS", struct.pack(f">{len(clear)}H", *clear)))
    assert pixels.getpixel((0, 0)) == (255, 255, 255)
    assert pixels.getpixel((1, 0)) != (255, 255, 255)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int) -> None:
    upright = picture(24, 16)
    stored = {
        1: upright,
        2: upright.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: upright.transpose(Image.Transpose.ROTATE_180),
        4: upright.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: upright.transpose(Image.Transpose.TRANSPOSE),
        6: upright.transpose(Image.Transpose.ROTATE_90),
        7: upright.transpose(Image.Transpose.TRANSVERSE),
        8: upright.transpose(Image.Transpose.ROTATE_270),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(decode(encoded(stored, "PNG", exif=exif)), upright)


def test_sixteen_bit_samples_are_scaled() -> None:
    samples = np.array([[0, 0x40FF, 0x8000, 0xFFFF]], np.uint16)
    assert np.asarray(decode(encoded(Image.fromarray(samples), "PNG")))[0, :, 0].tolist() == [0, 0x40, 0x80, 0xFF]


def test_cmyk_grey_and_bilevel() -> None:
    assert decode(encoded(Image.new("CMYK", (4, 4), (0, 255, 255, 0)), "JPEG")).getpixel((1, 1))[0] > 200
    assert decode(encoded(Image.new("L", (4, 4), 77), "PNG")).getpixel((1, 1)) == (77, 77, 77)
    assert decode(encoded(Image.new("1", (4, 4), 1), "PNG")).getpixel((1, 1)) == (255, 255, 255)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF"])
def test_one_that_was_cut_short_is_not_taken_for_something_else(format: str) -> None:
    data = encoded(picture(), format)
    for keep in (12, 30, len(data) // 2, *({"JPEG": (-2,), "PNG": (-12,)}.get(format, ()))):  # the last: its end mark
        assert "damaged" in refusal(data[:keep])


@pytest.mark.parametrize("data", [b"", b"hello, this is text", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"RIFF\0\0\0\0WEBP"])
def test_what_is_no_image(data: bytes) -> None:
    refusal(data)


@pytest.mark.parametrize("size", [(20_000, 20_000), (1_001, 1_000), (0x7FFFFFFF, 0x7FFFFFFF), (1, 2_000_000)])
def test_bombs_are_refused_by_their_header(size: tuple[int, int]) -> None:
    assert "pixels" in refusal(png(*size))


def with_chunk(data: bytes, kind: bytes, body: bytes, *, last: bool = False) -> bytes:
    """A PNG with another chunk, behind the header or the picture."""
    packed = struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    place = -12 if last else 33
    return data[:place] + packed + data[place:]


@cache
def large_text() -> bytes:
    return zlib.compress(bytes(64 << 20))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("kind", "head"), [(b"zTXt", b"\0\0"), (b"iTXt", b"\0\1\0\0\0")])
def test_large_texts_are_left_out(kind: bytes, head: bytes, last: bool) -> None:
    """Pillow would refuse the picture."""
    plain, text = encoded(picture(), "PNG"), large_text()
    data = with_chunk(plain, kind, b"k" + head + text, last=last)
    assert np.array_equal(decode(data), decode(plain))
    needed = with_chunk(plain, kind, b"XML:com.adobe.xmp" + head + text, last=last)
    assert "compressed text of more than 1 MB" in refusal(needed)


@pytest.mark.parametrize("kind", [b"prVt", slow(b"pr0t"), slow(b"p_Vt")], ids=repr)
def test_a_png_of_very_many_chunks_is_refused(kind: bytes) -> None:
    """Of kinds that no standard allows, too: Pillow skips them."""
    empty = struct.pack(">I", 0) + kind + struct.pack(">I", zlib.crc32(kind))
    plain = encoded(picture(), "PNG")
    assert np.array_equal(decode(plain[:33] + 1000 * empty + plain[33:]), decode(plain))
    assert "too many chunks: at most 100000 allowed" in refusal(plain[:33] + MAX_CHUNKS * empty + plain[33:])


def test_texts_that_turn_a_picture_are_read() -> None:
    upright, text = encoded(picture(), "PNG"), b'<x tiff:Orientation="6"/>'
    for body in (b"\0\1\0\0\0" + zlib.compress(text), b"\0\0\0\0\0" + text):
        turned = decode(with_chunk(upright, b"iTXt", b"XML:com.adobe.xmp" + body))
        assert np.array_equal(turned, np.rot90(np.asarray(decode(upright)), -1))


def progressive(side: int, mode: str = "RGB") -> tuple[bytes, bytes, bytes]:
    """A progressive JPEG without its end mark, its last scan, which may be repeated, and the end mark."""
    data = encoded(Image.new(mode, (side, side)), "JPEG", progressive=True)
    return data[:-2], data[data.rindex(SCAN) : -2], data[-2:]


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_scans_that_take_no_bytes_but_time(mode: str) -> None:
    """Those of a progressive JPEG can be repeated; each goes through all pixels."""
    data, last, end = progressive(64, mode)
    for more in (0, MAX_SCANS - data.count(SCAN)):
        assert decode(data + more * last + end).size == (64, 64)
    assert "too many scans: 501 given" in refusal(data + (more + 1) * last + end)


def test_a_large_picture_may_have_fewer_scans() -> None:
    """What a camera appends is no scan of the picture, whatever it looks like, and a table is none."""
    data, last, end = progressive(1000)
    more = MAX_LARGE_SCANS - data.count(SCAN)
    comment = b"\xff\xfe\x00\x04" + SCAN
    assert decode(data + more * last + 9 * comment + end + 1000 * SCAN).size == (1000, 1000)
    table = b"\xff\xc4\x00\x16\x1f\xff\xd9" + bytes(17)
    said = refusal(data + (more + 1) * (table + last) + end)
    assert said == "the image has too many scans: 65 given, at most 64 allowed at its size"


def test_scans_behind_more_segments_than_are_looked_at() -> None:
    data, last, end = progressive(64)
    said = refusal(data + MOST_STEPS * b"\xff\xfe\x00\x02" + (MAX_SCANS + 1) * last + end)
    assert said == "the image has too many segments between its scans: at most 100000 allowed"


@pytest.mark.parametrize("filling", [b"\0", b"\xff"], ids=repr)
@pytest.mark.parametrize("damaged", [False, True])
def test_bytes_between_segments(filling: bytes, damaged: bool) -> None:
    """Where no marker follows, the search for it takes no longer: it took hours."""
    data, place = encoded(picture(), "JPEG"), 20  # behind the first segment, JFIF's
    rest = b"" if damaged else data[place:]
    few = data[:place] + 1000 * filling + rest
    assert "damaged" in refusal(few) if damaged else np.array_equal(decode(few), decode(data))
    said = refusal(data[:place] + (MAX_FILLING + 1) * filling + rest)
    assert said == "the image has too many bytes between its segments: at most 1000000 allowed"


@pytest.mark.parametrize("between", [b"", b"\xff\xff", b"\xff\x00", b"\xff\xd0", b"\xff\xf0", b"junk"], ids=repr)
def test_metadata_in_more_and_more_pieces(between: bytes) -> None:
    """Pillow would copy all of the EXIF data for each piece. between: what it skips before a segment."""
    data = encoded(picture(), "JPEG")
    with Image.open(io.BytesIO(data)) as image:
        assert isinstance(image, JpegImageFile)
        kept = len(image.applist)
    others = data[: data.index(SCAN)].count(b"\xff\xdb") + data[: data.index(SCAN)].count(b"\xff\xc4") + 1
    piece = between + b"\xff\xe1\x00\x09Exif\x00\x00x"
    few = (MAX_SEGMENTS - others - kept) // (2 if between in (b"\xff\x00", b"\xff\xd0", b"\xff\xf0") else 1)
    place = 20  # behind the first segment, JFIF's
    allowed = data[:place] + few * piece + data[place:]
    if between == b"\xff\xf0":  # which libjpeg does not decode
        assert "damaged" in refusal(allowed)
    else:
        assert np.array_equal(decode(allowed), decode(data))
    assert "too many segments of metadata: at most 500 " in refusal(data[:place] + (few + 1) * piece + data[place:])


def test_too_many_bytes() -> None:
    with pytest.raises(InputError, match="at most 10 "):
        Decode.image(bytes(11), field=FIELD, limits=ImageLimits(max_bytes=10))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_mutants_are_pictures_or_refused(format: str) -> None:
    pictures, refused = tried(mutations(encoded(picture(), format), 120, seed=7), decode, FIELD)
    assert refused > 5
    assert all(one.mode == "RGB" and one.width * one.height <= LIMITS.max_pixels for one in pictures)


def jpeg_kinds() -> Iterator[Any]:
    for layout, extent in product(("4:4:4", "4:2:2", "4:2:0"), ((448, 448), (641, 479), (17, 9), (1, 1))):
        for progressive in (False, True):
            yield pytest.param(extent, {"subsampling": layout, "progressive": progressive})
    yield pytest.param((99, 50), {"quality": 100, "optimize": True})
    yield pytest.param((300, 200), {"quality": 5})
    yield pytest.param((333, 77), {"restart_marker_blocks": 3})
    yield pytest.param((64, 64), {"keep_rgb": True})
    yield pytest.param((40, 30), {"comment": b"x" * 60_000, "icc_profile": bytes(70_000)})


@pytest.mark.parametrize(("extent", "options"), list(jpeg_kinds()))
def test_jpegs_have_the_pixels_that_pillow_gives_them(extent: tuple[int, int], options: dict[str, Any]) -> None:
    data = encoded(picture(*extent), "JPEG", **options)
    decoded = decode(data)
    assert isinstance(decoded, PixelImage)
    assert np.array_equal(decoded, Image.open(io.BytesIO(data)))


def test_a_jpeg_with_a_fault_is_judged_by_pillow() -> None:
    data = encoded(picture(), "JPEG")
    table = data.index(b"\xff\xdb")
    data = data[:table] + bytes(16) + data[table:]  # "extraneous bytes before marker": a warning of the library
    with pytest.raises(ValueError, match="extraneous"):
        simplejpeg.decode_jpeg(data)
    assert np.array_equal(decode(data), Image.open(io.BytesIO(data)))


def plain(mode: str) -> Image.Image:
    """4 million pixels that take few bytes in a file."""
    side = 2000
    if mode == "I;16":
        return Image.fromarray(np.full((side, side), 4000, np.uint16))
    return Image.new("RGB", (side, side), (9, 99, 199)).convert(mode)


def see_through() -> Image.Image:
    """One that WebP does not store without transparency."""
    image = plain("RGBA")
    image.putalpha(128)
    return image


TURNED = Image.Exif()
TURNED[0x0112] = 6

KINDS: dict[str, Callable[[], bytes]] = {
    "RGBA, turned": lambda: encoded(plain("RGBA"), "PNG", exif=TURNED),
    "16-bit grey": lambda: encoded(plain("I;16"), "PNG"),
    "BMP": lambda: encoded(plain("P"), "BMP"),
    "GIF": lambda: encoded(plain("P"), "GIF"),
    "progressive CMYK": lambda: encoded(plain("CMYK"), "JPEG", progressive=True, subsampling="4:4:4"),
    "TIFF": lambda: encoded(plain("RGB"), "TIFF", compression="tiff_lzw", tiffinfo={278: 2000}),
    "AVIF": lambda: encoded(see_through(), "AVIF", speed=10, subsampling="4:4:4"),
    "WebP, turned": lambda: encoded(see_through(), "WEBP", exif=TURNED),
}

GROWTH = """
import sys

from service.media.image_decode import decode_image
from service.media.messages import ImageLimits
from service.media.image_decode import UPRIGHT


def kibibytes(name: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name))


for path in sys.argv[1:]:  # the first is a small one, with which decoders take what they keep
    with open(path, "rb") as file:
        data = file.read()
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")  # the peak begins anew
    before = kibibytes("VmRSS:")
    decode_image(data, field="image", limits=ImageLimits())
print((kibibytes("VmHWM:") - before) * 1024)
"""


IN_SHORT = ("progressive CMYK", "WebP, turned")


@pytest.mark.parametrize("kind", [kind if kind in IN_SHORT else slow(kind) for kind in KINDS])
def test_decoding_takes_no_more_than_is_counted(kind: str, tmp_path: Path) -> None:
    data = KINDS[kind]()
    with open_image(data, field="image", limits=ImageLimits()) as image:
        pixels = image.width * image.height
        small = image.resize((8, 8)) if image.format == "GIF" else image.crop((0, 0, 8, 8))
        (tmp_path / "small").write_bytes(encoded(small, image.format or ""))
    (tmp_path / "large").write_bytes(data)
    command = [sys.executable, "-c", GROWTH, tmp_path / "small", tmp_path / "large"]
    done = subprocess.run(command, capture_output=True, check=True)
    # 8 MB: rows, and what the heap rounds up to.
    assert int(done.stdout) < DECODING_BYTES * pixels + 8_000_000
