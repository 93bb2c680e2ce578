"""How much memory a picture takes while it is decoded, known from its header."""

from __future__ import annotations

from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import TiffImageFile

from service.media.jpeg_limits import components_of_first_scan
from service.media.orientation import may_be_turned

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
