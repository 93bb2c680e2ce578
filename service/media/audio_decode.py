"""Clip bytes -> mono samples. Runs in a decode worker."""

from __future__ import annotations

import numpy as np

from service.media.limits import AudioLimits


def decode_clip(data: bytes, *, sample_rate: int, field: str, limits: AudioLimits) -> np.ndarray:
    raise NotImplementedError
