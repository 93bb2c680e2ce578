"""Examples packed into blocks of one size: as training draws them, on a device, as batches for the network.

A block is one row of each field below. Rows past the last example are a segment of their own, which nothing looks at.
"""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from models.interfaces.resizing import use_threads
from training.loop import Ahead
from training.vision.conversations import Encoder, Example, Tokens, grid_of, make_example, patches_of
from training.vision.network import LETTERS_PER_CELL, UNKNOWN, Network, Packed
from training.vision.pictures import CELL, COLOR_NAMES, SHAPE_NAMES, SIZE_NAMES, Picture

PATCHES, FRAMES, TOKENS, LABELS = 12288, 16384, 12288, 3840
SEGMENTS, SEQUENCES = 72, 136
LONGEST = 2304
_ROOM = {"frames": FRAMES, "patches": PATCHES, "tokens": TOKENS, "labels": LABELS, "segments": 63, "sequences": 127}
"""The most of a block; some segments and sequences stay for the rows behind the last example."""
LETTERS = " " + "".join(chr(code) for code in range(33, 127)) + "£€°"
_CONSTANT = {"thing", "knowledge", "who", "skills", "hello", "thanks", "no_picture", "not_known", "unknown"}
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
_SIZES = [int(np.prod(shape)) * np.dtype(kind).itemsize for shape, kind in FIELDS.values()]
BLOCK_BYTES = sum(_SIZES)


def views(buffer: bytearray) -> dict[str, np.ndarray]:
    """The fields of a block in `buffer`, BLOCK_BYTES of zeros."""
    parts = np.split(np.frombuffer(buffer, np.uint8), np.cumsum(_SIZES)[:-1])
    return {n: part.view(kind).reshape(shape) for part, (n, (shape, kind)) in zip(parts, FIELDS.items(), strict=True)}


