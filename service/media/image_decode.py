"""Encoded picture -> RGB picture, with Pillow. Runs in a thread of the loader or in a decode worker, which `read_image`
asks for it (--isolate-images).

Common JPEGs are decoded by simplejpeg, which calls the same library as Pillow, and so makes the same pixels, but leaves
them where NumPy can read them.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import simplejpeg
from PIL import AvifImagePlugin, Image
from PIL.JpegImagePlugin import MARKER
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import COMPRESSION_INFO, TiffImageFile

from models.interfaces.errors import InputError
from service.confined.channel import ProtocolError, WorkerChannel
from service.media.file_formats import recognise, refusal
from service.media.messages import ImageLimits, ImageOpened, OpenImage, Pixels, ReadPixels, check_size, expect

PNG = b"\x89PNG\r\n\x1a\n"
LAST_CHUNK = b"IEND"
KEPT_CHUNKS = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"eXIf", b"acTL", b"fcTL", b"fdAT"})
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
        if kind not in KEPT_CHUNKS and not (kind in TEXTS and _name(data, place) in ORIENTING):
            kept.append(view[start:place])
            start = end
        place = end
    raise InputError(field, f"the image has too many chunks: at most {MAX_CHUNKS} allowed")


def _name(data: bytes, place: int) -> bytes:
    """Of the text in the chunk at `place`: up to 79 bytes, and a zero behind them."""
    return data[place + HEAD : place + HEAD + 80].partition(b"\0")[0]


ORIENTATION = 0x0112
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def upright_turn(image: Image.Image) -> Image.Transpose | None:
    """What makes the picture upright, None if it is. Of a PNG it decodes the pixels: they may come first."""
    orientation = image.getexif().get(ORIENTATION, 1)
    return UPRIGHT.get(orientation) if isinstance(orientation, int) else None


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
    count, filling = _segments(data)
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


def _segments(data: bytes) -> tuple[int, int]:
    """Number of segments before the first scan, and of markers that have no place there, as Pillow finds them; it is
    not counted beyond MAX_SEGMENTS + 1. And the number of bytes between them."""
    count, filling, place = 0, 0, len(JPEG)
    while count <= MAX_SEGMENTS:
        if (found := MARKER_AHEAD.search(data, place)) is None:
            return count, filling + max(0, len(data) - place)
        filling += found.start() - place
        marker, place = _marker(data, found), found.end()
        if marker == START_OF_SCAN or (marker not in MARKER and marker != ESCAPED):
            break  # others are refused by Pillow
        count += 1
        if marker in MARKER and MARKER[marker][2] is not None:
            place += _length(data, place)
    return count, filling


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


DECODING_BYTES = 16
"""The most that a pixel takes until it is RGB, in any format: of a WebP libwebp's two canvases, the bytes that it hands
over and Pillow's picture, four each. What grows with a row or a tile is not counted."""


class PixelImage(Image.Image):
    """An RGB picture for Pillow; NumPy reads its pixels where they are. pixels: uint8 [height, width, 3]."""

    def __init__(self, pixels: np.ndarray) -> None:
        super().__init__()
        height, width, _ = pixels.shape
        self._mode, self._size = "RGB", (width, height)
        self._pixels: np.ndarray | None = pixels

    def load(self) -> Any:
        """Everything of Pillow that reads or changes pixels calls it first. Its copy is the picture from then on."""
        if self._pixels is not None:
            self.im = Image.fromarray(self._pixels).im
            self._pixels = None
        return super().load()

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return super().__array_interface__ if self._pixels is None else self._pixels.__array_interface__


NEW_SUBFILE_TYPE, COMPRESSION, DNG_VERSION = 254, 259, 50706
MAX_STRIPS = 65_536
"""Or tiles of a TIFF: Pillow decodes each on its own, however small."""
COMPRESSIONS = {1: "none", 2: "CCITT", 3: "CCITT", 4: "CCITT", 5: "LZW", 7: "JPEG", 8: "Deflate"} | {
    32773: "PackBits",
    32946: "Deflate",
}
"""Others of libtiff are rare, and further decoders: old JPEG, LZMA, Zstandard, WebP and more."""
MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "I;16", "I;16B"})
BITS, PHOTOMETRIC, WHITE_IS_ZERO = 258, 262, 0


