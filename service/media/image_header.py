"""What is known of a picture before its pixels are decoded: how much memory that takes, and what of it is needed to see
it. The rest may cost more than the picture: Pillow keeps copies of every text, and refuses pictures with a large
compressed one."""

from __future__ import annotations

import re

from PIL import Image
from PIL.JpegImagePlugin import MARKER, JpegImageFile
from PIL.TiffImagePlugin import TiffImageFile

from models.interfaces.errors import InputError

PNG = b"\x89PNG\r\n\x1a\n"
LAST_CHUNK = b"IEND"
NEEDED = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"eXIf", b"acTL", b"fcTL", b"fdAT"})
TEXTS = frozenset({b"tEXt", b"zTXt", b"iTXt"})
ORIENTING = (b"exif", b"Raw profile type exif", b"XML:com.adobe.xmp")
"""Names of texts that may say which side is up."""
KIND = re.compile(rb"\w{4}")
"""What Pillow takes for a kind of chunk; the standard has letters alone."""
HEAD, TAIL = 8, 4
"""Bytes of a chunk before and behind its data: length and kind, and the checksum."""
MAX_CHUNKS = 100_000
"""20 MB have room for 1.6 million empty ones, which took four seconds."""


def without_metadata(data: bytes, field: str) -> bytes:
    """A PNG without its metadata, but for what may turn the picture; other data as it is. InputError for too many
    chunks. What cannot be read as a chunk stays, so that Pillow can judge it."""
    if not data.startswith(PNG):
        return data
    kept: list[memoryview] = []
    view, start, place = memoryview(data), 0, len(PNG)
    for _ in range(MAX_CHUNKS):
        kind = data[place + 4 : place + HEAD]
        end = place + HEAD + int.from_bytes(data[place : place + 4], "big") + TAIL
        if kind == LAST_CHUNK or not KIND.fullmatch(kind) or end > len(data):
            return b"".join([*kept, view[start:]]) if kept else data
        if kind not in NEEDED and not (kind in TEXTS and _name(data, place) in ORIENTING):
            kept.append(view[start:place])
            start = end
        place = end
    raise InputError(field, f"the image has too many chunks: at most {MAX_CHUNKS} allowed")


def _name(data: bytes, place: int) -> bytes:
    """Of the text in the chunk at `place`: up to 79 bytes, and a zero behind them."""
    return data[place + HEAD : place + HEAD + 80].partition(b"\0")[0]


ORIENTATION = 0x0112
"""Tag of EXIF."""
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
PNG_PIXELS = b"IDAT"
PNG_ORIENTING = (b"eXIf", *(name + b"\0" for name in ORIENTING))
"""Kind of a chunk of a PNG, and beginnings of its texts."""


def upright_turn(image: Image.Image) -> Image.Transpose | None:
    """What makes the picture upright, None if it is. Of a PNG it decodes the pixels: they may come first."""
    orientation = image.getexif().get(ORIENTATION, 1)
    return UPRIGHT.get(orientation) if isinstance(orientation, int) else None


def may_be_turned(image: Image.Image, data: bytes) -> bool:
    """Whether upright_turn may find a turn in a picture opened from `data`, before any pixel is decoded."""
    if image.format == "PNG":
        pixels = data.find(PNG_PIXELS)
        if any(data.find(name, pixels) >= 0 for name in PNG_ORIENTING):
            return True
    head = Image.Image()  # one of its own: `image` would keep what it found, and a PNG decode its pixels
    head.info = image.info
    try:
        return upright_turn(head) is not None
    except Exception:  # whatever a hostile file makes of it; it is refused where the picture is turned
        return True


JPEG, SCAN = b"\xff\xd8", b"\xff\xda"
MAX_SCANS, MAX_LARGE_SCANS = 500, 64
"""Of a JPEG, and of one with as many pixels as are allowed. Usual ones have one, or ten if they are progressive. A scan
may be a few bytes and still goes through all pixels: 20 MB of them would take most of an hour, 500 in a picture of 50
million pixels half a minute. The first number is that of libjpeg-turbo's own option."""
MAX_SEGMENTS = 500
"""Before the first scan, stray markers included. 20 MB have room for 320 full ones. Pillow keeps each, and copies what
it has of the EXIF data for every further piece, in time that grows with the square of their number."""
MAX_FILLING = 1_000_000
"""Bytes between segments before the first scan. Pillow goes through them one by one: 20 MB took five seconds."""
MOST_STEPS = 100_000
"""Segments that are looked at, scans among them."""

START_OF_SCAN, END_OF_IMAGE, ESCAPED = 0xFFDA, 0xFFD9, 0xFF00
WITHOUT_LENGTH = frozenset({0xFF01, 0xFFD8})
MARKER_AHEAD = re.compile(rb"\xff[^\xff]", re.DOTALL)
"""Behind the bytes that may fill the room before it. A pattern with these would go through a row of them from each one,
which takes hours where no marker follows."""
MARKER_BEHIND_SCAN = re.compile(rb"\xff[^\xff\x00\xd0-\xd7]", re.DOTALL)
"""What is no part of a scan's data."""


