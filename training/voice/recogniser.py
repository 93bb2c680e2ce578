"""A small recogniser of English speech: what a listener understands of the voice.

A convolutional network hears phones in 0.9 s of speech, and `Decoder` finds words in them. It was trained on other
voices than the one it judges, judges that one's natural speech first, and is no longer trained: the same ears hear all
voices, so that their scores can be compared.

The decoder finds the likeliest sequence of known words (Viterbi) under a weak model of language, which knows kinds of
words, not words: of a noun it knows that a verb may follow, and how frequent each noun is. So it never prefers a word
of a kind to another of as frequent use, and a wrong word that was said is heard.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from training.voice.flite import PHONES
from training.voice.latents import mel_filters

DIRECTORY = Path(__file__).parents[2] / "models/embedded/recogniser"
_FACTOR, _REACH = 3, 16
"""48 kHz over 16 kHz; samples at 16 kHz on either side of the filter."""
START = ""
"""The kind in front of the first word and behind the last one."""
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

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(_WINDOW), persistent=False)
        self.register_buffer("filters", mel_filters(_MELS, _FFT, 16000, 7600.0).T.contiguous(), persistent=False)
        width = 384
        self.first = nn.Conv1d(_MELS, width, 8, stride=2, padding=3)
        self.convs = nn.ModuleList(nn.Conv1d(width, width, 3, padding=d, dilation=d) for d in _DILATIONS)
        self.norms = nn.ModuleList(nn.GroupNorm(1, width) for _ in _DILATIONS)
        self.out = nn.Conv1d(width, len(PHONES), 1)

    def features(self, wave: Tensor) -> Tensor:
        """wave [N, T], brought to unit power -> log-mel bands [N, mels, T / 160], each of zero mean and unit deviation
        over the louder part of the utterance, which takes the speaker's average away."""
        wave = wave / (wave.square().mean(1, keepdim=True).sqrt() + 1e-4)
        wave = F.pad(wave, ((_WINDOW - _SHIFT) // 2, (_WINDOW - _SHIFT) // 2))
        magnitude = torch.fft.rfft(wave.unfold(1, _WINDOW, _SHIFT) * self.window, _FFT).abs() + _FLOOR
        mel = torch.log(magnitude @ self.filters + 0.1).transpose(1, 2)
        loudness = mel.mean(1, keepdim=True)
        middle = 0.5 * (loudness.amax(2, keepdim=True) + loudness.amin(2, keepdim=True))
        weight = torch.sigmoid(4.0 * (loudness - middle))
        weight = weight / weight.sum(2, keepdim=True)
        mean = (mel * weight).sum(2, keepdim=True)
        deviation = ((mel - mean).square() * weight).sum(2, keepdim=True).sqrt()
        return (mel - mean) / (deviation + 0.1)

    def forward(self, wave: Tensor) -> Tensor:
        """[N, T] -> [N, phones, T / 320]."""
        x = F.gelu(self.first(self.features(wave)))
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + F.gelu(conv(norm(x)))
        return F.log_softmax(self.out(x), dim=1)


@dataclass(frozen=True, eq=False)
class Recogniser:
    net: PhoneNet
    decoder: Decoder
    homophones: dict[str, str]
    known: Phones

    def same(self, text: str) -> str:
        """A text as it is compared: of words that sound alike, the first of the alphabet."""
        return " ".join(self.homophones.get(word, word) for word in plain(text).split())

    @torch.no_grad()
    def phones(self, wave: Tensor) -> np.ndarray:
        """Samples [n] at 16 kHz -> log-probabilities [n / 320, phones]."""
        wave = F.pad(wave, (0, -len(wave) % SOUND))
        return self.net(wave[None].float())[0].T.float().cpu().numpy()

    def __call__(self, wave: Tensor) -> str:
        """Samples [n] at 16 kHz -> words, as `same` has them."""
        return self.same(self.decoder(self.phones(wave)))


def load(device: torch.device, directory: Path = DIRECTORY) -> Recogniser:
    state = load_file(directory / "phones.safetensors")
    phones = Phones(*(state.pop(name).numpy() for name in ("frequency", "least", "mean")))
    net = PhoneNet().to(device).eval().requires_grad_(False)
    net.load_state_dict({name: value.float() for name, value in state.items()})
    language = Language.load(directory / "lexicon.json")
    weighing = Weighing(**json.loads((directory / "weighing.json").read_text(encoding="utf-8")))
    return Recogniser(net, Decoder(language, phones, weighing), homophones(language.words), phones)


def distance(wanted: Sequence[object], heard: Sequence[object]) -> int:
    """Insertions, deletions and exchanges between two sequences."""
    row = list(range(len(heard) + 1))
    for i, w in enumerate(wanted, 1):
        previous, row[0] = row[0], i
        for j, h in enumerate(heard, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (w != h))
    return row[-1]


def plain(text: str) -> str:
    """Small letters, apostrophes and single blanks: what is compared."""
    text = re.sub(r"[^a-z' ]+", " ", text.lower().replace(" '", "'"))
    return re.sub(r"\s+", " ", text).strip()


@dataclass(frozen=True)
class Entry:
    """A word's phones in each way that it is said, and how often it was met."""

    ways: list[list[str]]
    count: int
    kind: str


@dataclass(frozen=True)
class Language:
    """words: what is known of each; follows: how often a kind came after another, or after START; START comes after
    the last one of a text."""

    words: dict[str, Entry]
    follows: dict[str, dict[str, int]]

    @staticmethod
    def load(path: Path) -> Language:
        read = json.loads(path.read_text(encoding="utf-8"))
        return Language({word: Entry(**entry) for word, entry in read["words"].items()}, read["follows"])


@dataclass(frozen=True)
class Weighing:
    """prior: how much of a phone's frequency is taken away; word: cost of each word; rarity: of the information that
    the model of language gives; kinds: its share that looks at the word before, the rest does not; lengths: of the
    information that the phones' lengths give."""

    prior: float = 0.3
    word: float = 1.2
    rarity: float = 1.28
    kinds: float = 0.95
    lengths: float = 0.25


@dataclass(frozen=True, eq=False)
class Phones:
    """What is known of the phones: frequency [phones] of each among frames; least [phones]: frames that nearly all of
    them last; mean [phones]: frames."""

    frequency: np.ndarray
    least: np.ndarray
    mean: np.ndarray


class Decoder:
    """Phones -> words.

    A word's states are its phones, each as often as the frames that it lasts at least, and a pause that may follow.
    Words are sorted by their kinds, and a word is entered from the best end of each kind."""

    def __init__(self, language: Language, phones: Phones, weighing: Weighing) -> None:
        entries = sorted(language.words.items(), key=lambda item: (item[1].kind, item[0]))
        ways = [("", ["pau"]), *((word, way) for word, entry in entries for way in entry.ways)]
        kinds = [START, *sorted({entry.kind for _, entry in entries})]
        self._words = [word for word, _ in ways]
        self._kind = np.array([0, *(kinds.index(language.words[word].kind) for word in self._words[1:])])
        numbers = [[PHONES.index(phone) for phone in (*way, "pau")] for _, way in ways]
        self._phones = np.array([phone for way in numbers for phone in way for _ in range(phones.least[phone])])
        lengths = np.array([int(phones.least[way].sum()) for way in numbers])
        self._pauses = lengths.cumsum() - 1
        self._begins = self._pauses - lengths + 1
        self._firsts = np.searchsorted(self._kind, np.arange(len(kinds)))
        # Of a phone's states the last one may be stayed in: a length above the least is a matter of chance each frame.
        last = np.concatenate([np.arange(phones.least[phone], 0, -1) == 1 for way in numbers for phone in way])
        more = phones.mean[self._phones] - phones.least[self._phones] + 0.5
        spoken = weighing.lengths * (self._phones != PHONES.index("pau"))
        self._stay = np.where(last, spoken * np.log(more / (more + 1.0)), -np.inf)
        self._leave = np.where(last, spoken * np.log(1.0 / (more + 1.0)), 0.0)
        self._prior = weighing.prior * np.log(phones.frequency + 1e-4)
        self._costs, self._follows = _costs(language, self._words, kinds, self._kind, weighing)

    def __call__(self, logs: np.ndarray) -> str:
        """logs [frames, phones] -> words joined by blanks."""
        heard = (logs - self._prior)[:, self._phones]
        count = heard.shape[1]
        best, link = np.full(count, -np.inf), np.full(count, -1)
        # Of each moment and kind: the way that ended there and where it was entered from.
        ways, links = np.empty((2, len(heard), len(self._firsts)), np.int64)
        ended, place = np.full(len(self._firsts), -np.inf), np.full(len(self._firsts), -1)
        ended[0] = 0.0
        for moment, frame in enumerate(heard):
            left = best + self._leave
            step, step_link = np.concatenate(([-np.inf], left[:-1])), np.concatenate(([-1], link[:-1]))
            best = best + self._stay
            entry = ended[:, None] - self._follows
            before = entry.argmax(0)
            step[self._begins] = entry[before, np.arange(len(before))][self._kind] - self._costs
            step_link[self._begins] = place[before][self._kind]
            moved = step > best
            best, link = np.where(moved, step, best) + frame, np.where(moved, step_link, link)
            ended, way, paused = self._ends(best)
            ways[moment], links[moment] = way, link[self._pauses[way] - ~paused]
            place = moment * len(ended) + np.arange(len(ended))
        at, words = int(place[(ended - self._follows[:, 0]).argmax()]) if len(heard) else -1, []
        while at >= 0:
            words.append(self._words[ways.flat[at]])
            at = int(links.flat[at])
        return " ".join(word for word in reversed(words) if word)

    def _ends(self, best: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each kind the best score of a word's end, its way, and whether the pause behind it had begun."""
        last, pause = best[self._pauses - 1] + self._leave[self._pauses - 1], best[self._pauses]
        either = np.maximum(last, pause)
        scores = np.maximum.reduceat(either, self._firsts)
        # The first way of a kind that has its best score.
        hits = np.flatnonzero(either == scores[self._kind])
        way = hits[np.searchsorted(self._kind[hits], np.arange(len(scores)))]
        return scores, way, pause[way] >= last[way]


def _costs(
    language: Language, words: list[str], kinds: list[str], kind: np.ndarray, weighing: Weighing
) -> tuple[np.ndarray, np.ndarray]:
    """Cost of each way within its kind, and of each kind behind another [before, after]."""
    counts = np.array([1.0, *(language.words[word].count for word in words[1:])])
    spoken = np.zeros(len(kinds))
    for entry in language.words.values():
        spoken[kinds.index(entry.kind)] += entry.count
    within = np.log(counts / np.maximum(spoken[kind], 1.0))
    within[0] = 0.0
    # Of words alone nobody knows the end: every tenth is the last.
    spoken[0] = 0.1 * spoken.sum()
    alone = spoken / spoken.sum()
    rows = np.array([[language.follows.get(before, {}).get(after, 0) for after in kinds] for before in kinds], float)
    pairs = rows / np.maximum(rows.sum(1, keepdims=True), 1.0)
    share = np.where(rows.sum(1, keepdims=True) > 0, weighing.kinds, 0.0)
    with np.errstate(divide="ignore"):
        follows = -weighing.rarity * np.log(share * pairs + (1.0 - share) * alone)
    # Silence in front of the first word, or nothing but silence, costs nothing.
    follows[0, 0] = 0.0
    costs = weighing.word - weighing.rarity * within
    costs[0] = 0.0
    return costs, follows


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


@functools.cache
def _filter(device: torch.device) -> Tensor:
    half = _FACTOR * _REACH
    places = torch.arange(-half, half + 1, device=device, dtype=torch.float32)
    window = torch.cos(places * (torch.pi / (2 * (half + 1)))).square()
    taps = torch.sinc(0.97 * places / _FACTOR) * window
    return (taps / taps.sum())[None, None]


def down(wave: Tensor) -> Tensor:
    """48 kHz [N, 3 T] -> 16 kHz [N, T]."""
    half = _FACTOR * _REACH
    with torch.autocast(wave.device.type, enabled=False):
        return F.conv1d(F.pad(wave.float(), (half, half))[:, None], _filter(wave.device), stride=_FACTOR)[:, 0]
