"""Judges of waves at 16 kHz: one looks at periods (HiFi-GAN, arXiv:2010.05646), one at spectra (UnivNet,
arXiv:2106.07889), and the distances between spectra that a generator is pulled by."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from models.embedded.voices.latents import mel_filters

Judgement = tuple[Tensor, list[Tensor]]
"""A score and the features on the way to it."""


def _conv(width: int, out: int, kernel: tuple[int, int], stride: tuple[int, int], pad: tuple[int, int]) -> nn.Module:
    return weight_norm(nn.Conv2d(width, out, kernel, stride, padding=pad))


class _Judge(nn.Module):
    def __init__(self, layers: list[nn.Module], width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.score = _conv(width, 1, (3, 3), (1, 1), (1, 1))

    def judge(self, x: Tensor) -> Judgement:
        features = []
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.1)
            features.append(x)
        return self.score(x).flatten(1), features


class PeriodJudge(_Judge):
    def __init__(self, period: int, widths: tuple[int, ...] = (16, 48, 96, 160)) -> None:
        inputs = (1, *widths[:-1])
        layers = [_conv(a, b, (5, 1), (3, 1), (2, 0)) for a, b in zip(inputs, widths, strict=True)]
        super().__init__([*layers, _conv(widths[-1], widths[-1], (5, 1), (1, 1), (2, 0))], widths[-1])
        self.period = period

    def forward(self, wave: Tensor) -> Judgement:
        """wave [N, T]."""
        x = F.pad(wave, (0, -wave.shape[1] % self.period))
        return self.judge(x.view(len(x), 1, -1, self.period))


class SpectrumJudge(_Judge):
    window: Tensor

    def __init__(self, fft: int, width: int = 16) -> None:
        layers = [_conv(1, width, (3, 9), (1, 1), (1, 4))]
        layers += [_conv(width, width, (3, 9), (1, 2), (1, 4)) for _ in range(3)]
        super().__init__([*layers, _conv(width, width, (3, 3), (1, 1), (1, 1))], width)
        self.fft = fft
        self.register_buffer("window", torch.hann_window(fft), persistent=False)

    def forward(self, wave: Tensor) -> Judgement:
        spectrum = magnitudes(wave, self.fft, self.window)
        return self.judge((spectrum + 1e-4).log()[:, None])


class Judges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.judges = nn.ModuleList(
            [*(PeriodJudge(period) for period in (2, 3, 5, 7, 11)), *(SpectrumJudge(fft) for fft in (256, 1024))]
        )

    def forward(self, wave: Tensor) -> list[Judgement]:
        return [judge(wave) for judge in self.judges]


def magnitudes(wave: Tensor, fft: int, window: Tensor) -> Tensor:
    """wave [N, T] -> [N, frames, bins], four windows over every sample."""
    windows = wave.float().unfold(1, fft, fft // 4) * window
    return torch.fft.rfft(windows).abs()


class SpectralDistance(nn.Module):
    """Mean distance of mel spectra over windows of many lengths (DAC, arXiv:2306.06546): of logarithms, in decades, and
    of the magnitudes themselves, as parts of the real ones, which a loud mistake cannot hide from."""

    def __init__(self, rate: int, sizes: tuple[tuple[int, int], ...]) -> None:
        """sizes: windows in samples and how many mel bands each has."""
        super().__init__()
        self._sizes = sizes
        for fft, mels in sizes:
            self.register_buffer(f"window_{fft}", torch.hann_window(fft), persistent=False)
            self.register_buffer(f"filters_{fft}", mel_filters(mels, fft, rate, rate / 2).T, persistent=False)

    def forward(self, made: Tensor, real: Tensor) -> Tensor:
        """Waves [N, T] -> scalar."""
        total = torch.zeros((), device=made.device)
        with torch.autocast(made.device.type, enabled=False):
            for fft, _ in self._sizes:
                window, filters = getattr(self, f"window_{fft}"), getattr(self, f"filters_{fft}")
                a, b = (magnitudes(wave, fft, window) @ filters for wave in (made, real))
                far = (torch.log10(a.clamp(min=1e-2)) - torch.log10(b.clamp(min=1e-2))).abs().mean()
                total = total + far + 0.1 * (a - b).abs().mean() / b.mean().clamp(min=1e-2)
        return total / len(self._sizes)


NEAR = ((64, 10), (128, 20), (256, 40), (512, 80), (1024, 120))
"""At 16 kHz."""
WIDE = ((192, 20), (1024, 80))
"""At 48 kHz, where the upper half must stay silent."""


def judge_loss(real: list[Tensor], made: list[Tensor]) -> Tensor:
    """What the judges are trained by: scores of 1 for what is real and 0 for what is made, least squares."""
    losses = [(1.0 - r.float()).square().mean() + m.float().square().mean() for r, m in zip(real, made, strict=True)]
    return torch.stack(losses).mean()


def generator_losses(real: list[Judgement], made: list[Judgement]) -> tuple[Tensor, Tensor]:
    """-> how far the judges are from being deceived, and how far their features lie apart."""
    scores = torch.stack([(1.0 - score.float()).square().mean() for score, _ in made]).mean()
    apart = [
        (m.float() - r.float().detach()).abs().mean() / (r.float().detach().abs().mean() + 1e-3)
        for (_, many), (_, real_many) in zip(made, real, strict=True)
        for m, r in zip(many, real_many, strict=True)
    ]
    return scores, torch.stack(apart).mean()
