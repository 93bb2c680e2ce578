"""Latent frames with a meaning: 58 directions of the log-mel envelope, then pitch and voicing, at 25 Hz.

The published codec's encoder has learned to hear these values and its decoder to sound them, so that a language model
is trained on what Flite says without the codec.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.voice.flite import SAMPLE_RATE

HOP = 640
"""Samples of a latent frame, as the published encoder's rates have it."""
FRAME_RATE = SAMPLE_RATE / HOP
FRAMES = 4
"""Latent frames of a patch."""
PATCH = HOP * FRAMES
SPECTRAL, PITCH_VALUES = 58, 6
LATENT_DIM = SPECTRAL + PITCH_VALUES
DELAY = 320
"""The codec's decoder sounds sample n - DELAY at n (16 kHz): the last window's middle is this far before the end of its
frame, and each is sounded at the end of its 10 ms."""

_WINDOW, _SHIFT, _FFT, _MELS = 400, 160, 1024, 80
_FLOOR = 0.04


def mel_filters(mels: int, fft: int, rate: int, top: float) -> Tensor:
    """Triangles of unit height, float32 [mels, fft / 2 + 1] (HTK's scale)."""

    def scale(hertz: np.ndarray) -> np.ndarray:
        return 2595.0 * np.log10(1.0 + hertz / 700.0)

    points = 700.0 * (10.0 ** (np.linspace(0.0, scale(np.array(top)), mels + 2) / 2595.0) - 1.0)
    bins = np.linspace(0.0, rate / 2, fft // 2 + 1)
    rising = (bins - points[:-2, None]) / np.diff(points)[:-1, None]
    falling = (points[2:, None] - bins) / np.diff(points)[1:, None]
    return torch.from_numpy(np.maximum(0.0, np.minimum(rising, falling)).astype(np.float32))


class Spectrum:
    """Log-mel values of the spectrum's envelope on one device: its power is spread over the distance of the voice's
    harmonics, whose ripples vanish so. A direction that follows them would be of no use, and hard to hear."""

    def __init__(self, device: torch.device) -> None:
        self._window = torch.hann_window(_WINDOW, device=device)
        self._filters = mel_filters(_MELS, _FFT, SAMPLE_RATE, SAMPLE_RATE / 2).to(device).T

    def __call__(self, wave: Tensor, pitch: Tensor) -> Tensor:
        """Samples [n], n a multiple of HOP, and pitch in Hz [n / HOP] -> [n / HOP, 4 * mels]; no window of a frame
        ends behind it."""
        windows = F.pad(wave, (DELAY - _SHIFT + _WINDOW // 2, 0)).unfold(0, _WINDOW, _SHIFT) * self._window
        power = torch.fft.rfft(windows, _FFT).abs().square()
        width = pitch.repeat_interleave(HOP // _SHIFT) / (SAMPLE_RATE / _FFT)
        return torch.log(_spread(power, width).sqrt() @ self._filters + _FLOOR).view(-1, HOP // _SHIFT * _MELS)


def _spread(power: Tensor, width: Tensor) -> Tensor:
    """Means of power [rows, bins] over `width` [rows] bins around each, mirrored at both ends."""
    reach = int(width.max()) // 2 + 2
    mirrored = torch.cat((power[:, 1 : reach + 1].flip(1), power, power[:, -reach - 1 : -1].flip(1)), dim=1)
    # Double: differences of long sums.
    total = F.pad(mirrored.double().cumsum(1), (1, 0))
    middle = torch.arange(power.shape[1], device=power.device) + (reach + 0.5)

    def up_to(place: Tensor) -> Tensor:
        whole = place.long()
        return torch.lerp(total.gather(1, whole), total.gather(1, whole + 1), place.double() - whole)

    half = width[:, None] / 2
    return ((up_to(middle + half) - up_to(middle - half)) / width[:, None]).clamp(min=1e-12).float()


@dataclass(frozen=True, eq=False)
class Basis:
    """spectral latents = (log-mel - mean) @ directions; pitch: mean and deviation of its logarithm.

    basis.npz is from 600 utterances of slt: the first principal directions, that of variance v of deviation v ** 0.25,
    between whitened and as it is, so that a unit of noise drowns what is hardly heard."""

    mean: Tensor
    directions: Tensor
    pitch: Tensor

    @staticmethod
    def load(device: torch.device) -> Basis:
        with np.load(Path(__file__).parent / "basis.npz") as file:
            mean, directions, pitch = (
                torch.from_numpy(file[key]).to(device) for key in ("mean", "directions", "pitch")
            )
        return Basis(mean, directions, pitch)

    def latents(self, mel: Tensor, pitch: Tensor) -> Tensor:
        """mel [frames, 320], pitch [frames, 6] as pitch_track has it -> [frames, LATENT_DIM], of about unit power."""
        tone = (pitch[:, :2] - self.pitch[0]) / self.pitch[1]
        return torch.cat(((mel - self.mean) @ self.directions, tone, 2.0 * pitch[:, 2:] - 1.0), dim=1)

    def spectrum(self, latents: Tensor) -> Tensor:
        """Back to log-mel [..., 320], as far as the directions go."""
        inverse = self.directions / self.directions.square().sum(0)
        return latents[..., :SPECTRAL] @ inverse.T + self.mean


def pitch_track(pitch: np.ndarray, seconds: float, offset: float, frames: int) -> np.ndarray:
    """Pitch in Hz every `seconds`, 0 without voice; offset: where the frames begin in it (s) -> float32 [frames, 6]:
    logarithm of the frame's pitch twice, held and joined where there is no voice, and whether
    each of its quarters is voiced, 0 or 1.

    A decoder of convolutions over frames repeats itself where its frames are alike, so it can only hold tones that
    fit a whole number of times into a frame: the pitch is the nearest of those."""
    centres = (np.arange(frames * 4) * _SHIFT + _SHIFT - DELAY) / SAMPLE_RATE + offset
    index = np.clip(np.round(centres / seconds).astype(np.int64), 0, max(len(pitch) - 1, 0))
    voiced = pitch > 0
    if not voiced.any():
        return np.tile(np.array([[5.2, 5.2, 0.0, 0.0, 0.0, 0.0]], np.float32), (frames, 1))
    places = np.flatnonzero(voiced)
    tone = np.interp(np.arange(len(pitch)), places, np.log(pitch[places]))[index]
    cycles = np.maximum(1.0, np.round(np.exp(tone.reshape(frames, 4).mean(-1)) / FRAME_RATE))
    tone = np.log(FRAME_RATE * cycles)[:, None]
    return np.concatenate((tone, tone, voiced[index].reshape(frames, 4)), axis=1).astype(np.float32)
