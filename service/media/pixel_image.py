"""A picture whose pixels lie in an array of three bytes each, which Pillow copies to four when it needs them."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image


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
