"""Examples packed into blocks of one size, and the processes that make them.

A block is one row of each field below. Rows past the last example are a segment of their own, which nothing looks at.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from models.embedded.vision_training.network import LETTERS_PER_CELL, UNKNOWN
from models.embedded.world.conversations import Encoder, Example, Tokens, grid_of, patches_of
from models.embedded.world.curriculum import draw
from models.embedded.world.palette import COLOR_NAMES, SHAPE_NAMES, SIZE_NAMES
from models.embedded.world.pictures import CELL, Picture
from models.resizing import use_threads

PATCHES, FRAMES, TOKENS, LABELS = 6144, 8192, 6144, 1920
SEGMENTS, SEQUENCES = 40, 72
LONGEST = 1280
_SPARE = 8
LETTERS = " " + "".join(chr(code) for code in range(33, 127)) + "£€°"
_CONSTANT = {"thing", "knowledge", "who", "skills", "hello", "thanks", "no_picture", "not_known"}
FIELDS: dict[str, tuple[tuple[int, ...], type]] = {
    "frames": ((FRAMES, 588), np.uint8),
    "frame_starts": ((FRAMES,), np.int16),
    "frame_grids": ((FRAMES, 4), np.uint8),
    "frame_pictures": ((FRAMES,), np.uint8),
    "first": ((PATCHES,), np.int16),
    "second": ((PATCHES,), np.int16),
    "coordinates": ((PATCHES, 2), np.uint8),
    "vision_cu": ((SEGMENTS,), np.int16),
    "ids": ((TOKENS,), np.int16),
    "source": ((TOKENS,), np.int16),
    "positions": ((3, TOKENS), np.int16),
    "text_cu": ((SEQUENCES,), np.int16),
    "selected": ((LABELS,), np.int16),
    "labels": ((LABELS,), np.int16),
    "weights": ((LABELS,), np.float16),
    "turns": ((LABELS,), np.int16),
    "cells": ((PATCHES // 4, 3 + LETTERS_PER_CELL), np.uint8),
}
BLOCK_BYTES = sum(int(np.prod(shape)) * np.dtype(kind).itemsize for shape, kind in FIELDS.values())


def views(buffer: memoryview) -> dict[str, np.ndarray]:
    """The fields of a block in `buffer`, which has BLOCK_BYTES."""
    arrays: dict[str, np.ndarray] = {}
    start = 0
    for name, (shape, kind) in FIELDS.items():
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        arrays[name] = np.frombuffer(buffer[start : start + size], dtype=kind).reshape(shape)
        start += size
    return arrays


@dataclass
class _Filled:
    frames: int = 0
    patches: int = 0
    tokens: int = 0
    labels: int = 0
    segments: int = 0
    sequences: int = 0
    turns: int = 0


class Packer:
    """Writes examples into the fields of a block until one does not fit."""

    def __init__(self, encoder: Encoder, block: dict[str, np.ndarray]) -> None:
        self.encoder, self.block, self.filled = encoder, block, _Filled()
        self.tasks: list[str] = []

    def add(self, example: Example) -> bool:
        """False, and nothing is written, where the example does not fit."""
        pictures = example.pictures
        patches = [patches_of(picture) for picture in pictures]
        grids = [grid_of(picture) for picture in pictures]
        tokens = [
            self.encoder.tokens(pictures, turns, system)
            for turns, system in zip(example.conversations, example.systems, strict=True)
        ]
        filled = self.filled
        fits = (
            filled.frames + sum(len(frames) * frames.shape[1] for frames in patches) <= FRAMES
            and filled.patches + sum(t * h * w for t, h, w in grids) <= PATCHES
            and filled.tokens + sum(len(item.ids) for item in tokens) <= TOKENS
            and filled.labels + sum(int((item.labels >= 0).sum()) for item in tokens) <= LABELS
            and filled.segments + sum(t for t, _, _ in grids) < SEGMENTS - _SPARE
            and filled.sequences + len(tokens) < SEQUENCES - _SPARE
        )
        if not fits:
            return False
        first_row = filled.patches // 4
        for picture, frames, grid in zip(pictures, patches, grids, strict=True):
            self._picture(picture, frames, grid)
        for turns, item in zip(example.conversations, tokens, strict=True):
            self._conversation([turn.task for turn in turns], item, first_row)
        return True

    def close(self) -> None:
        block, filled = self.block, self.filled
        _end(block["vision_cu"], filled.segments, filled.patches, PATCHES)
        _end(block["text_cu"], filled.sequences, filled.tokens, TOKENS)
        for name in ("first", "second"):
            block[name][filled.patches :] = 0
        block["coordinates"][filled.patches :] = 0
        block["frame_starts"][filled.frames :] = 0
        block["frame_grids"][filled.frames :] = (2, 2, 0, 0)
        block["frame_pictures"][filled.frames :] = SEGMENTS - 1
        block["cells"][filled.patches // 4 :] = 0
        block["ids"][filled.tokens :] = 0
        block["source"][filled.tokens :] = -1
        block["positions"][:, filled.tokens :] = 0
        block["selected"][filled.labels :] = 0
        block["labels"][filled.labels :] = 0
        block["weights"][filled.labels :] = 0
        block["turns"][filled.labels :] = -1

    def _picture(self, picture: Picture, frames: np.ndarray, grid: tuple[int, int, int]) -> None:
        block, filled = self.block, self.filled
        t, h, w = grid
        count, each = len(frames), h * w
        block["frames"][filled.frames : filled.frames + count * each] = frames.reshape(-1, 588)
        whole = slice(filled.frames, filled.frames + count * each)
        block["frame_starts"][whole] = np.repeat(filled.frames + each * np.arange(count), each)
        block["frame_pictures"][whole] = filled.segments
        index = np.indices((h, w)).reshape(2, h // 2, 2, w // 2, 2).transpose(1, 3, 2, 4, 0).reshape(each, 2)
        block["frame_grids"][whole, :2] = h, w
        block["frame_grids"][whole, 2:] = np.tile(index, (count, 1))
        for pair in range(t):
            rows = slice(filled.patches + pair * each, filled.patches + (pair + 1) * each)
            for name, frame in (("first", 2 * pair), ("second", min(2 * pair + 1, count - 1))):
                start = filled.frames + frame * each
                block[name][rows] = np.arange(start, start + each)
            block["coordinates"][rows] = index
            block["vision_cu"][filled.segments] = rows.start
            filled.segments += 1
        cells = block["cells"][filled.patches // 4 : (filled.patches + t * each) // 4]
        cells[:] = 0
        _mark(cells, picture, w // 2)
        filled.frames += count * each
        filled.patches += t * each

    def _conversation(self, tasks: list[str], item: Tokens, first_row: int) -> None:
        block, filled = self.block, self.filled
        rows = slice(filled.tokens, filled.tokens + len(item.ids))
        block["ids"][rows] = item.ids
        block["source"][rows] = np.where(item.vision >= 0, item.vision + first_row, -1)
        block["positions"][:, rows] = item.positions
        block["text_cu"][filled.sequences] = filled.tokens
        where = np.flatnonzero(item.labels >= 0)
        labels = slice(filled.labels, filled.labels + len(where))
        block["selected"][labels] = where + filled.tokens
        block["labels"][labels] = item.labels[where]
        block["turns"][labels] = item.turns[where] + filled.turns
        block["weights"][labels] = [0.3 if tasks[turn] in _CONSTANT else 1.0 for turn in item.turns[where]]
        self.tasks += tasks
        filled.turns += len(tasks)
        filled.tokens += len(item.ids)
        filled.labels += len(where)
        filled.sequences += 1


def _end(starts: np.ndarray, index: int, begin: int, end: int) -> None:
    """The rest of a block as segments that are not too long."""
    rest = np.minimum(begin + LONGEST * np.arange(len(starts) - index), end)
    starts[index:] = rest


def _mark(cells: np.ndarray, picture: Picture, columns: int) -> None:
    """Targets of the cells of a picture: classes of the shape and of up to six letters whose centres they hold. Of
    strange pictures, which may hold print that nobody is asked about, they are unknown."""
    if picture.strange:
        cells[:] = UNKNOWN
        return
    for figure, x, y in picture.places:
        cells[int(y // CELL) * columns + int(x // CELL), :3] = (
            1 + SHAPE_NAMES.index(figure.shape),
            1 + COLOR_NAMES.index(figure.color),
            1 + SIZE_NAMES.index(figure.size),
        )
    held: dict[int, list[int]] = {}
    for character, x, y in picture.letters:
        held.setdefault(int(y // CELL) * columns + int(x // CELL), []).append(LETTERS.find(character))
    for cell, letters in held.items():
        if 0 <= cell < len(cells):
            cells[cell, 3 : 3 + min(len(letters), LETTERS_PER_CELL)] = letters[:LETTERS_PER_CELL]


def work(seed: int, directory: str, path: str, free: Any, full: Any, level: Any, cores: list[int]) -> None:
    """A process that fills blocks: takes the index of a free one, gives it back filled. free, full and level are
    what multiprocessing shares, path is that of the blocks' memory."""
    if cores:
        os.sched_setaffinity(0, cores)
    use_threads(1)
    encoder = Encoder(Path(directory))
    random = Random(seed)
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    waiting: Example | None = None
    while True:
        waited = time.monotonic()
        index = free.get()
        if index is None:
            return
        buffer = memoryview(memory)[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
        packer = Packer(encoder, views(buffer))
        started, began = time.thread_time(), time.monotonic()
        while True:
            waiting = waiting or draw(random, level.value)
            if not packer.add(waiting):
                break
            waiting = None
        packer.close()
        spent = (time.thread_time() - started, time.monotonic() - began, began - waited)
        full.put((index, spent, packer.filled.sequences))


def pack(encoder: Encoder, examples: list[Example]) -> list[tuple[dict[str, np.ndarray], list[str]]]:
    """Blocks that hold all examples, with the tasks of their turns."""
    blocks = []
    packer = None
    for example in examples:
        if packer is None or not packer.add(example):
            if packer is not None:
                packer.close()
                blocks.append((packer.block, packer.tasks))
            packer = Packer(encoder, views(memoryview(bytearray(BLOCK_BYTES))))
            if not packer.add(example):
                raise ValueError("an example is larger than a block")
    if packer is not None:
        packer.close()
        blocks.append((packer.block, packer.tasks))
    return blocks
