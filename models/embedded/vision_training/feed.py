"""The processes that draw, and a pool of their blocks on the device."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import queue
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor

from models.embedded.vision_training import blocks as B


class Feed:
    """Worker processes, and the blocks that they filled, as a pool on the device."""

    def __init__(self, tokenizer: Path, device: torch.device, workers: int, cores: list[int], seed: int, pool: int):
        context = multiprocessing.get_context("spawn")
        slots = 3 * workers
        # Not a file: the kernel would write those to a disk, as slowly as that takes them.
        size, memory = slots * B.BLOCK_BYTES, os.memfd_create("blocks")
        os.ftruncate(memory, size)
        self.memory = mmap.mmap(memory, size)
        path = f"/proc/{os.getpid()}/fd/{memory}"
        self.free, self.full, self.level = context.Queue(), context.Queue(), context.Value("i", 0)
        for index in range(slots):
            self.free.put(index)
        self.processes = [
            context.Process(
                target=B.work,
                args=(seed * 1000 + index, str(tokenizer), path, self.free, self.full, self.level, cores),
                daemon=True,
            )
            for index in range(workers)
        ]
        for process in self.processes:
            process.start()
        self.device = device
        self.pool = torch.zeros(pool, B.BLOCK_BYTES, dtype=torch.uint8, device=device)
        self.slots = torch.from_numpy(np.frombuffer(self.memory, dtype=np.uint8).reshape(slots, B.BLOCK_BYTES))
        if device.type == "cuda":
            torch.cuda.cudart().cudaHostRegister(self.slots.data_ptr(), self.slots.numel(), 0)
            self.gathered = torch.cuda.Event()
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.count = self.sequences = 0
        # Of the workers: processor time, time, time waited for a free block.
        self.spent = np.zeros(3)
        self.seed = Random(seed)

    def receive(self, most: int, wait: float) -> list[int]:
        """Moves filled blocks into the pool: the places of those that are new."""
        fresh = []
        for _ in range(most):
            try:
                index, spent, sequences = self.full.get(timeout=wait) if wait else self.full.get_nowait()
            except queue.Empty:
                break
            place = self.count % len(self.pool)
            self._upload(place, index)
            self.free.put(index)
            self.count += 1
            self.sequences += sequences
            self.spent += spent
            fresh.append(place)
        return fresh

    def _upload(self, place: int, index: int) -> None:
        if self.stream is None:
            self.pool[place].copy_(self.slots[index])
            return
        # Beside the running step, but not before it has taken its blocks out of the pool.
        self.stream.wait_event(self.gathered)
        with torch.cuda.stream(self.stream):
            self.pool[place].copy_(self.slots[index], non_blocking=True)
        self.stream.synchronize()

    def gather(self, number: int, rows: Tensor) -> int:
        """Fills `rows` with a batch of blocks [number, BLOCK_BYTES]; how many of them are new."""
        places, new = self.batch(number)
        if self.stream is None:
            torch.index_select(self.pool, 0, places, out=rows)
            return new
        torch.index_select(self.pool, 0, places.pin_memory().to(self.device, non_blocking=True), out=rows)
        self.gathered.record()
        return new

    def batch(self, number: int) -> tuple[Tensor, int]:
        """Places of `number` blocks, the new ones first, and how many are new."""
        fresh = self.receive(number, 0.0)
        while min(self.count, len(self.pool)) < number:
            fresh += self.receive(number, 1.0)
        known, new = min(self.count, len(self.pool)), len(fresh)
        while len(fresh) < number:
            place = self.seed.randrange(known)
            if place not in fresh:
                fresh.append(place)
        return torch.tensor(fresh[:number]), new

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
