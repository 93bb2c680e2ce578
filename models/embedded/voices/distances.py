"""How far made samples lie from the wanted ones: their spectra over windows of several lengths."""

from __future__ import annotations

import torch
from torch import Tensor, nn

NEAR = (128, 512, 1280)
"""Samples at 16 kHz."""
WIDE = (384, 1536)
"""At 48 kHz, where the upper half must stay silent."""

_QUIET = 0.05
"""Magnitudes below it count little: the gradients of roots and logarithms of silence know no bounds."""


def compressed(wave: Tensor, window: Tensor) -> Tensor:
    """Roots of magnitudes, as loud to the ear as they are large: [N, T] -> [N, frames, bins], four windows over every
    sample."""
    fft = len(window)
    spectrum = torch.fft.rfft(wave.unfold(1, fft, fft // 4) * window)
    return (spectrum.real.square() + spectrum.imag.square() + _QUIET**2) ** 0.25


class SpectralDistance(nn.Module):
    def __init__(self, sizes: tuple[int, ...]) -> None:
        """sizes: windows in samples."""
        super().__init__()
        self._sizes = sizes
        for size in sizes:
            self.register_buffer(f"window_{size}", torch.hann_window(size), persistent=False)

    def forward(self, made: Tensor, wanted: Tensor) -> Tensor:
        """Waves float32 [N, T] -> scalar, about 1 where nothing fits."""
        parts = []
        for size in self._sizes:
            a, b = (compressed(wave, getattr(self, f"window_{size}")) for wave in (made, wanted))
            parts.append((a - b).abs().mean() / (b - _QUIET**0.5).mean().clamp(min=0.1))
        return torch.stack(parts).mean()


def sample_distance(made: Tensor, wanted: Tensor) -> Tensor:
    """Mean distance of samples over the wanted ones' mean size."""
    return (made - wanted).abs().mean() / wanted.abs().mean().clamp(min=1e-3)
