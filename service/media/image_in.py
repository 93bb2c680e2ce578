"""Pictures decoded in a worker process instead of the API process, which has keys and connections
(--isolate-images)."""

from __future__ import annotations

import numpy as np
from PIL import Image

from models.interfaces.errors import InputError
from service.confined.channel import ProtocolError, WorkerChannel
from service.media.decoding_memory import MOST_BYTES, RGB_BYTES
from service.media.image_decode import Admit
from service.media.limits import ImageLimits
from service.media.messages import ImageOpened, OpenImage, Pixels, ReadPixels, expect
from service.media.pixel_image import PixelImage


def read_image(
    channel: WorkerChannel,
    data: bytes,
    *,
    field: str,
    limits: ImageLimits,
    admit: Admit | None = None,
) -> Image.Image:
    """What service.media.image_decode.decode_image returns and raises, decoded by the worker behind `channel`."""
    if len(data) > limits.max_bytes:
        raise InputError(field, f"the image is too large: {len(data)} bytes given, at most {limits.max_bytes} allowed")
    channel.send(OpenImage(field, limits), data)
    opened = expect(channel.receive(), ImageOpened)
    size = opened.width, opened.height
    if min(size) < 1 or opened.width * opened.height > limits.max_pixels:
        raise ProtocolError(f"a picture of {size}")
    pixels = opened.width * opened.height
    if not RGB_BYTES * pixels <= opened.decoding_bytes <= MOST_BYTES * pixels:
        raise ProtocolError(f"{opened.decoding_bytes} bytes for a picture of {size}")
    if admit is not None:
        admit(*size, opened.decoding_bytes)
    channel.send(ReadPixels())
    upright = expect(channel.receive(), Pixels)
    if (upright.width, upright.height) not in (size, size[::-1]):
        raise ProtocolError(f"pixels of {upright.width} x {upright.height} for a picture of {size}")
    array = np.empty((upright.height, upright.width, 3), np.uint8)
    channel.receive_into(array.data.cast("B"))
    return PixelImage(array)
