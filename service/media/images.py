"""Encoded picture -> RGB picture. Runs in a bounded thread; Pillow lets go of the interpreter lock while it decodes."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

import numpy as np
from PIL import Image

from models.errors import InputError
from service.media.limits import ImageLimits

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")

EXIF_ORIENTATION = 0x0112
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# Pillow warns above MAX_IMAGE_PIXELS and refuses above twice that; both are a refusal here.
warnings.simplefilter("error", Image.DecompressionBombWarning)


def load_decoders() -> None:
    """Pillow would import them with the first picture, and those of all its formats with the first that is none: 70 ms
    for which every stream has to wait."""
    Image.init()


def decode_image(
    data: bytes, *, field: str, limits: ImageLimits, admit: Callable[[int, int], None] | None = None
) -> Image.Image:
    """Decodes a JPEG, PNG, WebP, GIF or BMP to an upright RGB picture.

    Animations give their first frame, transparency is laid on white, 16-bit samples keep their high byte, and the
    EXIF orientation is applied. JPEGs are decoded at full size: pixels equal those of a plain Image.open.
    admit: called with width and height before any pixel is decoded; may raise InputError.

    Raises InputError with `field` for anything that is not such a picture, is damaged or cut short, or is too large.
    """
    if not data:
        raise InputError(field, "the image is empty")
    if len(data) > limits.max_bytes:
        raise InputError(field, f"the image has {len(data)} bytes; at most {limits.max_bytes} are accepted")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputError(field, f"the image has more than {limits.max_pixels} pixels") from error
    except Exception as error:  # a plugin raises what it likes on hostile bytes; its text may hold addresses
        raise InputError(field, "not a readable image; JPEG, PNG, WebP, GIF and BMP are accepted") from error
    with image:
        width, height = image.size
        if width < 1 or height < 1:
            raise InputError(field, f"the image is {width} x {height}; each side must have at least one pixel")
        if width * height > limits.max_pixels:
            raise InputError(
                field, f"the image has {width} x {height} pixels; at most {limits.max_pixels} pixels are accepted"
            )
        if admit is not None:
            admit(width, height)
        try:
            image.load()
            orientation = image.getexif().get(EXIF_ORIENTATION, 1)
            picture = _to_rgb(image)
        except Exception as error:  # as above: decoders raise OSError, SyntaxError, struct.error, ValueError, ...
            raise InputError(field, "the image is damaged or cut short") from error
    transpose = UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return picture if transpose is None else picture.transpose(transpose)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # convert() would clip 16-bit samples to 255, not scale them.
        samples = np.asarray(image).astype(np.int64) >> 8
        return Image.fromarray(samples.clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")  # which copies what is RGB already
