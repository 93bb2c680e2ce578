"""The log-mel spectrogram of Whisper with 128 bands, on the encoder's device in float32."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.precision import without_tf32
from models.qwen3_asr.config import HOP, MEL_BANDS, N_FFT, SAMPLE_RATE

_BLOCK = 6000
"""Frames that are transformed at a time: one minute, 20 MB of spectra."""
_RANGE = 8.0
"""Powers of ten below the loudest value of an item that its quietest ones are raised to."""


class LogMel(nn.Module):
    """Samples float32 [n] at 16 kHz -> features float32 [128, n // 160].

    The floor depends on the loudest value, so features are those of a whole item. The transform is a GEMM with the
    window folded in: it has no plan for each length, as an FFT has, and is as exact unless TF32 rounds its inputs.
    """

    dft: Tensor
    filters: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("dft", torch.from_numpy(windowed_dft()), persistent=False)
        self.register_buffer("filters", torch.from_numpy(mel_filters()), persistent=False)

    def forward(self, samples: Tensor) -> Tensor:
        around = F.pad(samples[None], (N_FFT // 2, N_FFT // 2), mode="reflect")[0]
        frames = around.unfold(0, N_FFT, HOP)[: samples.shape[0] // HOP]  # the last frame is dropped
        with without_tf32():
            bands = torch.cat([self._bands(block) for block in frames.split(_BLOCK)])
        levels = bands.clamp(min=1e-10).log10()
        return (torch.maximum(levels, levels.max() - _RANGE).T + 4.0) / 4.0

    def _bands(self, frames: Tensor) -> Tensor:
        real, imaginary = (frames @ self.dft).chunk(2, dim=1)
        return (real.square() + imaginary.square()) @ self.filters


def windowed_dft() -> np.ndarray:
    """Real, then imaginary part of 201 frequencies, times a periodic Hann window: float32 [400, 402]."""
    sample = np.arange(N_FFT)
    angles = 2 * np.pi * np.outer(sample, np.arange(N_FFT // 2 + 1)) / N_FFT
    window = 0.5 - 0.5 * np.cos(2 * np.pi * sample / N_FFT)
    return (window[:, None] * np.concatenate((np.cos(angles), -np.sin(angles)), axis=1)).astype(np.float32)


def mel_filters() -> np.ndarray:
    """Triangles of Slaney's mel scale up to 8 kHz, of equal area: float32 [201, 128]."""
    top = float(_mel(SAMPLE_RATE / 2))
    corners = _hertz(np.linspace(0.0, top, MEL_BANDS + 2))
    lower, center, upper = corners[:-2], corners[1:-1], corners[2:]
    bins = np.linspace(0.0, SAMPLE_RATE / 2, N_FFT // 2 + 1)[:, None]
    triangles = np.minimum((bins - lower) / (center - lower), (upper - bins) / (upper - center)).clip(min=0.0)
    return (triangles * 2 / (upper - lower)).astype(np.float32)


_LINEAR_MELS = 15.0
"""Mels up to which the scale is linear, at 1000 Hz."""
_LOG_STEP = np.log(6.4) / 27


def _mel(hertz: float) -> float:
    return _LINEAR_MELS + np.log(hertz / 1000.0) / _LOG_STEP


def _hertz(mels: np.ndarray) -> np.ndarray:
    return np.where(
        mels < _LINEAR_MELS, mels * 1000.0 / _LINEAR_MELS, 1000.0 * np.exp((mels - _LINEAR_MELS) * _LOG_STEP)
    )
