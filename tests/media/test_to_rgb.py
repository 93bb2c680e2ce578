"""Pictures of every mode become RGB in tiles, as they would in one piece, and count as what decoding them takes."""

from __future__ import annotations

import contextlib
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from PIL import Image, ImagePalette

from models.interfaces.errors import InputError
from service.media import image_decode as module
from service.media.image_decode import SCAN, components_of_first_scan, decode_image, decoding_bytes, open_image, to_rgb
from service.media.messages import ImageLimits
from tests.media.samples import encoded
from tests.support.slow import slow

EXTENTS = ((1, 1), (5, 3), (1, 40), (40, 1), (16, 16), (61, 47))


def in_one_piece(image: Image.Image) -> np.ndarray:
    """The definition, which makes several pictures of this size."""
    if image.mode.startswith("I"):
        samples = np.asarray(image).astype(np.int64)
        grey = (samples >> 8).clip(0, 255).astype(np.uint8)
        grey[samples == image.info.get("transparency", -1)] = 255
        return np.asarray(Image.fromarray(grey).convert("RGB"))
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return np.asarray(Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB"))
    return np.asarray(image.convert("RGB"))


def random_picture(mode: str, extent: tuple[int, int], rng: np.random.Generator) -> Image.Image:
    width, height = extent
    dtype = {"I": np.int32, "I;16": np.uint16, "I;16B": np.dtype(">u2")}.get(mode)
    if dtype is not None:
        least = -(1 << 20) if mode == "I" else 0
        samples = rng.integers(least, 1 << (20 if mode == "I" else 16), (height, width))
        return Image.frombytes(mode, extent, samples.astype(dtype).tobytes())
    bands = {"1": 1, "L": 1, "P": 1, "LA": 2, "PA": 2, "RGB": 3, "YCbCr": 3, "RGBX": 4}.get(mode, 4)
    if mode == "1":
        return Image.fromarray(rng.integers(0, 2, (height, width)).astype(bool))
    image = Image.frombytes(mode, extent, rng.integers(0, 256, height * width * bands, np.uint8).tobytes())
    if mode in ("P", "PA"):
        image.putpalette(rng.integers(0, 256, 768, np.uint8).tobytes())
    return image


def with_transparency(mode: str, image: Image.Image, rng: np.random.Generator) -> Iterator[Image.Image]:
    """The picture as it is, and with the kinds of transparency that its mode may have: of a value that it holds."""
    yield image
    found = image.getpixel((0, 0))
    if mode in ("1", "L", "P", "RGB") or mode.startswith("I"):
        seen = image.copy()
        seen.info["transparency"] = found
        yield seen
    if mode == "P":
        table = image.copy()
        table.info["transparency"] = rng.integers(0, 256, 100, np.uint8).tobytes()
        yield table
        coloured = image.copy()
        coloured.putpalette(ImagePalette.ImagePalette("RGBA", rng.integers(0, 256, 1024, np.uint8).tobytes()), "RGBA")
        yield coloured


@pytest.mark.parametrize("tile", [7, module.TILE_PIXELS])
@pytest.mark.parametrize(
    "mode", ["1", "L", "P", "LA", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "I", "I;16", "I;16B"]
)
def test_tiles_make_what_one_piece_would(mode: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE_PIXELS", tile)
    rng = np.random.default_rng(1)
    for extent in EXTENTS:
        for image in with_transparency(mode, random_picture(mode, extent, rng), rng):
            made = to_rgb(image)
            assert (made.mode, made.size) == ("RGB", extent)
            assert np.array_equal(made, in_one_piece(image))


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


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


TURNED = exif(6)

KINDS: dict[str, tuple[float, Callable[[], bytes]]] = {
    "RGB": (3, lambda: encoded(plain("RGB"), "PNG")),
    "RGB with a transparent colour": (7, lambda: encoded(plain("RGB"), "PNG", transparency=(1, 2, 3))),
    "RGBA": (7, lambda: encoded(plain("RGBA"), "PNG")),
    "grey with transparency": (7, lambda: encoded(plain("LA"), "PNG")),
    "16-bit grey": (5, lambda: encoded(plain("I;16"), "PNG")),
    "grey": (3, lambda: encoded(plain("L"), "PNG")),
    "palette": (3, lambda: encoded(plain("P"), "PNG", transparency=b"\0\x7f")),
    "GIF": (3, lambda: encoded(plain("P"), "GIF")),
    "BMP": (3, lambda: encoded(plain("P"), "BMP")),
    "AVIF": (16, lambda: encoded(see_through(), "AVIF", speed=10, subsampling="4:4:4")),
    "TIFF": (12, lambda: encoded(plain("RGB"), "TIFF", compression="tiff_lzw", tiffinfo={278: 2000})),
    "grey TIFF": (3, lambda: encoded(plain("L"), "TIFF", compression="tiff_lzw", tiffinfo={278: 2000})),
    "WebP": (16, lambda: encoded(plain("RGB"), "WEBP")),
    "WebP with transparency": (16, lambda: encoded(see_through(), "WEBP")),
    "JPEG": (3, lambda: encoded(plain("RGB"), "JPEG")),
    "CMYK": (7, lambda: encoded(plain("CMYK"), "JPEG")),
    "progressive": (6, lambda: encoded(plain("RGB"), "JPEG", progressive=True, subsampling="4:2:0")),
    "progressive 4:4:4": (9, lambda: encoded(plain("RGB"), "JPEG", progressive=True, subsampling="4:4:4")),
    "progressive CMYK": (12, lambda: encoded(plain("CMYK"), "JPEG", progressive=True, subsampling="4:4:4")),
    "JPEG, turned": (8, lambda: encoded(plain("RGB"), "JPEG", exif=TURNED)),
    "RGB, turned": (8, lambda: encoded(plain("RGB"), "PNG", exif=TURNED)),
    "RGBA, turned": (8, lambda: encoded(plain("RGBA"), "PNG", exif=TURNED)),
    "16-bit grey, turned": (5, lambda: encoded(plain("I;16"), "PNG", exif=TURNED)),
    "grey, turned": (3, lambda: encoded(plain("L"), "PNG", exif=TURNED)),
    "WebP, turned": (16, lambda: encoded(plain("RGB"), "WEBP", exif=TURNED)),
}
"""What a pixel of each kind counts as, and a picture."""

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


IN_SHORT = ("RGBA", "progressive")


@pytest.mark.parametrize("kind", [kind if kind in IN_SHORT else slow(kind) for kind in KINDS])
def test_decoding_takes_what_is_counted(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    each, make = KINDS[kind]
    data, folder = make(), tmp_path_factory.mktemp("pictures")
    with open_image(data, field="image", limits=ImageLimits()) as image:
        pixels = image.width * image.height
        small = image.resize((8, 8)) if image.format == "GIF" else image.crop((0, 0, 8, 8))
        assert decoding_bytes(image, data) == each * pixels
        (folder / "small").write_bytes(encoded(small, image.format or ""))
    (folder / "large").write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, folder / "small", folder / "large"], capture_output=True, check=True
    )
    # Pillow's RGB takes 4 bytes. 8 MB: a tile, rows, and what the heap rounds up to.
    assert int(done.stdout) < max(each, 4) * pixels + 8_000_000


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


XMP = b"XML:com.adobe.xmp\0\0\0\0\0" + b'<x tiff:Orientation="6"/>'


@pytest.mark.parametrize(
    ("each", "found"),
    [
        (3, chunk(b"eXIf", exif(1)[6:])),
        (8, chunk(b"eXIf", TURNED[6:])),
        (8, chunk(b"iTXt", XMP)),
        (8, chunk(b"eXIf", exif(1)[6:]) + chunk(b"tEXt", b"Title\0IDAT") + chunk(b"iTXt", XMP)),
        (3, chunk(b"tEXt", b"Title\0exif")),
        (8, chunk(b"eXIf", b"no EXIF at all")),
    ],
)
def test_a_png_counts_as_turned_if_it_may_be(each: int, found: bytes) -> None:
    """What turns it may lie behind the pixels, where it is read with them: then it counts, whatever it says."""
    data = encoded(Image.new("RGB", (20, 10)), "PNG")
    pixels, end = data.index(b"IDAT") - 4, data.index(b"IEND") - 4
    before, behind = data[:pixels] + found + data[pixels:], data[:end] + found + data[end:]
    for made, counted in ((before, each), (behind, 3 if b"Title\0exif" in found else 8)):
        with open_image(made, field="image", limits=ImageLimits()) as image:
            assert decoding_bytes(image, made) == counted * 200
        with contextlib.suppress(InputError):
            turned = decode_image(made, field="image", limits=ImageLimits()).size == (10, 20)
            assert counted == 8 or not turned


def test_a_jpeg_in_several_scans_counts_with_its_coefficients() -> None:
    """Of one that is not progressive, libjpeg holds them if a scan has only some of the components."""
    data = encoded(plain("RGB"), "JPEG", subsampling="4:4:4")
    assert components_of_first_scan(data) == 3
    place = data.index(SCAN)
    parts = data[: place + 2] + b"\0\x08\x01" + data[place + 5 : place + 7] + data[place + 11 :]
    assert components_of_first_scan(parts) == 1
    with open_image(parts, field="image", limits=ImageLimits()) as image:
        assert decoding_bytes(image, parts) == 9 * image.width * image.height
    assert components_of_first_scan(data[: place + 2]) == 0
