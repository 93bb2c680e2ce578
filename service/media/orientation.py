"""Which side of a picture is up, as its EXIF or XMP says."""

from __future__ import annotations

from PIL import Image

from service.media.png_chunks import ORIENTING

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
