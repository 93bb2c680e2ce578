"""Feigned speakers: the spectra of a voice as another mouth, another pitch and another room would make them.

A frame's log spectrum is parted into its envelope, a short cosine series, and the rest, which is mostly the harmonics
of the pitch. The frequencies of both are stretched independently of each other, so that a man's voice is heard as a
woman's or a child's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Ranges:
    """mouth, pitch: smallest and largest factor of the envelope's and of the harmonics' frequencies; bend: deviation of
    the mouth's factor from knot to knot; gain: of the spectrum's smooth change in nepers; noise: smallest and largest
    level in nepers below the utterance's mean power."""

    mouth: tuple[float, float] = (0.78, 1.35)
    pitch: tuple[float, float] = (0.6, 2.2)
    bend: float = 0.06
    gain: float = 0.5
    depth: tuple[float, float] = (0.5, 1.2)
    noise: tuple[float, float] = (1.5, 7.0)


_KNOTS = 7
_RANGES = Ranges()


def between(low: float, high: float, count: int, device: torch.device) -> Tensor:
    """Factors, evenly drawn in their logarithms. -> [count, 1]."""
    return torch.exp(math.log(low) + (math.log(high) - math.log(low)) * torch.rand(count, 1, device=device))


def curve(knots: Tensor, size: int) -> Tensor:
    """[N, knots] -> [N, size], straight lines between the knots."""
    return F.interpolate(knots[:, None], size=size, mode="linear", align_corners=True)[:, 0]


def series(log: Tensor, order: int) -> Tensor:
    """Log spectra [N, T, bins] -> their first cosine coefficients [N, T, order], the higher ones fading."""
    coefficients = torch.fft.irfft(log, 2 * (log.shape[2] - 1))[..., :order]
    k = torch.arange(order, device=log.device)
    fading = 0.5 + 0.5 * torch.cos(math.pi * ((k / order - 0.6) / 0.4).clamp(0.0, 1.0))
    return coefficients * fading * torch.where(k == 0, 1.0, 2.0)


def envelope(coefficients: Tensor, places: Tensor) -> Tensor:
    """coefficients [N, T, order], places [N, bins], 0 to 1 for the whole band -> [N, T, bins]."""
    k = torch.arange(coefficients.shape[2], device=places.device)
    return coefficients @ torch.cos(math.pi * k[:, None] * places[:, None, :])


def moved(fine: Tensor, places: Tensor) -> Tensor:
    """fine [N, T, bins] as it is at other places [N, bins], 0 to 1; mirrored behind the band's end."""
    last = fine.shape[2] - 1
    at = (1.0 - (1.0 - places.remainder(2.0)).abs()) * last
    low = at.floor().clamp(0, last - 1).long()
    part = (at - low)[:, None, :]
    low = low[:, None, :].expand(-1, fine.shape[1], -1)
    return fine.gather(2, low) * (1.0 - part) + fine.gather(2, low + 1) * part


def disguise(log: Tensor, ranges: Ranges = _RANGES) -> Tensor:
    """Log magnitudes [N, T, bins] -> those of as many other speakers."""
    count, _, bins = log.shape
    device = log.device
    coefficients = series(log, int(torch.randint(20, 40, (1,))))
    bands = torch.linspace(0.0, 1.0, bins, device=device)
    fine = log - envelope(coefficients, bands.expand(count, -1))
    bend = torch.exp(ranges.bend * torch.randn(count, _KNOTS, device=device))
    steps = curve(bend, bins) / between(*ranges.mouth, count, device)
    places = (steps.cumsum(1) - steps[:, :1]) / (bins - 1)
    out = envelope(coefficients, places.clamp(max=1.0))
    depth = between(*ranges.depth, count, device)[..., None]
    out = out + depth * moved(fine, bands / between(*ranges.pitch, count, device))
    out = out + curve(ranges.gain * torch.randn(count, _KNOTS, device=device), bins)[:, None]
    return noisy(out, ranges)


def noisy(log: Tensor, ranges: Ranges) -> Tensor:
    """With noise of a random colour and level."""
    count, _, bins = log.shape
    level = 0.5 * (2.0 * log).exp().mean((1, 2)).log()[:, None]
    low, high = ranges.noise
    level = level - low - (high - low) * torch.rand(count, 1, device=log.device)
    colour = level + curve(0.7 * torch.randn(count, _KNOTS, device=log.device), bins)
    # The magnitude of Gaussian noise has Rayleigh's distribution.
    hiss = colour[:, None] + 0.5 * torch.empty_like(log).exponential_().clamp(min=1e-6).log()
    return torch.logaddexp(2.0 * log, 2.0 * hiss) * 0.5
