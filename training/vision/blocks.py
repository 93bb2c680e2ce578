"""Examples packed into blocks of one size: as training draws them, on a device, as batches for the network.

A block has all fields below. Rows past the last example are a segment of their own, which nothing looks at.
"""

from __future__ import annotations

import queue
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from models.interfaces.resizing import use_threads
from training.loop import Ahead
from training.vision.conversations import Example, Tokens, grid_of, make_example, patches_of, tokens_of
from training.vision.network import LETTERS_PER_CELL, UNKNOWN, Network, Packed
from training.vision.pictures import CELL, COLOR_NAMES, SHAPE_NAMES, SIZE_NAMES, Picture

PATCHES, FRAMES, TOKENS, LABELS = 12288, 16384, 12288, 3840
SEGMENTS, SEQUENCES = 72, 136
LONGEST = 2304
_ROOM = {"frames": FRAMES, "patches": PATCHES, "tokens": TOKENS, "labels": LABELS, "segments": 63, "sequences": 127}
"""The most of a block; some segments and sequences stay for the rows behind the last example."""
LETTERS = " " + "".join(chr(code) for code in range(33, 127)) + "£€°"
_CONSTANT = {"thing", "knowledge", "who", "skills", "hello", "thanks", "no_picture", "not_known", "unknown"}
FIELDS: dict[str, tuple[tuple[int, ...], torch.dtype, int]] = {
    "frames": ((FRAMES, 588), torch.uint8, 0),
    "frame_starts": ((FRAMES,), torch.int16, 0),
    "frame_grids": ((FRAMES, 4), torch.uint8, 0),
    "frame_pictures": ((FRAMES,), torch.uint8, SEGMENTS - 1),
    "first": ((PATCHES,), torch.int16, 0),
    "second": ((PATCHES,), torch.int16, 0),
    "coordinates": ((PATCHES, 2), torch.uint8, 0),
    "vision_cu": ((SEGMENTS,), torch.int16, 0),
    "ids": ((TOKENS,), torch.int16, 0),
    "source": ((TOKENS,), torch.int16, -1),
    "positions": ((TOKENS, 3), torch.int16, 0),
    "text_cu": ((SEQUENCES,), torch.int16, 0),
    "selected": ((LABELS,), torch.int16, 0),
    "labels": ((LABELS,), torch.int16, 0),
    "weights": ((LABELS,), torch.float16, 0),
    "turns": ((LABELS,), torch.int16, -1),
    "cells": ((PATCHES // 4, 3 + LETTERS_PER_CELL), torch.uint8, 0),
}
"""Shape, dtype, and what stands behind the last example."""
Fields = dict[str, Tensor]


def empty(number: int, device: torch.device) -> Fields:
    """Room for blocks, each field [number, ...]."""
    return {name: torch.zeros(number, *shape, dtype=kind, device=device) for name, (shape, kind, _) in FIELDS.items()}


class Packer:
    """Puts examples into a block until one does not fit."""

    def __init__(self) -> None:
        self._used, self.tasks = Counter[str](), list[str]()
        self._parts: dict[str, list[np.ndarray]] = defaultdict(list)

    def add(self, example: Example) -> bool:
        """False, and nothing is written, where the example does not fit."""
        used, tasks, parts = self._used.copy(), [*self.tasks], {name: [*each] for name, each in self._parts.items()}
        self.put(example)
        if all(self._used[name] <= most for name, most in _ROOM.items()):
            return True
        self._used, self.tasks, self._parts = used, tasks, defaultdict(list, parts)
        return False

    def put(self, example: Example) -> None:
        first_row = self._used["patches"] // 4
        for picture in example.pictures:
            self._picture(picture)
        for turns, opening in zip(example.conversations, example.openings, strict=True):
            tokens = tokens_of(example.pictures, turns, opening)
            self._conversation([turn.task for turn in turns], tokens, first_row)

    def joined(self) -> Fields:
        """All that has been put, each field [...]."""
        return {name: torch.from_numpy(np.concatenate(parts)) for name, parts in self._parts.items()}

    def block(self) -> Fields:
        """The rest of both `cu` are segments that are not too long."""
        used, rest = self._used, LONGEST * np.arange(SEQUENCES)
        self._add(
            vision_cu=np.minimum(used["patches"] + rest[: SEGMENTS - used["segments"]], PATCHES),
            text_cu=np.minimum(used["tokens"] + rest[: SEQUENCES - used["sequences"]], TOKENS),
            frame_grids=np.tile((2, 2, 0, 0), (FRAMES - used["frames"], 1)),
        )
        found = {name: torch.full(shape, fill, dtype=kind) for name, (shape, kind, fill) in FIELDS.items()}
        for name, value in self.joined().items():
            found[name][: len(value)] = value
        return found

    def _add(self, **parts: np.ndarray) -> None:
        for name, part in parts.items():
            self._parts[name].append(part)

    def _picture(self, picture: Picture) -> None:
        used, frames, (t, h, w) = self._used, patches_of(picture), grid_of(picture)
        count, each = len(frames), h * w
        index = np.indices((h, w)).reshape(2, h // 2, 2, w // 2, 2).transpose(1, 3, 2, 4, 0).reshape(each, 2)
        starts = used["frames"] + each * np.arange(count)
        rows, pairs = starts[:, None] + np.arange(each), 2 * np.arange(t)
        cells = np.zeros((t * each // 4, 3 + LETTERS_PER_CELL), np.uint8)
        mark(cells, picture, w // 2)
        self._add(
            frames=frames.reshape(-1, 588),
            frame_starts=np.repeat(starts, each),
            frame_pictures=np.full(count * each, used["segments"]),
            frame_grids=np.tile(np.hstack((np.tile((h, w), (each, 1)), index)), (count, 1)),
            first=rows[pairs].flatten(),
            second=rows[np.minimum(pairs + 1, count - 1)].flatten(),
            coordinates=np.tile(index, (t, 1)),
            vision_cu=used["patches"] + each * np.arange(t),
            cells=cells,
        )
        used.update(frames=count * each, patches=t * each, segments=t)

    def _conversation(self, tasks: list[str], item: Tokens, first_row: int) -> None:
        used, where = self._used, np.flatnonzero(item.labels >= 0)
        turns = item.turns[where]
        self._add(
            ids=item.ids,
            source=np.where(item.vision >= 0, item.vision + first_row, -1),
            positions=item.positions.T,
            text_cu=np.array([used["tokens"]]),
            selected=where + used["tokens"],
            labels=item.labels[where],
            turns=turns + len(self.tasks),
            weights=np.array([0.3 if tasks[turn] in _CONSTANT else 1.0 for turn in turns]),
        )
        self.tasks += tasks
        used.update(tokens=len(item.ids), labels=len(where), sequences=1)


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


Held = tuple[Fields, list[str]]
"""One block, and the tasks of its turns."""


def pack(examples: Sequence[Example]) -> list[Held]:
    """Blocks that hold all examples."""
    packers: list[Packer] = []
    for example in examples:
        if not packers or not packers[-1].add(example):
            packers.append(Packer())
            if not packers[-1].add(example):
                raise ValueError("an example is larger than a block")
    return [(packer.block(), packer.tasks) for packer in packers]


class Drawn(IterableDataset[Fields]):
    """Blocks without end."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __iter__(self) -> Iterator[Fields]:
        use_threads(1)
        worker = get_worker_info()
        random = Random(self._seed * 1000 + (worker.id if worker else 0))
        waiting: Example | None = None
        while True:
            packer = Packer()
            while packer.add(waiting := waiting or make_example(random)):
                waiting = None
            yield packer.block()


class Feed:
    """New blocks as processes draw them, and a pool of those before them on the device, which fills batches up."""

    def __init__(self, drawn: Drawn, device: torch.device, workers: int, pool: int, seed: int) -> None:
        loader = DataLoader(drawn, None, num_workers=workers, pin_memory=device.type == "cuda", in_order=False)
        loader.multiprocessing_context = "spawn" if workers else None
        self._drawn, self._random, self.count = Ahead(iter(loader), 8), Random(seed), 0
        self._pool, self._room, self._device = empty(pool, device), pool, device

    def gather(self, batch: Fields) -> int:
        """Fills `batch`, new blocks first; how many are new."""
        places, number = list[int](), len(batch["ids"])
        while len(places) < number:
            try:
                block = self._drawn.take(wait=self.count < number)
            except queue.Empty:
                break
            places.append(self.count % self._room)
            for name, value in block.items():
                self._pool[name][places[-1]].copy_(value, non_blocking=True)
            self.count += 1
        new, known = len(places), min(self.count, self._room)
        while len(places) < number:
            place = self._random.randrange(known)
            if place not in places:
                places.append(place)
        chosen = torch.tensor(places, device=self._device)
        for name, value in batch.items():
            torch.index_select(self._pool[name], 0, chosen, out=value)
        return new


@dataclass(frozen=True)
class Answer:
    """right: every token is the most likely one after the right ones before it, so greedy decoding says it word for
    word. said: the most likely tokens."""

    task: str
    right: bool
    said: tuple[int, ...]
    wanted: tuple[int, ...]


def on_device(examples: Sequence[Example], device: torch.device) -> list[Held]:
    """Each block as a batch of one."""
    return [({name: value[None].to(device) for name, value in block.items()}, tasks) for block, tasks in pack(examples)]


@torch.no_grad()
def answers(network: Network, held: Held) -> list[Answer]:
    found, tasks = held
    batch = packed(found)
    said = network.logits(network.model(batch, network.visual(batch))).argmax(-1).tolist()
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


def packed(found: Fields) -> Packed:
    """Blocks [n, ...] as one batch: every index moved on by what the blocks before it hold."""
    number, tokens = found["ids"].shape
    patches, frames = found["first"].shape[1], found["frames"].shape[1]
    step = torch.arange(number, device=found["ids"].device)[:, None]

    def starts(name: str, length: int) -> Tensor:
        every = (found[name].int() + step.int() * length).flatten()
        return torch.cat((every, torch.full_like(every[:1], number * length)))

    source = found["source"].long()
    return Packed(
        frames=found["frames"].flatten(0, 1),
        first=(found["first"].long() + step * frames).flatten(),
        second=(found["second"].long() + step * frames).flatten(),
        coordinates=found["coordinates"].flatten(0, 1),
        vision_cu=starts("vision_cu", patches),
        ids=found["ids"].long().flatten(),
        source=torch.where(source >= 0, source + step * (patches // 4), source).flatten(),
        positions=found["positions"].flatten(0, 1).T,
        text_cu=starts("text_cu", tokens),
        selected=(found["selected"].long() + step * tokens).flatten(),
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
