"""A small recogniser of English speech: what a listener understands of the voice.

A convolutional network hears phones, and the likeliest sequence of known words is found that they may be (Viterbi over
a loop of words without a grammar, so that no sentence helps a mumbled word). It is trained on other voices than the one
it judges, and judges that one's natural speech first.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.embedded.voices.flite import PHONES, Flite
from models.embedded.voices.latents import mel_filters

WARPS = 13
"""Sizes of a speaker that can be feigned; the middle one is nobody's."""
_WINDOW, _SHIFT, _FFT, _MELS = 400, 160, 512, 40


def plain(text: str) -> str:
    """Small letters, apostrophes and single blanks: what is compared."""
    text = re.sub(r"[^a-z' ]+", " ", text.lower().replace(" '", "'"))
    return re.sub(r"\s+", " ", text).strip()


def _filters() -> Tensor:
    """Mel bands for stretched frequencies, float32 [WARPS, bins, mels]."""
    bins = torch.arange(_FFT // 2 + 1)
    plain_bands = mel_filters(_MELS, _FFT, 16000, 7600.0)
    banks = []
    for warp in 1.3 ** torch.linspace(-1.0, 1.0, WARPS):
        # Below 6 kHz in proportion, above it what is left.
        edge = 6000.0 / 8000.0 * (len(bins) - 1) * min(1.0, 1.0 / float(warp))
        rest = (len(bins) - 1 - edge * warp) / (len(bins) - 1 - edge)
        source = torch.where(bins <= edge, bins * warp, edge * warp + (bins - edge) * rest).clamp(0, len(bins) - 1)
        low = source.floor().long().clamp(max=len(bins) - 2)
        part = source - low
        banks.append((plain_bands[:, low] * (1 - part) + plain_bands[:, low + 1] * part).T)
    return torch.stack(banks)


class PhoneNet(nn.Module):
    """Samples at 16 kHz -> log-probabilities of phones, 50 a second."""

    window: Tensor
    filters: Tensor

    def __init__(self, width: int = 224) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(_WINDOW), persistent=False)
        self.register_buffer("filters", _filters(), persistent=False)
        self.first = nn.Conv1d(_MELS, width, 8, stride=2, padding=3)
        self.convs = nn.ModuleList(nn.Conv1d(width, width, 3, padding=d, dilation=d) for d in (1, 2, 3, 4))
        self.norms = nn.ModuleList(nn.GroupNorm(1, width) for _ in range(4))
        self.out = nn.Conv1d(width, len(PHONES), 1)

    def features(self, wave: Tensor, warp: int = WARPS // 2) -> Tensor:
        """wave [N, T] -> log-mel bands [N, mels, T / 160], each of zero mean and unit deviation over the louder half of
        the utterance, which takes the speaker's average away. warp: a bank of filters."""
        wave = F.pad(wave.float(), ((_WINDOW - _SHIFT) // 2, (_WINDOW - _SHIFT) // 2))
        magnitude = torch.fft.rfft(wave.unfold(1, _WINDOW, _SHIFT) * self.window, _FFT).abs()
        mel = torch.log(magnitude @ self.filters[warp] + 0.03).transpose(1, 2)
        loudness = mel.mean(1, keepdim=True)
        loud = (loudness >= loudness.quantile(0.5, dim=2, keepdim=True)).float()
        weight = loud / loud.sum(2, keepdim=True)
        mean = (mel * weight).sum(2, keepdim=True)
        deviation = ((mel - mean).square() * weight).sum(2, keepdim=True).sqrt()
        return (mel - mean) / (deviation + 0.1)

    def forward(self, mel: Tensor) -> Tensor:
        """[N, mels, frames] -> [N, phones, frames / 2]."""
        x = F.gelu(self.first(mel))
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + F.gelu(conv(norm(x)))
        return F.log_softmax(self.out(x), dim=1)


@dataclass(frozen=True)
class Entry:
    """A word's phones in each way that it is said, and how often it was met."""

    ways: list[list[str]]
    count: int


def learn_words(speaker: Flite, texts: list[str]) -> dict[str, Entry]:
    """The words of the texts as the front end of a voice says them."""
    ways: dict[str, set[tuple[str, ...]]] = {}
    counts: Counter[str] = Counter()
    for text in texts:
        said, words = speaker.speak(text), text.split(" ")
        for number in range(len(words)):
            phones = tuple(PHONES[phone] for phone in said.phones[said.words == number])
            if phones and (word := plain(words[number])) and not any(sign.isdigit() for sign in words[number]):
                ways.setdefault(word, set()).add(phones)
                counts[word] += 1
    return {word: Entry(sorted(map(list, ways[word])), counts[word]) for word in sorted(ways)}


@dataclass(frozen=True)
class Weighing:
    """prior: how much of a phone's frequency is taken away; word: cost of each word; rarity: of its information."""

    prior: float = 0.3
    word: float = 2.0
    rarity: float = 0.8


class Decoder:
    """Phones -> words. prior [phones]: their frequencies."""

    def __init__(self, lexicon: dict[str, Entry], prior: np.ndarray, weighing: Weighing) -> None:
        ways = [("", ["pau"]), *((word, way) for word, entry in lexicon.items() for way in entry.ways)]
        self._words = [word for word, _ in ways]
        self._phones = np.array([PHONES.index(phone) for _, way in ways for phone in way])
        lengths = np.array([len(way) for _, way in ways])
        self._ends = lengths.cumsum() - 1
        self._begins = self._ends - lengths + 1
        self._prior, self._weighing = np.log(prior + 1e-4), weighing
        total = sum(entry.count for entry in lexicon.values())
        information = [0.0, *(-np.log(lexicon[word].count / total) for word in self._words[1:])]
        self._costs = np.where(np.arange(len(ways)) == 0, 0.0, weighing.word + weighing.rarity * np.array(information))

    def __call__(self, logs: np.ndarray) -> str:
        """logs [frames, phones] -> words joined by blanks."""
        heard = (logs - self._weighing.prior * self._prior)[:, self._phones]
        count = heard.shape[1]
        best, link = np.full(count, -np.inf), np.full(count, -1)
        history: list[tuple[int, int]] = []
        entry, entry_link = 0.0, -1
        for frame in heard:
            step, step_link = np.concatenate(([-np.inf], best[:-1])), np.concatenate(([-1], link[:-1]))
            step[self._begins], step_link[self._begins] = entry - self._costs, entry_link
            moved = step > best
            best, link = np.where(moved, step, best) + frame, np.where(moved, step_link, link)
            way = int(best[self._ends].argmax())
            entry = float(best[self._ends[way]])
            history.append((way, int(link[self._ends[way]])))
            entry_link = len(history) - 1
        words: list[str] = []
        place = entry_link
        while place >= 0:
            way, place = history[place]
            words.append(self._words[way])
        return " ".join(word for word in reversed(words) if word)


@dataclass(frozen=True, eq=False)
class Recogniser:
    net: PhoneNet
    decoder: Decoder
    homophones: dict[str, str]

    def same(self, text: str) -> str:
        """A text as it is compared: of words that sound alike, the first of the alphabet."""
        return " ".join(self.homophones.get(word, word) for word in plain(text).split())

    @torch.no_grad()
    def __call__(self, wave: Tensor) -> str:
        """Samples [n] at 16 kHz -> words, as `same` has them."""
        wave = F.pad(wave, (1600, 1600 + -len(wave) % 320))
        return self.same(self.decoder(self.net(self.net.features(wave[None]))[0].T.float().cpu().numpy()))


def load(directory: Path, device: torch.device) -> Recogniser:
    """What train_recogniser wrote."""
    state = torch.load(directory / "phones.pt", map_location=device, weights_only=True)
    prior = state.pop("prior").cpu().numpy()
    net = PhoneNet().to(device).eval().requires_grad_(False)
    net.load_state_dict({name: value.float() for name, value in state.items()})
    read = json.loads((directory / "lexicon.json").read_text(encoding="utf-8"))
    lexicon = {word: Entry(**entry) for word, entry in read.items()}
    return Recogniser(net, Decoder(lexicon, prior, Weighing()), homophones(lexicon))


def homophones(lexicon: dict[str, Entry]) -> dict[str, str]:
    """Word -> the first one of the alphabet among those that sound like it, or like one that does."""
    name = {word: word for word in lexicon}
    changed = True
    while changed:
        first: dict[tuple[str, ...], str] = {}
        for word, entry in lexicon.items():
            for way in map(tuple, entry.ways):
                first[way] = min(first.get(way, name[word]), name[word])
        new = {word: min(first[tuple(way)] for way in entry.ways) for word, entry in lexicon.items()}
        name, changed = new, new != name
    return name


def distance(wanted: list[str] | str, heard: list[str] | str) -> int:
    """Insertions, deletions and exchanges between two sequences."""
    row = list(range(len(heard) + 1))
    for i, w in enumerate(wanted, 1):
        previous, row[0] = row[0], i
        for j, h in enumerate(heard, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (w != h))
    return row[-1]