def check_segments(data: bytes, field: str) -> None:
    """InputError for too many segments of metadata, and for too much between them."""
    if not data.startswith(JPEG):
        return
    count, filling, _ = _segments(data)
    if count > MAX_SEGMENTS:
        raise InputError(field, f"the image has too many segments of metadata: at most {MAX_SEGMENTS} allowed")
    if filling > MAX_FILLING:
        raise InputError(field, f"the image has too many bytes between its segments: at most {MAX_FILLING} allowed")


def check_scans(data: bytes, pixels: int, max_pixels: int, field: str) -> None:
    """InputError for too many scans, each of which goes through all `pixels`."""
    most = min(MAX_SCANS, MAX_LARGE_SCANS * max_pixels // pixels)
    # Counted fast, with bytes that only look like a scan, as in what cameras append; then exactly where it matters.
    if data.startswith(JPEG) and data.count(SCAN) > most and (scans := _scans(data, field)) > most:
        raise InputError(field, f"the image has too many scans: {scans} given, at most {most} allowed at its size")


def components_of_first_scan(data: bytes) -> int:
    """How many of a JPEG's components its first scan has. If not all, libjpeg holds the coefficients of all of them."""
    place = _segments(data)[2] + 2  # behind the length of the scan's header
    return data[place] if place < len(data) else 0


def _segments(data: bytes) -> tuple[int, int, int]:
    """Number of segments before the first scan, and of markers that have no place there, as Pillow finds them; it is
    not counted beyond MAX_SEGMENTS + 1. Number of bytes between them. And the place behind the first scan's marker."""
    count, filling, place = 0, 0, len(JPEG)
    while count <= MAX_SEGMENTS:
        if (found := MARKER_AHEAD.search(data, place)) is None:
            return count, filling + max(0, len(data) - place), len(data)
        filling += found.start() - place
        marker, place = _marker(data, found), found.end()
        if marker == START_OF_SCAN or (marker not in MARKER and marker != ESCAPED):
            break  # others are refused by Pillow
        count += 1
        if marker in MARKER and MARKER[marker][2] is not None:
            place += _length(data, place)
    return count, filling, place


def _scans(data: bytes, field: str) -> int:
    """Number of scans up to the end of the picture, as libjpeg finds them. InputError for so many segments between them
    that they cannot be counted in a short time."""
    count, place = 0, len(JPEG)
    for _ in range(MOST_STEPS):
        found = MARKER_BEHIND_SCAN.search(data, place)
        if found is None or (marker := _marker(data, found)) == END_OF_IMAGE:
            return count
        place = found.end()
        if marker not in WITHOUT_LENGTH:
            count += marker == START_OF_SCAN
            place += _length(data, place)
    raise InputError(field, f"the image has too many segments between its scans: at most {MOST_STEPS} allowed")


def _marker(data: bytes, found: re.Match[bytes]) -> int:
    return int.from_bytes(data[found.end() - 2 : found.end()], "big")


def _length(data: bytes, place: int) -> int:
    return max(2, int.from_bytes(data[place : place + 2], "big"))


RGB_BYTES = 3
"""A pixel of RGB, and what every pixel is counted as at least. Pillow stores it in four bytes, and so do pictures count
that need no more than those at any time."""
PILLOW_RGB_BYTES = 4
STORED_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2}
"""A pixel of Pillow's modes; of all others 4."""
WEBP_BYTES = 16
"""libwebp's two canvases, the bytes that it hands over, and Pillow's picture: four each, transparent or not. AVIF: its
planes, of up to 8, and the same two."""
MOST_BYTES = 16
"""The most that a pixel takes, in any format."""
COEFFICIENT_BYTES = 2


def decoding_bytes(image: Image.Image, data: bytes) -> int:
    """The most bytes that `image`, opened from `data` and not loaded, takes until it is an upright RGB picture. Counted
    for its size, without what grows with a row or a tile."""
    pixels = image.width * image.height
    each = _bytes_of_a_pixel(image, data)
    return int(pixels * (each if each > PILLOW_RGB_BYTES else RGB_BYTES))


def _bytes_of_a_pixel(image: Image.Image, data: bytes) -> float:
    if image.format in ("WEBP", "AVIF"):
        return WEBP_BYTES
    if image.mode == "RGB" and not image.has_transparency_data:
        decoded, converted, held = RGB_BYTES, RGB_BYTES, PILLOW_RGB_BYTES
    else:
        decoded = held = STORED_BYTES.get(image.mode, 4)
        converted = decoded + RGB_BYTES  # to_rgb
    turned = 2 * held if may_be_turned(image, data) else 0  # before it is converted
    if isinstance(image, TiffImageFile):  # a strip may be all rows, of 16 bits a sample; turned as it is loaded
        decoded, turned = 3 * held, 2 * held
    return max(converted, decoded + _coefficients(image, data), turned)


def _coefficients(image: Image.Image, data: bytes) -> float:
    """Bytes a pixel that libjpeg holds until it has read all scans of a picture, if one scan is not the whole of it."""
    if not isinstance(image, JpegImageFile):
        return 0.0
    if "progressive" not in image.info and components_of_first_scan(data) >= image.layers:
        return 0.0
    factors = [(across, down) for _, across, down, _ in image.layer[-image.layers :]]
    if not factors:
        return 0.0  # a damaged header that names no components, which libjpeg refuses
    most = max(across for across, _ in factors) * max(down for _, down in factors)
    return COEFFICIENT_BYTES * sum(across * down for across, down in factors) / max(1, most)
