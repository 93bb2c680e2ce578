"""Blocks on a device: as batches for the network, and what it answers to those that are held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.embedded.vision_training import blocks as B
from models.embedded.vision_training.network import Network, Packed
from models.embedded.world.conversations import Encoder, Example

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
    for block, tasks in B.pack(encoder, list(examples)):
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
    found, start = {}, 0
    for name, (shape, kind) in B.FIELDS.items():
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        found[name] = rows[:, start : start + size].contiguous().view(kinds[kind]).view(len(rows), *shape)
        start += size
    return found


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
        first=(found["first"].long() + step * B.FRAMES).flatten(),
        second=(found["second"].long() + step * B.FRAMES).flatten(),
        coordinates=found["coordinates"].flatten(0, 1),
        vision_cu=starts("vision_cu", B.PATCHES),
        ids=found["ids"].long().flatten(),
        source=torch.where(source >= 0, source + step * (B.PATCHES // 4), source).flatten(),
        positions=found["positions"].permute(1, 0, 2).flatten(1),
        text_cu=starts("text_cu", B.TOKENS),
        selected=(found["selected"].long() + step * B.TOKENS).flatten(),
        longest=B.LONGEST,
    )
