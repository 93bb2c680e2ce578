"""Utterances packed into rows of one length, so that every step of the training has the same shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from training.voice.config import AUDIO_START, BLANK, REFERENCE_END, REFERENCE_START, tokens
from training.voice.corpus import Store
from training.voice.texts import Writer

_NOTHING = np.zeros(0, np.int16)


@dataclass(frozen=True)
class Shape:
    """rows of `length` positions; patches: how many of them are computed at most, in prompts and as targets alike."""

    rows: int = 26
    length: int = 640
    patches: int = 5120


_REFERENCE, _JOINED, _DESCRIBED, _HISTORY = 0.2, 0.3, 0.1, 0.3
"""Shares of examples with a reference clip, with several joined utterances, up to a segment's length, and with a
description of the voice in front; the most noise on patches of the past."""


Batch = dict[str, Tensor]


class Packer:
    """Draws examples from a store with numbers of its own."""

    def __init__(self, store: Store, shape: Shape, seed: int) -> None:
        self._store, self._shape = store, shape
        self._random = np.random.default_rng(seed)
        writer = Writer(seed)
        self._descriptions = [np.array(tokens(f"({writer.description()})"), np.int16) for _ in range(2000)]

    def batch(self) -> Batch:
        """token_ids, is_patch, positions, documents [rows, length]; audio_place, audio_patch, audio_noise [patches]:
        place in the flattened rows, rows * length for none, and patch in the store; of targets [patches] the place that
        predicts, the patch to predict, the index of the one before it among the audio (of a first one the last, which
        is none), whether it is the last, span: its characters' columns, and the weight, 0 where there is no target."""
        rows, length, patches = self._shape.rows, self._shape.length, self._shape.patches
        self._ids = np.zeros((rows, length), np.int64)
        self._is_patch = np.zeros((rows, length), bool)
        self._positions = np.zeros((rows, length), np.int64)
        self._documents = np.full((rows, length), -1, np.int64)
        self._audio: list[tuple[np.ndarray, ...]] = []
        self._targets: list[tuple[np.ndarray, ...]] = []
        self._audio_count = 0
        waiting = self._example(length)
        for row in range(rows):
            column, document = 0, 0
            while column + waiting.size <= length and self._audio_count + waiting.audio < patches:
                self._place(waiting, row, column, document)
                column, document = column + waiting.size, document + 1
                waiting = self._example(length)
        return self._finish(rows * length, patches)

    def _example(self, length: int) -> _Example:
        store, random = self._store, self._random
        chosen = [int(random.integers(len(store.first)))]
        if random.random() < _JOINED:
            chosen += random.integers(len(store.first), size=int(random.integers(1, 14))).tolist()
        reference = None
        if random.random() < _REFERENCE:
            clip = int(random.integers(len(store.first)))
            count = min(store.count[clip], 80)
            kept = int(random.integers(min(6, count), count + 1))
            start = store.first[clip] + int(random.integers(0, store.count[clip] - kept + 1))
            reference = np.arange(start, start + kept)
        described = self._descriptions[int(random.integers(len(self._descriptions)))]
        front = described if random.random() < _DESCRIBED else _NOTHING
        while (example := _Example(store, chosen, reference, front, _HISTORY * random.random())).size > length:
            chosen = chosen[:-1] or [int(random.integers(len(store.first)))]
        return example

    def _place(self, example: _Example, row: int, column: int, document: int) -> None:
        end, count = column + example.size, example.targets
        self._ids[row, column:end] = example.ids
        self._is_patch[row, column:end] = example.is_patch
        self._positions[row, column:end] = np.arange(example.size)
        self._documents[row, column:end] = document
        places = np.flatnonzero(example.is_patch) + row * self._shape.length + column
        noise = np.full(example.audio, example.noise, np.float32)
        self._audio.append((places, example.patches, noise))
        self._audio_count += example.audio
        before = np.arange(self._audio_count - count, self._audio_count) - 1
        before[0] = self._shape.patches - 1
        last = (np.arange(count) == count - 1).astype(np.int64)
        span, weight = example.span + column, np.ones(count, np.float32)
        self._targets.append((places[-count:] - 1, example.patches[-count:], before, last, span, weight))

    def _finish(self, nowhere: int, patches: int) -> Batch:
        rows = {"token_ids": self._ids, "is_patch": self._is_patch, "positions": self._positions}
        audio = {"audio_place": nowhere, "audio_patch": 0, "audio_noise": 0.0}
        targets = {"place": 0, "patch": 0, "before": patches - 1, "last": 0, "span": (0, 1), "weight": 0.0}
        columns = {**rows, "documents": self._documents, **_padded(self._audio, patches, audio)}
        columns |= _padded(self._targets, patches, targets)
        return {name: torch.from_numpy(column) for name, column in columns.items()}


def _padded(parts: list[tuple[np.ndarray, ...]], size: int, fills: Mapping[str, object]) -> dict[str, np.ndarray]:
    """Each column of all parts, of `size` rows."""
    joined = {name: np.concatenate(column) for name, column in zip(fills, zip(*parts, strict=True), strict=True)}
    found = {name: np.full((size, *x.shape[1:]), fills[name], x.dtype) for name, x in joined.items()}
    for name, column in joined.items():
        found[name][: len(column)] = column
    return found


class _Example:
    """[103 reference 104] [(description)] text 101 speech."""

    def __init__(
        self, store: Store, chosen: list[int], reference: np.ndarray | None, description: np.ndarray, noise: float
    ) -> None:
        parts, spans = [description], list[np.ndarray]()
        if reference is not None:
            marks = np.array([REFERENCE_START]), np.array([REFERENCE_END])
            parts = [marks[0], np.zeros(len(reference), np.int64), marks[1], description]
        for number, index in enumerate(chosen):
            if number:
                parts.append(np.array([BLANK]))
            first, count = store.first[index], store.count[index]
            spans.append(store.span[first : first + count].astype(np.int64) + sum(map(len, parts)))
            parts.append(store.texts[index])
        speech = [np.arange(store.first[index], store.first[index] + store.count[index]) for index in chosen]
        self.targets = sum(map(len, speech))
        parts += [np.array([AUDIO_START]), np.zeros(self.targets, np.int64)]
        self.ids = np.concatenate(parts).astype(np.int64)
        self.size = len(self.ids)
        self.is_patch = np.zeros(self.size, bool)
        self.is_patch[self.size - self.targets :] = True
        if reference is not None:
            self.is_patch[1 : 1 + len(reference)] = True
            speech.insert(0, reference)
        self.patches = np.concatenate(speech)
        self.audio = len(self.patches)
        self.span = np.concatenate(spans)
        self.noise = noise