class Packer:
    """Writes examples into the fields of a block until one does not fit."""

    def __init__(self, encoder: Encoder, block: dict[str, np.ndarray]) -> None:
        self.encoder, self.block, self.filled = encoder, block, Counter[str]()
        self.tasks: list[str] = []

    def add(self, example: Example) -> bool:
        """False, and nothing is written, where the example does not fit."""
        pictures = example.pictures
        patches = [patches_of(picture) for picture in pictures]
        grids = [grid_of(picture) for picture in pictures]
        tokens = [
            self.encoder.tokens(pictures, turns, opening)
            for turns, opening in zip(example.conversations, example.openings, strict=True)
        ]
        needed = {
            "frames": sum(len(frames) * frames.shape[1] for frames in patches),
            "patches": sum(t * h * w for t, h, w in grids),
            "tokens": sum(len(item.ids) for item in tokens),
            "labels": sum(int((item.labels >= 0).sum()) for item in tokens),
            "segments": sum(t for t, _, _ in grids),
            "sequences": len(tokens),
        }
        if any(self.filled[name] + number > _ROOM[name] for name, number in needed.items()):
            return False
        first_row = self.filled["patches"] // 4
        for picture, frames, grid in zip(pictures, patches, grids, strict=True):
            self._picture(picture, frames, grid)
        for turns, item in zip(example.conversations, tokens, strict=True):
            self._conversation([turn.task for turn in turns], item, first_row)
        return True

    def close(self) -> None:
        block, filled = self.block, self.filled
        _end(block["vision_cu"], filled["segments"], filled["patches"], PATCHES)
        _end(block["text_cu"], filled["sequences"], filled["tokens"], TOKENS)
        block["frame_grids"][filled["frames"] :] = (2, 2, 0, 0)
        block["frame_pictures"][filled["frames"] :] = SEGMENTS - 1
        block["source"][filled["tokens"] :] = -1
        block["turns"][filled["labels"] :] = -1

    def _picture(self, picture: Picture, frames: np.ndarray, grid: tuple[int, int, int]) -> None:
        block, filled = self.block, self.filled
        t, h, w = grid
        count, each = len(frames), h * w
        block["frames"][filled["frames"] : filled["frames"] + count * each] = frames.reshape(-1, 588)
        whole = slice(filled["frames"], filled["frames"] + count * each)
        block["frame_starts"][whole] = np.repeat(filled["frames"] + each * np.arange(count), each)
        block["frame_pictures"][whole] = filled["segments"]
        index = np.indices((h, w)).reshape(2, h // 2, 2, w // 2, 2).transpose(1, 3, 2, 4, 0).reshape(each, 2)
        block["frame_grids"][whole, :2] = h, w
        block["frame_grids"][whole, 2:] = np.tile(index, (count, 1))
        for pair in range(t):
            rows = slice(filled["patches"] + pair * each, filled["patches"] + (pair + 1) * each)
            for name, frame in (("first", 2 * pair), ("second", min(2 * pair + 1, count - 1))):
                start = filled["frames"] + frame * each
                block[name][rows] = np.arange(start, start + each)
            block["coordinates"][rows] = index
            block["vision_cu"][filled["segments"]] = rows.start
            filled["segments"] += 1
        cells = block["cells"][filled["patches"] // 4 : (filled["patches"] + t * each) // 4]
        mark(cells, picture, w // 2)
        filled["frames"] += count * each
        filled["patches"] += t * each

    def _conversation(self, tasks: list[str], item: Tokens, first_row: int) -> None:
        block, filled = self.block, self.filled
        rows = slice(filled["tokens"], filled["tokens"] + len(item.ids))
        block["ids"][rows] = item.ids
        block["source"][rows] = np.where(item.vision >= 0, item.vision + first_row, -1)
        block["positions"][:, rows] = item.positions
        block["text_cu"][filled["sequences"]] = filled["tokens"]
        where = np.flatnonzero(item.labels >= 0)
        labels = slice(filled["labels"], filled["labels"] + len(where))
        block["selected"][labels] = where + filled["tokens"]
        block["labels"][labels] = item.labels[where]
        block["turns"][labels] = item.turns[where] + filled["turns"]
        block["weights"][labels] = [0.3 if tasks[turn] in _CONSTANT else 1.0 for turn in item.turns[where]]
        self.tasks += tasks
        filled["turns"] += len(tasks)
        filled["tokens"] += len(item.ids)
        filled["labels"] += len(where)
        filled["sequences"] += 1


def _end(starts: np.ndarray, index: int, begin: int, end: int) -> None:
    """The rest of a block as segments that are not too long."""
    rest = np.minimum(begin + LONGEST * np.arange(len(starts) - index), end)
    starts[index:] = rest


def mark(cells: np.ndarray, picture: Picture, columns: int) -> None:
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


def pack(encoder: Encoder, examples: list[Example]) -> list[tuple[dict[str, np.ndarray], list[str]]]:
    """Blocks that hold all examples, with the tasks of their turns."""
    packers: list[Packer] = []
    for example in examples:
        if not packers or not packers[-1].add(example):
            packers.append(Packer(encoder, views(bytearray(BLOCK_BYTES))))
            if not packers[-1].add(example):
                raise ValueError("an example is larger than a block")
    for packer in packers:
        packer.close()
    return [(packer.block, packer.tasks) for packer in packers]


class Drawn(IterableDataset[Tensor]):
    """Blocks without end, uint8 [BLOCK_BYTES]."""

    def __init__(self, tokenizer: Path, seed: int) -> None:
        self._tokenizer, self._seed = tokenizer, seed

    def __iter__(self) -> Iterator[Tensor]:
        use_threads(1)
        worker = get_worker_info()
        random, encoder = Random(self._seed * 1000 + (worker.id if worker else 0)), Encoder(self._tokenizer)
        waiting: Example | None = None
        while True:
            buffer = bytearray(BLOCK_BYTES)
            packer = Packer(encoder, views(buffer))
            while packer.add(waiting := waiting or make_example(random)):
                waiting = None
            packer.close()
            yield torch.frombuffer(buffer, dtype=torch.uint8)


class Feed:
    """New blocks as processes draw them, and a pool of those before them on the device, which fills batches up."""

    def __init__(self, drawn: Drawn, device: torch.device, workers: int, pool: int, seed: int) -> None:
        loader = DataLoader(drawn, None, num_workers=workers, pin_memory=device.type == "cuda", in_order=False)
        loader.multiprocessing_context = "spawn" if workers else None
        self._drawn, self._random, self.count = Ahead(iter(loader), 8), Random(seed), 0
        self._pool = torch.zeros(pool, BLOCK_BYTES, dtype=torch.uint8, device=device)

    def gather(self, rows: Tensor) -> int:
        """Fills `rows` [number, BLOCK_BYTES], new blocks first; how many are new."""
        places: list[int] = []
        while len(places) < len(rows):
            try:
                block = self._drawn.take(wait=self.count < len(rows))
            except queue.Empty:
                break
            places.append(self.count % len(self._pool))
            self._pool[places[-1]].copy_(block, non_blocking=True)
            self.count += 1
        new, known = len(places), min(self.count, len(self._pool))
        while len(places) < len(rows):
            place = self._random.randrange(known)
            if place not in places:
                places.append(place)
        torch.index_select(self._pool, 0, torch.tensor(places, device=rows.device), out=rows)
        return new


Held = tuple[dict[str, Tensor], list[str]]
"""The fields of one block, and the tasks of its turns."""


@dataclass(frozen=True)
class Answer:
    """right: every token is the most likely one after the right ones before it, so greedy decoding says it word for
    word. said: the most likely tokens."""

    task: str
    right: bool
    said: tuple[int, ...]
    wanted: tuple[int, ...]


def on_device(encoder: Encoder, examples: Sequence[Example], device: torch.device) -> list[Held]:
    held = []
    for block, tasks in pack(encoder, list(examples)):
        flat = torch.from_numpy(np.concatenate([array.reshape(-1).view(np.uint8) for array in block.values()]))
        held.append((fields(flat.to(device)[None]), tasks))
    return held


@torch.no_grad()
def answers(network: Network, held: Held, dtype: torch.dtype) -> list[Answer]:
    found, tasks = held
    batch = packed(found)
    said = network.logits(network.model(batch, network.visual(batch, dtype))).argmax(-1).tolist()
    spoken: list[tuple[list[int], list[int]]] = [([], []) for _ in tasks]
    rows = zip(found["turns"].flatten().tolist(), said, found["labels"].flatten().tolist(), strict=True)
    for turn, token, label in rows:
        if turn >= 0:
            spoken[turn][0].append(token)
            spoken[turn][1].append(label)
    return [
        Answer(task, said == wanted, tuple(said), tuple(wanted))
        for task, (said, wanted) in zip(tasks, spoken, strict=True)
    ]


def fields(rows: Tensor) -> dict[str, Tensor]:
    """Blocks uint8 [n, BLOCK_BYTES] -> their fields, each [n, ...]."""
    kinds: dict[type, torch.dtype] = {np.uint8: torch.uint8, np.int16: torch.int16, np.float16: torch.float16}
    parts = zip(rows.split(_SIZES, 1), FIELDS.items(), strict=True)
    return {n: part.contiguous().view(kinds[kind]).view(len(rows), *shape) for part, (n, (shape, kind)) in parts}


def packed(found: dict[str, Tensor]) -> Packed:
    """Blocks as one batch: every index moved on by what the blocks before it hold."""
    number = len(found["ids"])
    step = torch.arange(number, device=found["ids"].device)[:, None]

    def starts(name: str, length: int) -> Tensor:
        every = (found[name].int() + step.int() * length).flatten()
        return torch.cat((every, torch.full_like(every[:1], number * length)))

    source = found["source"].long()
    return Packed(
        frames=found["frames"].flatten(0, 1),
        first=(found["first"].long() + step * FRAMES).flatten(),
        second=(found["second"].long() + step * FRAMES).flatten(),
        coordinates=found["coordinates"].flatten(0, 1),
        vision_cu=starts("vision_cu", PATCHES),
        ids=found["ids"].long().flatten(),
        source=torch.where(source >= 0, source + step * (PATCHES // 4), source).flatten(),
        positions=found["positions"].permute(1, 0, 2).flatten(1),
        text_cu=starts("text_cu", TOKENS),
        selected=(found["selected"].long() + step * TOKENS).flatten(),
        longest=LONGEST,
    )


_MOST_PIXELS = 5
_GAIN, _OFFSET, _NOISE = 0.06, 8.0, 5.0
_SIDE = 14


def drawn_shifts(number: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For `number` blocks: shifts int64 [n, pictures, 2]; gains, offsets, noise float32 [n, pictures, 3]; which blocks
    are moved, bool [n]: two of three, for the targets of cells hold only where nothing moves."""
    moved = torch.rand(number, device=device) < 2 / 3
    shifts = torch.randint(-_MOST_PIXELS, _MOST_PIXELS + 1, (number, SEGMENTS, 2), device=device)
    gain, offset, noise = torch.rand(3, number, SEGMENTS, device=device).unbind(0)
    light = torch.stack((1 - _GAIN + 2 * _GAIN * gain, 2 * _OFFSET * offset - _OFFSET, _NOISE * noise), dim=-1)
    return shifts * moved[:, None, None], light, moved


def shifted(
    frames: Tensor, starts: Tensor, grids: Tensor, pictures: Tensor, shifts: Tensor, light: Tensor, noise: Tensor
) -> Tensor:
    """Patches uint8 [n, F, 588] of pictures moved by their shifts, their borders repeated, and changed in light; noise
    [n, F, 588] of deviation 1."""
    n, rows, columns = frames.shape
    block = torch.arange(n, device=frames.device)[:, None]
    own = shifts[block, pictures.long()]
    height, width, row, column = grids.long().unbind(-1)
    side = torch.arange(_SIDE, device=frames.device)
    y = torch.minimum((_SIDE * row + own[..., 0])[..., None] + side, (_SIDE * height - 1)[..., None]).clamp(min=0)
    x = torch.minimum((_SIDE * column + own[..., 1])[..., None] + side, (_SIDE * width - 1)[..., None]).clamp(min=0)
    r, c = (y // _SIDE)[..., :, None], (x // _SIDE)[..., None, :]
    patch = ((r // 2) * (width // 2)[..., None, None] + c // 2) * 4 + (r % 2) * 2 + c % 2
    patch = patch + (block * rows + starts.long())[..., None, None]
    inside = (y % _SIDE)[..., :, None] * _SIDE + (x % _SIDE)[..., None, :]
    channels = torch.arange(3, device=frames.device)[:, None, None] * _SIDE**2
    found = frames.reshape(-1)[(patch * columns + inside)[:, :, None] + channels].flatten(2).float()
    gain, offset, spread = light[block, pictures.long()].unsqueeze(2).unbind(-1)
    found = found * gain + offset + spread * noise.float()
    return found.round().clamp(0, 255).to(torch.uint8)
