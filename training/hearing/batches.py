"""All sounds so far, and batches of them: a batch says what is put together, and the device does it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from models.qwen3_asr.config import CHUNK_ROWS, HOP, MEL_BANDS, MIN_SAMPLES, N_FFT
from models.qwen3_asr.items import rows_of
from training.hearing.network import PHONES_PER_ROW, WARPS, Vocabulary
from training.hearing.sounds import SAMPLE_RATE, SOUND, UNKNOWN
from training.voice.corpus import Reader
from training.voice.texts import KNOWN

SHARES = {"own": 0.45, "voices": 0.4, "noise": 0.15}
REVERSED = 0.3
"""Of what is no speech: speech that runs backwards."""
SECONDS = {4: 0.35, 8: 0.3, 16: 0.2, 32: 0.15}
"""Lengths of items, and their shares of the batches."""
_CONTEXT = 16
_ROOM = 0.4
"""Most seconds of silence in front of speech, and behind it."""
_NUMBERS = ("start", "count", "lead", "total", "backwards", "noise", "bank", "begin", "rows", "answer", "length")
_LEVELS = ("level", "noise_level", "tilt0", "tilt1", "tilt2", "tilt3")


def tokens_of(seconds: int) -> int:
    """Length of the rows of text of items of at most so many seconds."""
    return 24 + _CONTEXT + CHUNK_ROWS * seconds + 12 * seconds + 16


class Store:
    """Samples and phones on the device; of each utterance where it is, what it says, and where its file ends."""

    def __init__(self, hours: float, on: torch.device, vocabulary: Vocabulary) -> None:
        size = int(hours * 3600) * SAMPLE_RATE
        self.wave = torch.zeros(size, dtype=torch.int16, device=on)
        self.phones = torch.zeros(size // SOUND, dtype=torch.uint8, device=on)
        self.used, self._vocabulary = 0, vocabulary
        self.first, self.count, self.last = list[int](), list[int](), list[int]()
        self.ids: list[tuple[list[int], list[int]]] = []
        self.of_kind: Mapping[str, list[int]] = defaultdict(list)
        self.noises = list[tuple[int, int]]()

    @property
    def hours(self) -> float:
        return self.used / SAMPLE_RATE / 3600

    def take_in(self, reader: Reader, most: int) -> None:
        """New files, while there is room."""
        for path in islice(reader.new(), most):
            with np.load(path) as file:
                self.add(path.name.partition("-")[0], *(file[name] for name in ("texts", "samples", "wave", "sounds")))

    def add(self, kind: str, texts: np.ndarray, samples: np.ndarray, wave: np.ndarray, phones: np.ndarray) -> None:
        begin, end = self.used, self.used + len(wave)
        if end > len(self.wave):
            return
        if kind == "noise":
            self.noises.append((begin, end))
        self.wave[begin:end] = torch.from_numpy(wave)
        self.phones[begin // SOUND : end // SOUND] = torch.from_numpy(phones)
        number, ids = len(self.first), self._vocabulary.ids
        self.ids += [(ids(text), ids(f" {text}")) for text in texts.tolist()]
        self.count += samples.tolist()
        self.first += (begin + np.cumsum(samples) - samples).tolist()
        self.last += [number + len(texts)] * len(texts)
        self.of_kind[kind] += range(number, number + len(texts))
        self.used = end


class Batches:
    def __init__(self, store: Store, vocabulary: Vocabulary, audio: int, seed: int, short: int = 0) -> None:
        """audio: seconds of a batch; short: so many batches of the shortest items come first."""
        self.store, self._vocabulary, self._audio, self._short = store, vocabulary, audio, short
        self._random = np.random.default_rng(seed)
        self._prefix = vocabulary.prefix()

    def batch(self) -> dict[str, Tensor]:
        """numbers int64 [N, names], levels float32 [N, names], ids int64 [N, T]; items of `seconds` [1] at most."""
        random, store = self._random, self.store
        seconds = min(SECONDS) if self._short > 0 else int(random.choice(list(SECONDS), p=list(SECONDS.values())))
        self._short -= 1
        count = max(1, self._audio // seconds)
        kinds = [kind for kind in SHARES if store.of_kind[kind]]
        shares = np.array([SHARES[kind] for kind in kinds])
        numbers, ids = np.zeros((count, len(_NUMBERS)), np.int64), np.zeros((count, tokens_of(seconds)), np.int64)
        for row, kind in enumerate(random.choice(kinds, count, p=shares / shares.sum())):
            numbers[row] = self._row(kind, seconds, ids[row])
        levels = np.zeros((count, len(_LEVELS)), np.float32)
        silent = numbers[:, _NUMBERS.index("backwards")] < 0
        levels[:, 0] = np.where(silent, random.uniform(-75, -10, count), random.uniform(-40, -10, count))
        levels[:, 1] = levels[:, 0] - random.uniform(10, 70, count)
        levels[:, 2:] = random.standard_normal((count, 4)) * random.choice((0.0, 0.15, 0.3), (count, 1))
        arrays = {"numbers": numbers.clip(min=0), "levels": levels, "ids": ids, "seconds": np.array([seconds])}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _row(self, kind: str, seconds: int, ids: np.ndarray) -> list[int]:
        """Writes the tokens; backwards is -1 for noise, so that its level may be lower."""
        random, store, size = self._random, self.store, seconds * SAMPLE_RATE
        room = int(random.uniform(0.3, seconds) * SAMPLE_RATE)
        noise, backwards = self._noise(size), kind == "noise" and random.random() < REVERSED
        said = "own" if store.of_kind["own"] and random.random() < 0.5 else "voices"
        source = store.of_kind[said if backwards else kind]
        start, count, answer = self._noise(size), 1 if random.random() < 0.1 else room, self._vocabulary.nothing
        while kind != "noise" or backwards:
            utterance = source[random.integers(len(source))]
            start = store.first[utterance]
            end = utterance + 1
            while end < store.last[utterance] and store.first[end] + store.count[end] - start <= room:
                end += 1
            count = store.first[end - 1] + store.count[end - 1] - start
            text = [token for place in range(utterance, end) for token in store.ids[place][place > utterance]]
            if count <= size and len(text) <= 12 * seconds:
                answer = answer if backwards else [*self._vocabulary.speech, *text, self._vocabulary.end]
                break
        free = size - count
        lead, tail = (int(random.uniform(0.0, min(_ROOM * SAMPLE_RATE, free / 2))) for _ in range(2))
        total = max(MIN_SAMPLES, lead + count + tail)
        prefix = self._prefix
        if random.random() < 0.1:
            prefix = self._vocabulary.prefix(KNOWN[random.integers(len(KNOWN))])[: len(prefix) + _CONTEXT]
        rows = rows_of(total // HOP)
        tokens = [*prefix, *[0] * rows, *self._vocabulary.suffix, *answer]
        ids[: len(tokens)] = tokens
        banks = np.array((0, random.integers(WARPS // 2), random.integers(WARPS)))
        bank = int(random.choice(banks, p=(0.4, 0.45, 0.15)))
        flag = -1 if kind == "noise" and not backwards else int(backwards)
        return [
            *(start, count, lead, total, flag, noise, bank),
            *(len(prefix), rows, len(tokens) - len(answer), len(tokens)),
        ]

    def _noise(self, size: int) -> int:
        begin, end = self.store.noises[self._random.integers(len(self.store.noises))]
        return int(self._random.integers(begin, end - size))


def together(batch: Mapping[str, Tensor], store: Store, seconds: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Waves [N, samples with what a window needs around them], and the columns of the batch by name."""
    found = dict(zip(_NUMBERS, batch["numbers"].unbind(1), strict=True))
    columns = {name: value[:, None] for name, value in found.items()}
    start, count, lead, total = (columns[name] for name in ("start", "count", "lead", "total"))
    place = torch.arange(-N_FFT // 2, seconds * SAMPLE_RATE + N_FFT // 2, device=store.wave.device)
    place = torch.where(place.abs() >= total, 2 * (total - 1) - place, place.abs()).clamp(min=0)
    at = place - lead
    inside, at = (at >= 0) & (at < count), at.clamp(min=0).minimum(count - 1)
    at = torch.where(columns["backwards"] > 0, count - 1 - at, at)
    wave = store.wave[start + at] * inside
    around = store.wave[(columns["noise"] + place).clamp(max=len(store.wave) - 1)] * (place < total)
    levels = 10.0 ** (batch["levels"][:, :2] / 20.0)
    return (_at(wave, levels[:, :1], count) + _at(around, levels[:, 1:], total)).clamp(-1.0, 1.0), found


def _at(wave: Tensor, level: Tensor, count: Tensor) -> Tensor:
    """int16 [N, T] -> of this root mean square over so many samples; what is nearly silent stays so."""
    wave = wave.float()
    loudness = (wave.square().sum(1, keepdim=True) / count).sqrt()
    return wave * torch.where(loudness > 4.0, level / loudness.clamp(min=4.0), 1 / 32768.0)


def tilts(levels: Tensor) -> Tensor:
    """What a room or microphone does to the power in the bands [N, 1, 128]."""
    on = levels.device
    waves = torch.arange(1, 5, device=on)[:, None] * torch.linspace(0.0, torch.pi, MEL_BANDS, device=on)
    return (10.0 ** (levels[:, 2:] @ waves.cos()))[:, None]


def phones(found: Mapping[str, Tensor], store: Store, seconds: int) -> Tensor:
    """int64 [N, rows, PHONES_PER_ROW], UNKNOWN where nobody knows and behind the end."""
    row = torch.arange(CHUNK_ROWS * seconds, device=store.wave.device)
    middle = row // CHUNK_ROWS * SAMPLE_RATE + row % CHUNK_ROWS * (8 * HOP) + SOUND // 2
    time = middle[:, None] + SOUND * torch.arange(PHONES_PER_ROW, device=row.device)
    column = {name: value[:, None, None] for name, value in found.items()}
    at, count = time - column["lead"], column["count"]
    inside, at = (at >= 0) & (at < count), at.clamp(min=0).minimum(count - 1)
    at = torch.where(column["backwards"] > 0, count - 1 - at, at)
    heard = torch.where(inside, store.phones[(column["start"] + at) // SOUND].long(), 0)
    known = store.phones[column["start"] // SOUND] != UNKNOWN
    return heard.masked_fill((row[:, None] >= column["rows"]) | ~known, UNKNOWN)
