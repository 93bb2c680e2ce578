"""Encoded picture -> RGB picture, with Pillow. Runs in a thread of the loader or in a decode worker.

Common JPEGs are decoded by simplejpeg, which calls the same library as Pillow, and so makes the same pixels, but leaves
them where NumPy can read them.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

import simplejpeg
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from models.errors import InputError
from service.media.bmp_run_lengths import use_for_bmp
from service.media.decoding_memory import decoding_bytes
from service.media.jpeg_limits import JPEG, check_scans, check_segments
from service.media.limits import ImageLimits
from service.media.orientation import upright_turn
from service.media.pixel_image import PixelImage
from service.media.png_chunks import PNG, without_metadata
from service.media.signatures import other_picture
from service.media.to_rgb import to_rgb

Admit = Callable[[int, int, int], None]
"""(width, height, size): of the picture as it is stored, and the most bytes that decoding it takes at a time."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")

BEGINNINGS = (JPEG, PNG, b"GIF8")
"""Of pictures that are supported: without the rest of its head, Pillow does not take a file for one."""
DAMAGED = "the image is damaged or truncated"

SMALL_SAMPLES = {"L;2": 85, "L;4": 17}
"""Pillow's names of grey samples of less than 8 bits, and what it multiplies them by."""
WIDE_SAMPLES = "RGB;16B"

TEXT_TOO_LARGE = "MAX_TEXT_CHUNK"
"""In Pillow's message about a compressed text or colour profile of more than a megabyte."""

# Pillow warns of every fault of a picture's metadata: a client could fill the log, by a line for each of 65,536 tags.
warnings.filterwarnings("ignore", module=r"PIL\.")
# It also warns above MAX_IMAGE_PIXELS and raises above twice that; here both are errors.
warnings.simplefilter("error", Image.DecompressionBombWarning)
use_for_bmp()


def load_decoders() -> None:
    """Imports Pillow's plugins. Pillow would import them with the first picture, all of them with the first unreadable
    one: 70 ms during which every stream waits."""
    Image.init()


def decode_image(data: bytes, *, field: str, limits: ImageLimits, admit: Admit | None = None) -> Image.Image:
    """Decodes a JPEG, PNG, WebP, GIF or BMP to an upright RGB picture.

    Of an animation the first frame, transparency on white, of 16-bit samples the high byte; the EXIF orientation is
    applied. JPEGs are decoded at full size, so pixels equal those of Image.open.
    admit: called before any pixel is decoded; may raise InputError.

    Raises InputError with `field` for other data and for pictures that are damaged, truncated or too large.
    """
    with open_image(data, field=field, limits=limits) as image:
        if admit is not None:
            admit(*image.size, decoding_bytes(image, data))
        return upright_picture(image, data, field=field)


def open_image(data: bytes, *, field: str, limits: ImageLimits) -> Image.Image:
    """The picture with its size, before any pixel is decoded. Raises like decode_image."""
    if not data:
        raise InputError(field, "the image is empty")
    if len(data) > limits.max_bytes:
        raise InputError(field, f"the image is too large: {len(data)} bytes given, at most {limits.max_bytes} allowed")
    check_segments(data, field)
    bare = without_metadata(data, field)
    try:
        image: Image.Image = Image.open(io.BytesIO(bare), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputError(field, f"the image is too large: at most {limits.max_pixels} pixels allowed") from error
    except Exception as error:  # plugins raise anything on hostile bytes; their texts may have memory addresses
        _refuse_large_text(error, field)
        if data.startswith(BEGINNINGS) or (data.startswith(b"RIFF") and data[8:12] == b"WEBP"):
            raise InputError(field, DAMAGED) from error
        reason = f"the image is {name}" if (name := other_picture(data)) else "not readable as an image"
        raise InputError(field, f"{reason}; JPEG, PNG, WebP, GIF and BMP are supported") from error
    width, height = image.size
    if width < 1 or height < 1:
        raise InputError(field, f"the image is {width} x {height} pixels; each side needs at least one")
    if width * height > limits.max_pixels:
        raise InputError(
            field, f"the image is too large: {width} x {height} pixels given, at most {limits.max_pixels} allowed"
        )
    check_scans(data, width * height, limits.max_pixels, field)
    return image


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
