"""Phone times of speech whose phones nobody tells: those of a voice of Flite that says the same text, moved in time to
where the speech sounds most alike (dynamic time warping)."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from models.embedded.voices.disguise import moved
from models.embedded.voices.flite import SAMPLE_RATE, Flite, Utterance
from models.embedded.voices.recogniser import PhoneNet
from models.embedded.voices.rhvoice import RHVoice

_SHIFT = 160
_CEPSTRA = 14
_MOUTHS = (0.9, 1.0, 1.1, 1.2)
"""Factors that the known voice's frequencies are tried with."""
_STEPS = (0.6, 0.0, 0.6, 1.8)
"""What it costs to stay at a frame of the known speech, to go on by one, by two and by three."""


class Aligner:
    def __init__(self) -> None:
        self._net = PhoneNet().eval()
        mels = self._net.filters.shape[1]
        order = torch.arange(1, _CEPSTRA)[None]
        self._cosines = torch.cos(torch.pi / mels * (torch.arange(mels)[:, None] + 0.5) * order) * (2.0 / mels) ** 0.5

    def _cepstra(self, log: torch.Tensor) -> np.ndarray:
        """Log spectrum [1, frames, bins] -> [frames, features]: shape, change of shape, and loudness."""
        mel = self._net.features(log)[0].T
        shape = mel @ self._cosines
        change = torch.zeros_like(shape)
        change[2:-2] = shape[4:] - shape[:-4]
        return torch.cat((shape, 0.7 * change, 2.0 * mel.mean(1, keepdim=True)), dim=1).numpy()

    @torch.no_grad()
    def __call__(self, known: Utterance, samples: np.ndarray) -> Utterance:
        """known: a voice of Flite's that says the text; samples int16 [n] at 16 kHz of another one -> as the other one
        said it."""
        waves = (torch.from_numpy(wave)[None].float() / 32768.0 for wave in (known.samples, samples))
        log, wanted = (self._net.spectrum(wave) for wave in waves)
        bands = torch.linspace(0.0, 1.0, log.shape[2])
        sought = self._cepstra(wanted)
        found = [path(sought, self._cepstra(moved(log, bands[None] / mouth))) for mouth in _MOUTHS]
        _, places = min(found, key=lambda each: each[0])
        # A phone ends where the last frame that is like it ends.
        last = np.searchsorted(places, known.ends * (SAMPLE_RATE / _SHIFT) - 0.5)
        ends = (last * (_SHIFT / SAMPLE_RATE)).astype(np.float32)
        ends[-1] = len(samples) / SAMPLE_RATE
        return dataclasses.replace(known, samples=samples, ends=ends, pitch=np.zeros(0, np.float32))


def path(sought: np.ndarray, known: np.ndarray) -> tuple[float, np.ndarray]:
    """sought [n, features], known [m, features] -> mean cost and, rising, the known frame [n] of each sought one."""
    costs = ((sought**2).sum(1)[:, None] + (known**2).sum(1) - 2.0 * sought @ known.T).clip(0.0) ** 0.5
    best = np.full(len(known), np.inf)
    best[0] = 0.0
    steps = np.zeros(costs.shape, np.int8)
    for moment, frame in enumerate(costs):
        ways = np.full((len(_STEPS), len(known)), np.inf)
        for step, cost in enumerate(_STEPS):
            ways[step, step:] = best[: len(best) - step] + cost
        steps[moment] = ways.argmin(0)
        best = ways.min(0) + frame
    places = np.empty(len(sought), np.int64)
    at = len(known) - 1 if np.isfinite(best[-1]) else int(np.where(np.isfinite(best), best, np.inf).argmin())
    total = float(best[at])
    for moment in range(len(sought) - 1, -1, -1):
        places[moment] = at
        at = max(0, at - int(steps[moment, at]))
    return total / len(sought), places


class Dubbed:
    """Speaks with one voice, and tells the phones of another one that is aligned with it."""

    def __init__(self, other: RHVoice, known: Flite) -> None:
        self.other, self._known, self._align = other, known, Aligner()

    def speak(self, text: str) -> Utterance:
        return self._align(self._known.speak(text), self.other.speak(text))
