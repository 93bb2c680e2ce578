"""ITU-T G.711: 16-bit samples as 8-bit mu-law (PCMU) and A-law (PCMA), as telephones use them."""

from __future__ import annotations

import numpy as np

RATE = 8000
"""Hz."""
MU_BIAS, MU_CLIP = 132, 32_635


def mu_law(samples: np.ndarray) -> bytes:
    """samples: int16 [n] -> n bytes."""
    wide = samples.astype(np.int32)
    sign = np.where(wide < 0, 0x80, 0)
    magnitude = np.minimum(np.abs(wide), MU_CLIP) + MU_BIAS
    segment = np.frexp(magnitude.astype(np.float32))[1] - 8  # the highest bit: 7 to 14
    step = (magnitude >> (segment + 3)) & 0x0F
    return bytes((~(sign | segment << 4 | step) & 0xFF).astype(np.uint8))


def a_law(samples: np.ndarray) -> bytes:
    """samples: int16 [n] -> n bytes."""
    wide = samples.astype(np.int32)
    # Even bits are inverted; the sign bit says that a sample is not negative.
    mask = np.where(wide < 0, 0x55, 0xD5)
    magnitude = np.where(wide < 0, ~wide, wide) >> 3
    segment = np.maximum(np.frexp(magnitude.astype(np.float32))[1] - 5, 0)
    step = (magnitude >> np.maximum(segment, 1)) & 0x0F
    return bytes(((segment << 4 | step) ^ mask).astype(np.uint8))
