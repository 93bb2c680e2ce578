"""Resizing on a GPU: every byte is that of the reference."""

from __future__ import annotations

import pytest
import torch

from models.interfaces.resizing import bicubic_weights
from models.layers.resample import resample
from tests.models.kernels.checking import replayed


@pytest.mark.parametrize(
    ("lines", "length", "new_length", "values"), [(5, 60, 90, 3), (2, 90, 37, 33), (1, 1, 9, 3), (3, 700, 64, 3)]
)
def test_resample(device: torch.device, lines: int, length: int, new_length: int, values: int) -> None:
    pixels = torch.randint(0, 256, (lines, length, values), dtype=torch.uint8, device=device)
    pixels[:, length // 2 :] = 255 * (pixels[:, length // 2 :] > 127)  # sums beyond both ends of a byte
    first, weights = (torch.from_numpy(array).to(device) for array in bicubic_weights(length, new_length))
    out = replayed(device, lambda: resample.kernel(pixels, first, weights))
    assert torch.equal(out, resample.reference(pixels, first, weights))
