"""Between 16 and 48 kHz, by a windowed sinc on the device of the wave."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

_FACTOR, _REACH = 3, 16
"""48 kHz over 16 kHz; samples at 16 kHz on either side of the filter."""


@functools.cache
def _filter(device: torch.device) -> Tensor:
    half = _FACTOR * _REACH
    places = torch.arange(-half, half + 1, device=device, dtype=torch.float32)
    window = torch.cos(places * (torch.pi / (2 * (half + 1)))).square()
    taps = torch.sinc(0.97 * places / _FACTOR) * window
    return (taps / taps.sum())[None, None]


def up(wave: Tensor) -> Tensor:
    """16 kHz [N, T] -> 48 kHz [N, 3 T]."""
    half, length = _FACTOR * _REACH, _FACTOR * wave.shape[1]
    with torch.autocast(wave.device.type, enabled=False):
        out = F.conv_transpose1d(wave.float()[:, None], _FACTOR * _filter(wave.device), stride=_FACTOR)[:, 0]
    return F.pad(out, (0, _FACTOR))[:, half : half + length]


def down(wave: Tensor) -> Tensor:
    """48 kHz [N, 3 T] -> 16 kHz [N, T]."""
    half = _FACTOR * _REACH
    with torch.autocast(wave.device.type, enabled=False):
        return F.conv1d(F.pad(wave.float(), (half, half))[:, None], _filter(wave.device), stride=_FACTOR)[:, 0]
