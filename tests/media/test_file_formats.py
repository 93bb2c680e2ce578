"""Files are recognised by their heads: read, or refused by name with what to do."""

from __future__ import annotations

import io
import re
import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from deploy.documents import formats_page
from models.interfaces.errors import InputError
from service.media.file_formats import FORMATS, Kind, is_confined, refusal
from service.media.image_decode import MAX_STRIPS, decode_image
from service.media.messages import ImageLimits
from tests.media.samples import encoded, picture

ROOT = Path(__file__).parents[2]
REFUSED: dict[str, tuple[Kind, bytes]] = {
    "HEIC": ("image", b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic"),
    "HEIF": ("image", b"\0\0\0\x14ftypmif1\0\0\0\0mif1"),
    "BigTIFF": ("image", b"II+\0\x08\0\0\0"),
    "JPEG XL": ("image", b"\xff\x0a\xfa\x1f"),
    "JPEG 2000": ("image", b"\xff\x4f\xff\x51"),
    "SVG": ("image", b'<?xml version="1.0"?>\n<!-- x -->\n<svg xmlns="x">'),
    "PDF": ("image", b"%PDF-1.7"),
    "EPS or PostScript": ("image", b"%!PS-Adobe-3.0 EPSF-3.0"),
    "ICO": ("image", b"\0\0\1\0\4\0"),
    "PSD": ("image", b"8BPS\0\1"),
    "PPM, PGM or PBM": ("image", b"P6\n64 48\n255\n"),
    "FLV": ("video", b"FLV\1\5"),
    "WMV or WMA (ASF)": ("audio", b"\x30\x26\xb2\x75\x8e\x66\xcf\x11"),
    "Ogg": ("video", b"OggS\0\2"),
    "MPEG-TS": ("video", (b"\x47" + bytes(187)) * 3),
    "MPEG-PS": ("video", b"\0\0\1\xba\x44"),
    "AIFF": ("audio", b"FORM\0\0\1\0AIFFCOMM"),
    "AU": ("audio", b".snd\0\0\0\x18"),
    "CAF": ("audio", b"caff\0\1\0\0"),
    "AMR": ("audio", b"#!AMR\n"),
    "MIDI": ("audio", b"MThd\0\0\0\6"),
}


def test_what_is_not_read_is_named_with_what_to_do() -> None:
    for name, (kind, head) in REFUSED.items():
        assert refusal(head + bytes(40), kind).startswith(f"the {kind} is {name}; convert it to "), name
    for brand in (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"):
        assert "is HEIC;" in refusal(b"\0\0\0\x18ftyp" + brand + bytes(12), "image")
    for page, name in ((b"<!DOCTYPE html><html>", "an HTML page"), (b'{"error": "not found"}', "JSON text")):
        assert refusal(page, "image") == f"the image is {name}, not a picture; a download may have failed"
    assert refusal(b"FLV\1", "image") == "the image is a video (FLV); send a picture"
    assert refusal(b"\0\0\0\x18ftypisom", "image") == "the image is a video (MP4/MOV); send it as video_url"


def refused(data: bytes) -> str:
    with pytest.raises(InputError) as caught:
        decode_image(data, field="image", limits=ImageLimits(max_pixels=1_000_000))
    return str(caught.value)


def test_unusual_jpegs_and_bmps_are_called_so() -> None:
    jpeg = bytearray(encoded(picture(), "JPEG"))
    jpeg[jpeg.index(b"\xff\xc0") + 4] = 12
    assert "12-bit" in refused(bytes(jpeg)) and "convert it" in refused(bytes(jpeg))
    masks = struct.pack("<III", 0x3FF00000, 0xFFC00, 0x3FF)
    head = struct.pack("<IiiHHIIiiII", 40, 1, 1, 1, 32, 3, 4, 0, 0, 0, 0) + masks
    assert "bitfields" in refused(b"BM" + struct.pack("<IHHI", 70, 0, 0, 66) + head + bytes(4))


def test_avif_goes_by_compatible_brands() -> None:
    data = encoded(picture(), "AVIF").replace(b"ftypavif", b"ftypmif1", 1)
    assert is_confined(data)
    assert np.array_equal(decode_image(data, field="image", limits=ImageLimits()), Image.open(io.BytesIO(data)))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK"])
@pytest.mark.parametrize("compression", ["raw", "tiff_lzw", "tiff_adobe_deflate", "packbits"])
def test_tiffs_have_the_pixels_that_pillow_gives_them(mode: str, compression: str) -> None:
    """Turned, and of several pages the first."""
    options = {"compression": compression, "tiffinfo": {0x0112: 6}, "save_all": True}
    data = encoded(picture().convert(mode), "TIFF", append_images=[picture(9, 9)], **options)
    with Image.open(io.BytesIO(data)) as image:
        expected = ImageOps.exif_transpose(image).convert("RGB")
    assert np.array_equal(decode_image(data, field="image", limits=ImageLimits()), expected)


def test_tiffs_that_would_mislead_are_refused() -> None:
    made = partial(encoded, picture(), "TIFF")
    assert "compression zstd (50000); none, CCITT, LZW" in refused(made(compression="zstd"))
    assert "a camera's raw file" in refused(made(tiffinfo={50706: b"\1\4\0\0"}))
    assert "a camera's raw file" in refused(made(tiffinfo={254: 1}))
    assert "mode F" in refused(encoded(Image.new("F", (4, 4), 0.5), "TIFF"))
    assert "damaged" in refused(made()[:200])
    count = MAX_STRIPS + 1  # of a row each, all at one place
    tags = {256: 1, 257: count, 258: 8, 259: 1, 262: 1, 273: (count, 8), 277: 1, 278: 1}
    entries = ((tag, 4, *given) if isinstance(given, tuple) else (tag, 4, 1, given) for tag, given in tags.items())
    head = b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *one) for one in entries)
    assert "has 65537 strips or tiles: at most 65536 allowed" in refused(head + bytes(5 * count))


def test_run_length_bmps_are_refused() -> None:
    head = struct.pack("<IiiHHIIiiII", 40, 4, 4, 1, 8, 1, 4, 0, 0, 0, 0)
    said = refused(b"BM" + struct.pack("<IHHI", 70, 0, 0, 66) + head)
    assert said == "the image is a run-length BMP; convert it to PNG or JPEG"


def test_the_page_takes_what_is_read() -> None:
    page = (ROOT / "service/page/index.html").read_text()
    found = re.search(r'id="files" type="file" accept="([^"]*)"', page)
    assert found is not None
    taken = [one.accept for one in FORMATS if one.accept and {"image", "video"} & set(one.readers)]
    assert found[1] == ",".join(taken)


def test_the_documentation_is_of_the_table() -> None:
    assert (ROOT / "docs/formats.md").read_text() == formats_page()
