"""Decoded picture of any mode -> RGB, in tiles: nothing of the picture's size is made but its pixels of three bytes."""

from __future__ import annotations

import numpy as np
from PIL import Image

from service.media.pixel_image import PixelImage

TILE_PIXELS = 1 << 18
"""Small enough that a tile's intermediates stay in the processor's cache, and that they need not be counted."""


def to_rgb(image: Image.Image) -> Image.Image:
    """The picture, with transparency on white and the high byte of 16-bit samples. One that is RGB is returned as it
    is."""
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    width, height = image.size
    pixels = np.empty((height, width, 3), np.uint8)
    columns = min(width, TILE_PIXELS)
    rows = TILE_PIXELS // columns
    for top in range(0, height, rows):
        for left in range(0, width, columns):
            right, bottom = min(left + columns, width), min(top + rows, height)
            pixels[top:bottom, left:right] = _tile(image.crop((left, top, right, bottom)))
    return PixelImage(pixels)


def _tile(image: Image.Image) -> np.ndarray:
    """uint8 [height, width, 3], or [height, width, 1] if it is grey."""
    if image.mode.startswith("I"):
        # convert() would clip 16-bit samples to 255 instead of scaling them, and leave the transparent one.
        samples = np.asarray(image)
        grey = (samples >> 8).clip(0, 255).astype(np.uint8)
        grey[samples == image.info.get("transparency", -1)] = 255
        return grey[..., None]
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return np.asarray(image.convert("RGB"))