def check_tiff(image: TiffImageFile, field: str) -> None:
    """InputError for raw files, and for compressions and samples that are not read or would get wrong colours."""
    tags, mode = image.tag_v2, image.mode
    try:
        raw = DNG_VERSION in tags or tags.get(NEW_SUBFILE_TYPE, 0) & 1
        compression, bits = tags.get(COMPRESSION, 1), max(tags.get(BITS, (1,)))
    except Exception as error:  # values are read only now, and may be of any type
        raise InputError(field, DAMAGED) from error
    if raw:
        raise InputError(field, "the image is a camera's raw file; convert it to PNG or JPEG")
    if compression not in COMPRESSIONS:
        names = ", ".join(dict.fromkeys(COMPRESSIONS.values()))
        given = COMPRESSION_INFO.get(compression, "unknown").removeprefix("tiff_")
        raise InputError(field, f"the TIFF has the compression {given} ({compression}); {names} are supported")
    if mode not in MODES or (mode.startswith("I") and (bits != 16 or tags.get(PHOTOMETRIC) == WHITE_IS_ZERO)):
        raise InputError(field, f"the TIFF has samples of {bits} bits in mode {mode}; convert it to PNG or JPEG")
    if (count := len(image.tile)) > MAX_STRIPS:
        raise InputError(field, f"the TIFF has {count} strips or tiles: at most {MAX_STRIPS} allowed")


def to_rgb(image: Image.Image) -> Image.Image:
    """The picture, with transparency on white and the high byte of 16-bit samples."""
    if image.mode.startswith("I"):
        # convert() would clip 16-bit samples to 255 instead of scaling them, and leave the transparent one.
        samples = np.asarray(image)
        grey = (samples >> 8).clip(0, 255).astype(np.uint8)
        grey[samples == image.info.get("transparency", -1)] = 255
        return Image.fromarray(grey).convert("RGB")
    if image.has_transparency_data:
        rgba = image if image.mode == "RGBA" else image.convert("RGBA")
        white = Image.new("RGB", rgba.size, "white")
        white.paste(rgba, mask=rgba)
        return white
    return image if image.mode == "RGB" else image.convert("RGB")


Admit = Callable[[int, int], None]
"""(width, height) of the picture as it is stored, of whose pixels each takes at most DECODING_BYTES."""

DAMAGED = "the image is damaged or truncated"
UNUSUAL = ("cannot handle ", "Unsupported BMP ", "unknown pixel mode", "unknown data organization")
"""How Pillow's messages begin about JPEGs of 12 bits, BMPs with other bit fields or depths, and such TIFFs."""

SMALL_SAMPLES = {"L;2": 85, "L;4": 17}
"""Pillow's names of grey samples of less than 8 bits, and what it multiplies them by."""
WIDE_SAMPLES = "RGB;16B"

TEXT_TOO_LARGE = "MAX_TEXT_CHUNK"
"""In Pillow's message about a compressed text or colour profile of more than a megabyte."""

# Pillow warns of every fault of a picture's metadata: a client could fill the log, by a line for each of 65,536 tags.
warnings.filterwarnings("ignore", module=r"PIL\.")
AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # each would take address space of the worker, one for each CPU
# It also warns above MAX_IMAGE_PIXELS and raises above twice that; here both are errors.
warnings.simplefilter("error", Image.DecompressionBombWarning)


def load_decoders() -> None:
    """Imports Pillow's plugins. Pillow would import them with the first picture, all of them with the first unreadable
    one: 70 ms during which every stream waits."""
    Image.init()


def decode_image(data: bytes, *, field: str, limits: ImageLimits, admit: Admit | None = None) -> Image.Image:
    """Decode a picture of a format in the table of file_formats to an upright RGB picture.

    Of an animation or a TIFF of several pages the first one, transparency on white, of 16-bit samples the high byte.
    admit: called before any pixel is decoded; may raise InputError. InputError with `field` for other data and for
    pictures that are damaged, truncated or too large.
    """
    with open_image(data, field=field, limits=limits) as image:
        if admit is not None:
            admit(*image.size)
        return upright_picture(image, data, field=field)


