"""What the codec's decoder starts from: latent frames as a sum of sinusoids, a function of nothing but the frames.

A decoder of convolutions over frames of 40 ms gives the same samples wherever its frames are alike, so what it can
hold are multiples of 25 Hz whose phases begin anew with each frame, and that is what is asked of it."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.voice.flite import SAMPLE_RATE
from training.voice.latents import FRAME_RATE, HOP, SPECTRAL, Basis, mel_filters

_STEPS, _MELS, _FFT, _WINDOW, _FLOOR = 4, 80, 1024, 400, 0.04
"""Spectra in a frame, and how latents.Spectrum made them."""
_PERIOD = 3 * HOP
"""Samples of a frame at 48 kHz."""
_LINES = int(SAMPLE_RATE / 2 / FRAME_RATE) - 1
"""Sinusoids below 8 kHz, FRAME_RATE apart."""
_DISPERSION = 0.002
"""Seconds that the voice's highest frequencies come before its lowest: less of a peak than one pulse."""
_BREATH, _BREATH_WIDTH = 3500.0, 450.0
"""Hz above which a voice is noise, and how gradually."""


class Vocoder:
    """On one device."""

    def __init__(self, device: torch.device) -> None:
        self._basis = Basis.load(device)
        hertz = FRAME_RATE * torch.arange(1, _LINES + 1, dtype=torch.float32, device=device)
        self._lines = torch.arange(1, _LINES + 1, device=device)
        self._spread = _between_bands(hertz)
        self._area = mel_filters(_MELS, _FFT, SAMPLE_RATE, SAMPLE_RATE / 2).sum(1).to(device)
        self._pure = torch.sigmoid((_BREATH - hertz) / _BREATH_WIDTH)
        turns = _DISPERSION * (hertz - hertz.square() / SAMPLE_RATE)
        self._voice = torch.polar(torch.ones_like(hertz), -2.0 * torch.pi * turns)
        noise = torch.from_numpy(np.random.default_rng(25).random(_LINES, np.float32)).to(device)
        self._noise = torch.polar(torch.ones_like(hertz), 2.0 * torch.pi * noise)
        self._fade = torch.hann_window(2 * _PERIOD // _STEPS, device=device)

    def pitch(self, latents: Tensor) -> Tensor:
        """[N, D, T] -> Hz [N, T]."""
        return (latents[:, SPECTRAL : SPECTRAL + 2].mean(1) * self._basis.pitch[1] + self._basis.pitch[0]).exp()

    def __call__(self, latents: Tensor) -> Tensor:
        """float32 [N, D, T] -> [N, T * 1920] at 48 kHz, DELAY late."""
        cycles = (self.pitch(latents) / FRAME_RATE).round().clamp(min=2.0, max=20.0).long()[..., None]
        chosen = ((self._lines % cycles == 0) * cycles).repeat_interleave(_STEPS, 1)
        # Latents are -1 or 1: what is half as sure is sounded the same way.
        voiced = (0.5 + latents[:, SPECTRAL + 2 :].transpose(1, 2)).clamp(0.0, 1.0).flatten(1)
        power, share = self._power(latents.transpose(1, 2)), voiced[..., None] * self._pure
        tones = (power * share * chosen).sqrt() * self._voice + (power * (1.0 - share)).sqrt() * self._noise
        return self._sound(tones)

    def _power(self, frames: Tensor) -> Tensor:
        """[N, T, D] -> squared amplitude of each line if all of them sounded, [N, 4 T, lines]."""
        mel = self._basis.spectrum(frames).view(len(frames), -1, _MELS)
        magnitude = (mel.exp() - _FLOOR).clamp(min=0.0) / self._area
        # A sinusoid of amplitude a puts a * a / 4 * _FFT * (sum of the window's squares, 3/8 of it) into its bins.
        whole = 4.0 * FRAME_RATE / (SAMPLE_RATE / _FFT) / (_FFT * 0.375 * _WINDOW)
        return (magnitude.square() * whole) @ self._spread

    def _sound(self, tones: Tensor) -> Tensor:
        """Complex [N, 4 T, lines], each alone at the end of its 10 ms and faded in over them -> [N, T * 1920]. A frame
        is heard in itself and fades out in the next one, so that a causal decoder knows all that it has to sound."""
        count, steps, _ = tones.shape
        spectrum = F.pad(torch.view_as_real(tones), (0, 0, 1, _PERIOD // 2 - _LINES))
        periods = torch.fft.irfft(torch.view_as_complex(spectrum.contiguous()), _PERIOD) * (0.5 * _PERIOD)
        hop = _PERIOD // _STEPS
        # Half of a step's period is heard, at the place in the frame where the step is.
        starts = (torch.arange(_STEPS, device=tones.device) * hop)[:, None]
        places = (starts + torch.arange(2 * hop, device=tones.device)) % _PERIOD
        places = places.repeat(steps // _STEPS, 1).expand(count, -1, -1)
        heard = periods.gather(2, places) * self._fade
        length = (steps + 1) * hop
        whole = F.fold(heard.transpose(1, 2), (1, length), (1, 2 * hop), stride=(1, hop))[:, 0, 0]
        return whole[:, : steps * hop]


def _between_bands(hertz: Tensor) -> Tensor:
    """[mels, lines]: weights that read off values of mel bands at these frequencies, linear between their centres."""
    place = (1.0 + hertz / 700.0).log10() / math.log10(1.0 + SAMPLE_RATE / 2 / 700.0) * (_MELS + 1) - 1.0
    place = place.clamp(0.0, _MELS - 1.0)
    bands = torch.arange(_MELS, device=hertz.device)[:, None]
    return (1.0 - (place - bands).abs()).clamp(min=0.0)
