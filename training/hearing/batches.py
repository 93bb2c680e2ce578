"""All sounds so far, and batches of them: a batch says what is put together, and the device does it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from models.qwen3_asr.config import CHUNK_ROWS, HOP, MEL_BANDS, MIN_SAMPLES, N_FFT
from models.qwen3_asr.items import rows_of
from training.hearing.network import END, NOTHING, PHONES_PER_ROW, SPEECH, SUFFIX, WARPS, ids_of, prefix_of
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


def tokens_of(seconds: int) -> int:
    """Length of the rows of text of items of at most so many seconds."""
    return 24 + _CONTEXT + CHUNK_ROWS * seconds + 12 * seconds + 16


class Store:
    """Samples and phones on the device; of each utterance where it is, what it says, and where its file ends."""

    def __init__(self, hours: float, on: torch.device) -> None:
        size = int(hours * 3600) * SAMPLE_RATE
        self.wave = torch.zeros(size, dtype=torch.int16, device=on)
        self.phones = torch.zeros(size // SOUND, dtype=torch.uint8, device=on)
        self.used = 0
        self.first, self.count, self.last = list[int](), list[int](), list[int]()
        self.ids: list[tuple[list[int], list[int]]] = []
        self.of_kind: Mapping[str, list[int]] = defaultdict(list)
        self.noises = list[tuple[int, int]]()

    @property
    def hours(self) -> float:
        return self.used / SAMPLE_RATE / 3600

    def take_in(self, reader: Reader, most: int) -> None:
        """New files, while there is room."""
        for name, file in reader.take(most):
            self.add(name.partition("-")[0], *(file[key] for key in ("texts", "samples", "wave", "sounds")))

    def add(self, kind: str, texts: np.ndarray, samples: np.ndarray, wave: np.ndarray, phones: np.ndarray) -> None:
        begin, end = self.used, self.used + len(wave)
        if end > len(self.wave):
            return
        if kind == "noise":
            self.noises.append((begin, end))
        self.wave[begin:end] = torch.from_numpy(wave)
        self.phones[begin // SOUND : end // SOUND] = torch.from_numpy(phones)
        number = len(self.first)
        self.ids += [(ids_of(text), ids_of(f" {text}")) for text in texts.tolist()]
        self.count += samples.tolist()
        self.first += (begin + np.cumsum(samples) - samples).tolist()
        self.last += [number + len(texts)] * len(texts)
        self.of_kind[kind] += range(number, number + len(texts))
        self.used = end


class Batches:
    def __init__(self, store: Store, audio: int, seed: int, short: int = 0) -> None:
        """audio: seconds of a batch; short: so many batches of the shortest items come first."""
        self.store, self._audio, self._short = store, audio, short
        self._random = np.random.default_rng(seed)
        self._prefix = prefix_of()

    def batch(self) -> dict[str, Tensor]:
        """ids int64 [N, T], `seconds` [1] that items last at most, and the columns of `_row`, each [N, ...]."""
        random, store = self._random, self.store
        seconds = min(SECONDS) if self._short > 0 else int(random.choice(list(SECONDS), p=list(SECONDS.values())))
        self._short -= 1
        count = max(1, self._audio // seconds)
        kinds = [kind for kind in SHARES if store.of_kind[kind]]
        shares = np.array([SHARES[kind] for kind in kinds])
        ids = np.zeros((count, tokens_of(seconds)), np.int64)
        chosen = random.choice(kinds, count, p=shares / shares.sum())
        rows = [self._row(kind, seconds, tokens) for kind, tokens in zip(chosen, ids, strict=True)]
        columns = {name: torch.from_numpy(np.array([row[name] for row in rows])) for name in rows[0]}
        return {"ids": torch.from_numpy(ids), "seconds": torch.tensor([seconds]), **columns}

    def _row(self, kind: str, seconds: int, ids: np.ndarray) -> dict[str, int | np.ndarray]:
        """Writes the tokens. Of the store's samples `count` from `start` on, perhaps backwards, stand at `lead` of
        `total`, over those from `noise` on; levels are of both, in dB, and noise alone may be quieter; bank and tilt:
        what Features does to them; rows of audio at `begin` of the tokens, an answer from `answer` to `length`."""
        random, store, size = self._random, self.store, seconds * SAMPLE_RATE
        room = int(random.uniform(0.3, seconds) * SAMPLE_RATE)
        noise, backwards = self._noise(size), kind == "noise" and random.random() < REVERSED
        said = "own" if store.of_kind["own"] and random.random() < 0.5 else "voices"
        source = store.of_kind[said if backwards else kind]
        start, count, answer = self._noise(size), 1 if random.random() < 0.1 else room, NOTHING
        while kind != "noise" or backwards:
            utterance = source[random.integers(len(source))]
            start = store.first[utterance]
            end = utterance + 1
            while end < store.last[utterance] and store.first[end] + store.count[end] - start <= room:
                end += 1
            count = store.first[end - 1] + store.count[end - 1] - start
            text = [token for place in range(utterance, end) for token in store.ids[place][place > utterance]]
            if count <= size and len(text) <= 12 * seconds:
                answer = answer if backwards else [*SPEECH, *text, END]
                break
        free = size - count
        lead, tail = (int(random.uniform(0.0, min(_ROOM * SAMPLE_RATE, free / 2))) for _ in range(2))
        total = max(MIN_SAMPLES, lead + count + tail)
        prefix = self._prefix
        if random.random() < 0.1:
            prefix = prefix_of(KNOWN[random.integers(len(KNOWN))])[: len(prefix) + _CONTEXT]
        rows = rows_of(total // HOP)
        tokens = [*prefix, *[0] * rows, *SUFFIX, *answer]
        ids[: len(tokens)] = tokens
        banks = np.array((0, random.integers(WARPS // 2), random.integers(WARPS)))
        bank = int(random.choice(banks, p=(0.4, 0.45, 0.15)))
        level = random.uniform(-75 if kind == "noise" and not backwards else -40, -10)
        tilt = random.standard_normal(4) * random.choice((0.0, 0.15, 0.3))
        return {
            "start": start,
            "count": count,
            "backwards": int(backwards),
            "lead": lead,
            "total": total,
            "noise": noise,
            "levels": np.array((level, level - random.uniform(10, 70)), np.float32),
            "bank": bank,
            "tilt": tilt.astype(np.float32),
            "begin": len(prefix),
            "rows": rows,
            "answer": len(tokens) - len(answer),
            "length": len(tokens),
        }

    def _noise(self, size: int) -> int:
        begin, end = self.store.noises[self._random.integers(len(self.store.noises))]
        return int(self._random.integers(begin, end - size))


def together(batch: Mapping[str, Tensor], store: Store, seconds: int) -> Tensor:
    """Waves [N, samples with what a window needs around them]."""
    total = batch["total"][:, None]
    time = torch.arange(-N_FFT // 2, seconds * SAMPLE_RATE + N_FFT // 2, device=store.wave.device)
    time = torch.where(time.abs() >= total, 2 * (total - 1) - time, time.abs()).clamp(min=0)
    place, inside = _heard(batch, time)
    around = store.wave[(batch["noise"][:, None] + time).clamp(max=len(store.wave) - 1)] * (time < total)
    said, behind = (10.0 ** (batch["levels"] / 20.0)).split(1, 1)
    wave = _at(store.wave[place] * inside, said, batch["count"][:, None]) + _at(around, behind, total)
    return wave.clamp(-1.0, 1.0)


def _heard(batch: Mapping[str, Tensor], time: Tensor) -> tuple[Tensor, Tensor]:
    """Samples of time [T] or [N, T] -> those of the store that are heard there, and whether any are, [N, T]."""
    start, count, lead, backwards = (batch[name][:, None] for name in ("start", "count", "lead", "backwards"))
    at = time - lead
    inside, at = (at >= 0) & (at < count), at.clamp(min=0).minimum(count - 1)
    return start + torch.where(backwards > 0, count - 1 - at, at), inside


def _at(wave: Tensor, level: Tensor, count: Tensor) -> Tensor:
    """int16 [N, T] -> of this root mean square over so many samples; what is nearly silent stays so."""
    wave = wave.float()
    loudness = (wave.square().sum(1, keepdim=True) / count).sqrt()
    return wave * torch.where(loudness > 4.0, level / loudness.clamp(min=4.0), 1 / 32768.0)


def tilts(tilt: Tensor) -> Tensor:
    """What a room or microphone does to the power in the bands [N, 1, 128]."""
    on = tilt.device
    waves = torch.arange(1, 5, device=on)[:, None] * torch.linspace(0.0, torch.pi, MEL_BANDS, device=on)
    return (10.0 ** (tilt @ waves.cos()))[:, None]


def phones(batch: Mapping[str, Tensor], store: Store, seconds: int) -> Tensor:
    """int64 [N, rows, PHONES_PER_ROW], UNKNOWN where nobody knows and behind the end."""
    row = torch.arange(CHUNK_ROWS * seconds, device=store.wave.device)
    middle = row // CHUNK_ROWS * SAMPLE_RATE + row % CHUNK_ROWS * (8 * HOP) + SOUND // 2
    time = middle[:, None] + SOUND * torch.arange(PHONES_PER_ROW, device=row.device)
    place, inside = _heard(batch, time.flatten())
    heard = torch.where(inside, store.phones[place // SOUND].long(), 0).unflatten(1, time.shape)
    known = store.phones[batch["start"] // SOUND] != UNKNOWN
    return heard.masked_fill(((row >= batch["rows"][:, None]) | ~known[:, None])[..., None], UNKNOWN)