def open_image(data: bytes, *, field: str, limits: ImageLimits) -> Image.Image:
    """The picture with its size, before any pixel is decoded. Raises like decode_image."""
    if not data:
        raise InputError(field, "the image is empty")
    check_size(data, limits.max_bytes, "image", field)
    check_segments(data, field)
    found = recognise(data)
    if found is None or "image" not in found.readers:
        raise InputError(field, refusal(data, "image"))
    name = found.readers["image"]
    bare = without_metadata(data, field)
    try:
        image: Image.Image = Image.open(io.BytesIO(bare), formats=(name,))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputError(field, f"the image is too large: at most {limits.max_pixels} pixels allowed") from error
    except Exception as error:  # plugins raise anything on hostile bytes; their texts may have memory addresses
        _refuse_large_text(error, field)
        raise InputError(field, _unusual(bare, name) or refusal(data, "image")) from error
    width, height = image.size
    if width < 1 or height < 1:
        raise InputError(field, f"the image is {width} x {height} pixels; each side needs at least one")
    if width * height > limits.max_pixels:
        raise InputError(
            field, f"the image is too large: {width} x {height} pixels given, at most {limits.max_pixels} allowed"
        )
    check_scans(data, width * height, limits.max_pixels, field)
    if data.startswith(PNG) and LAST_CHUNK not in data:  # as Pillow does for a JPEG without its end
        raise InputError(field, DAMAGED)
    if isinstance(image, TiffImageFile):
        check_tiff(image, field)
    return image


def _unusual(data: bytes, name: str) -> str:
    """What Pillow does not read of a format that it reads, in its words; empty for other faults."""
    try:
        Image.OPEN[name][0](io.BytesIO(data), "")
    except Exception as error:
        reason = str(error)
        if reason.startswith(UNUSUAL):
            return f"the image is an unusual {name} ({reason}); convert it to an 8-bit PNG or JPEG"
    return ""


def upright_picture(image: Image.Image, data: bytes, *, field: str) -> Image.Image:
    """Decodes a picture that open_image opened from `data`. Raises like decode_image."""
    try:
        picture = _jpeg(image, data)
        if picture is None:
            _scale_transparent_colour(image)
            image.load()
            picture = image
        if (turn := upright_turn(image)) is not None:
            picture = picture.transpose(turn)
            image.close()  # its pixels, which would take memory beside those of to_rgb
        return to_rgb(picture)
    except Exception as error:  # as above: decoders raise OSError, SyntaxError, struct.error, ValueError, ...
        _refuse_large_text(error, field)
        raise InputError(field, DAMAGED) from error


def _refuse_large_text(error: Exception, field: str) -> None:
    if TEXT_TOO_LARGE in str(error):
        raise InputError(field, "the image has a compressed text of more than 1 MB; send it without") from error


def _jpeg(image: Image.Image, data: bytes) -> Image.Image | None:
    """None where Pillow is to decode it: no JPEG of three colours, or one with faults, which Pillow can judge."""
    if image.format != "JPEG" or image.mode != "RGB":
        return None
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
        return PixelImage(simplejpeg.decode_jpeg(data)) if (width, height) == image.size else None
    except ValueError:
        return None


def _scale_transparent_colour(image: Image.Image) -> None:
    """Scales the one transparent colour that a PNG may name as Pillow scales its samples; Pillow compares it as it is,
    and finds no pixel of it."""
    colour = image.info.get("transparency")
    if not isinstance(image, PngImageFile) or colour is None or not image.tile:
        return
    samples = image.tile[0].args
    if samples == WIDE_SAMPLES:
        image.info["transparency"] = tuple(value >> 8 for value in colour)
    elif samples in SMALL_SAMPLES:
        image.info["transparency"] = colour * SMALL_SAMPLES[samples]


def read_image(
    channel: WorkerChannel, data: bytes, *, field: str, limits: ImageLimits, admit: Admit | None = None
) -> Image.Image:
    """What service.media.image_decode.decode_image returns and raises, decoded by the worker behind `channel`."""
    check_size(data, limits.max_bytes, "image", field)
    channel.send(OpenImage(field, limits), data)
    opened = expect(channel.receive(), ImageOpened)
    size = opened.width, opened.height
    if min(size) < 1 or opened.width * opened.height > limits.max_pixels:
        raise ProtocolError(f"a picture of {size}")
    if admit is not None:
        admit(*size)
    channel.send(ReadPixels())
    upright = expect(channel.receive(), Pixels)
    if (upright.width, upright.height) not in (size, size[::-1]):
        raise ProtocolError(f"pixels of {upright.width} x {upright.height} for a picture of {size}")
    array = np.empty((upright.height, upright.width, 3), np.uint8)
    channel.receive_into(array.data.cast("B"))
    return PixelImage(array)
