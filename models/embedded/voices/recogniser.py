"""A small recogniser of English speech: what a listener understands of the voice.

A convolutional network hears phones in 0.9 s of speech, and `Decoder` finds words in them. It is trained on other
voices than the one it judges, and judges that one's natural speech first. models/embedded/recogniser holds a trained
one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from models.embedded.voices.decoder import Decoder, Language, Phones, Weighing, homophones, plain
from models.embedded.voices.flite import PHONES
from models.embedded.voices.latents import mel_filters

SOUND = 320
"""Samples of a phone's frame: 50 a second."""
_WINDOW, _SHIFT, _FFT, _MELS = 400, 160, 512, 40
_DILATIONS = (1, 2, 3, 4, 1, 2, 3, 4)
_FLOOR = 0.003
"""Of a magnitude, in an utterance of unit power."""


class PhoneNet(nn.Module):
    """Samples at 16 kHz -> log-probabilities of phones, 50 a second."""

    window: Tensor
    filters: Tensor

    def __init__(self, width: int = 384, dilations: tuple[int, ...] = _DILATIONS, dropout: float = 0.1) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(_WINDOW), persistent=False)
        self.register_buffer("filters", mel_filters(_MELS, _FFT, 16000, 7600.0).T.contiguous(), persistent=False)
        self.first = nn.Conv1d(_MELS, width, 8, stride=2, padding=3)
        self.convs = nn.ModuleList(nn.Conv1d(width, width, 3, padding=d, dilation=d) for d in dilations)
        self.norms = nn.ModuleList(nn.GroupNorm(1, width) for _ in dilations)
        self.dropout = nn.Dropout1d(dropout)
        self.out = nn.Conv1d(width, len(PHONES), 1)

    def spectrum(self, wave: Tensor) -> Tensor:
        """wave [N, T] -> log magnitudes [N, T / 160, bins], of unit power over the utterance."""
        wave = wave.float()
        wave = wave / (wave.square().mean(1, keepdim=True).sqrt() + 1e-4)
        wave = F.pad(wave, ((_WINDOW - _SHIFT) // 2, (_WINDOW - _SHIFT) // 2))
        return torch.log(torch.fft.rfft(wave.unfold(1, _WINDOW, _SHIFT) * self.window, _FFT).abs() + _FLOOR)

    def features(self, log: Tensor) -> Tensor:
        """Log magnitudes [N, frames, bins] -> log-mel bands [N, mels, frames], each of zero mean and unit deviation
        over the louder part of the utterance, which takes the speaker's average away."""
        mel = torch.log(log.exp() @ self.filters + 0.1).transpose(1, 2)
        loudness = mel.mean(1, keepdim=True)
        middle = 0.5 * (loudness.amax(2, keepdim=True) + loudness.amin(2, keepdim=True))
        weight = torch.sigmoid(4.0 * (loudness - middle))
        weight = weight / weight.sum(2, keepdim=True)
        mean = (mel * weight).sum(2, keepdim=True)
        deviation = ((mel - mean).square() * weight).sum(2, keepdim=True).sqrt()
        return (mel - mean) / (deviation + 0.1)

    def forward(self, mel: Tensor) -> Tensor:
        """[N, mels, frames] -> [N, phones, frames / 2]."""
        x = F.gelu(self.first(mel))
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + self.dropout(F.gelu(conv(norm(x))))
        return F.log_softmax(self.out(x), dim=1)

    def listen(self, wave: Tensor) -> Tensor:
        """[N, T] -> [N, phones, T / 320]."""
        output: Tensor = self(self.features(self.spectrum(wave)))
        return output


def same(names: dict[str, str], text: str) -> str:
    """A text as it is compared; names: as `homophones` has them."""
    return " ".join(names.get(word, word) for word in plain(text).split())


@dataclass(frozen=True, eq=False)
class Recogniser:
    net: PhoneNet
    decoder: Decoder
    homophones: dict[str, str]
    known: Phones

    def same(self, text: str) -> str:
        """A text as it is compared: of words that sound alike, the first of the alphabet."""
        return same(self.homophones, text)

    @torch.no_grad()
    def phones(self, wave: Tensor) -> np.ndarray:
        """Samples [n] at 16 kHz -> log-probabilities [n / 320, phones]."""
        wave = F.pad(wave, (0, -len(wave) % SOUND))
        return self.net.listen(wave[None])[0].T.float().cpu().numpy()

    def __call__(self, wave: Tensor) -> str:
        """Samples [n] at 16 kHz -> words, as `same` has them."""
        return self.same(self.decoder(self.phones(wave)))


WEIGHTS = "phones.safetensors"
_PHONES = ("frequency", "least", "mean")


def load_phones(directory: Path) -> Phones:
    """What train_recogniser counted."""
    state = load_file(directory / WEIGHTS)
    return Phones(*(state[name].numpy() for name in _PHONES))


def load(directory: Path, device: torch.device) -> Recogniser:
    """What train_recogniser wrote, with the weights of tune_recogniser when it was there."""
    state = load_file(directory / WEIGHTS)
    phones = Phones(*(state.pop(name).numpy() for name in _PHONES))
    net = PhoneNet().to(device).eval().requires_grad_(False)
    net.load_state_dict({name: value.float() for name, value in state.items()})
    language, tuned = Language.load(directory / "lexicon.json"), directory / "weighing.json"
    weighing = Weighing(**json.loads(tuned.read_text(encoding="utf-8"))) if tuned.exists() else Weighing()
    return Recogniser(net, Decoder(language, phones, weighing), homophones(language.words), phones)


def distance(wanted: list[str] | str, heard: list[str] | str) -> int:
    """Insertions, deletions and exchanges between two sequences."""
    row = list(range(len(heard) + 1))
    for i, w in enumerate(wanted, 1):
        previous, row[0] = row[0], i
        for j, h in enumerate(heard, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (w != h))
    return row[-1]
