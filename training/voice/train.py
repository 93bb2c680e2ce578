"""Trains the embedded voice's language model on files of training.voice.corpus, while they are being made.

python -m training.voice.train DATA OUT --seconds 540 [--resume OUT/lm.pt]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from training import loop
from training.transformer import Block
from training.voice.corpus import Reader, Store
from training.voice.network import Network, losses
from training.voice.packing import Batch, Packer, Shape

SHAPE = Shape()


class Trainer:
    name = "lm"

    def __init__(self, options: argparse.Namespace, shape: Shape = SHAPE) -> None:
        self.steps, self.options, self.device = 0, options, loop.device()
        self.network = Network().to(self.device)
        self.optimiser = loop.Optimiser(
            self.network, inner=lambda name: ".layers." in name, decay=0.05, adam_decay=0.05, average=0.999
        )
        if options.compile:
            Block.forward = torch.compile(Block.forward, dynamic=False)  # type: ignore[method-assign]
        self.store = Store(options.frames, self.device)
        packer, reader = Packer(self.store, shape, options.seed), Reader(options.data)
        self._feed = loop.Ahead(self._batches(packer, reader), 6)

    def _batches(self, packer: Packer, reader: Reader) -> Iterator[Batch]:
        while True:
            self.store.take_in(reader, 4 if len(self.store.first) > 1000 else 1000)
            if len(self.store.first) < 40:
                time.sleep(0.2)
                continue
            yield packer.batch()

    def step(self, rate: float, share: float) -> dict[str, Tensor]:
        batch = self._feed.take()
        if self.device.type == "cuda":
            batch = {name: value.pin_memory().to(self.device, non_blocking=True) for name, value in batch.items()}
        guidance = max(0.0, 0.3 * (1.0 - (self.options.guided + share) / 0.8))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss, parts = losses(self.network, batch, self.store, guidance)
        loss.backward()
        return {**parts, "norm": self.optimiser.step(rate)}

    def report(self) -> dict[str, float]:
        return {"hours": self.store.hours}


if __name__ == "__main__":
    parser = loop.arguments(__doc__, seconds=540.0, rate=2e-3)
    parser.add_argument("--frames", type=int, default=24_000_000, help="room for latent frames (25 a second)")
    parser.add_argument("--guided", type=float, default=0.0, help="share of the guided time that is already over")
    options = loop.begin(parser)
    loop.run(Trainer(options), options)
