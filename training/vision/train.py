"""Trains models/embedded/qwen2_vl on one GPU, in legs that go on where the last one ended.

    REPRISE_WORLD_FONTS=build/fonts python -m training.vision.train OUT --seconds 540 --resume OUT/vision.pt

Processes draw pictures and conversations without end; the GPU takes new blocks as they come and fills its batches up
with blocks of a pool that it has seen before. The tokenizer is the published one: it knows the words of the first
questions as one token each, and spells others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from training import loop
from training.vision.blocks import PATCHES, Drawn, Feed, Fields, drawn_shifts, empty, packed, shifted
from training.vision.network import CONFIG, Network


class Trainer:
    """feed: None where `batch` is filled by somebody else."""

    name = "vision"

    def __init__(self, network: Network, options: argparse.Namespace, feed: Feed | None) -> None:
        self.steps, self.options, self.feed = 0, options, feed
        self.device = loop.device()
        self.network = network.to(self.device)
        self.optimiser = loop.Optimiser(
            self.network,
            inner=lambda name: "embed_tokens" not in name and "auxiliary" not in name,
            decay=0.1,
            average=0.998,
        )
        self.batch = empty(options.blocks, self.device)
        self._graphs = loop.Graphs(self._losses, self.optimiser, captures=options.compile)
        self._shifted: Callable[..., Tensor] = shifted
        self._new = 0
        if options.compile:
            visual, model = self.network.visual, self.network.model
            for part in (*visual.blocks, *model.layers, self.network.auxiliary, visual.merger):
                part.compile(dynamic=False)
            for holder, name in ((model, "words"), (visual, "embed"), (self, "_answers"), (self, "_shifted")):
                setattr(holder, name, torch.compile(getattr(holder, name), dynamic=False))

    def step(self, rate: float, share: float) -> dict[str, Tensor]:
        if self.feed is not None:
            self._new += self.feed.gather(self.batch)
        return self._graphs.step(rate, self.batch)

    def _losses(self, found: Fields) -> tuple[Tensor, dict[str, Tensor]]:
        number = len(found["ids"])
        shifts, light, moved = drawn_shifts(number, self.device)
        noise = torch.randn(found["frames"].shape, dtype=torch.float16, device=self.device)
        names = ("frames", "frame_starts", "frame_grids", "frame_pictures")
        inputs = packed({**found, "frames": self._shifted(*(found[name] for name in names), shifts, light, noise)})
        vision = self.network.visual(inputs)
        hidden = self.network.model(inputs, vision)
        labels, weights = found["labels"].long().flatten(), found["weights"].float().flatten()
        said = self._answers(hidden, self.network.model.embed_tokens.weight, labels, weights)
        still = (~moved).float()[:, None].expand(number, PATCHES // 4).flatten()
        shapes, letters = self.network.auxiliary(vision, found["cells"].long().flatten(0, 1), still)
        loss = said + self.options.auxiliary * (shapes + letters)
        return loss, {"answers": said, "shapes": shapes, "letters": letters}

    def _answers(self, hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        logits = F.linear(hidden, weight.to(hidden.dtype)).float()
        return (F.cross_entropy(logits, labels, reduction="none") * weights).sum() / weights.sum()

    def report(self) -> dict[str, float]:
        return {"new blocks": self._new}


if __name__ == "__main__":
    parser = loop.arguments(__doc__, seconds=60.0, rate=2e-3, decay=0.0, data=False)
    parser.add_argument("--blocks", type=int, default=6, help="a batch")
    parser.add_argument("--pool", type=int, default=384)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--auxiliary", type=float, default=0.3, help="weight of the losses of cells")
    options = loop.begin(parser, graphs=True)
    feed = Feed(Drawn(options.seed), loop.device(), options.workers, options.pool, options.seed)
    loop.run(Trainer(Network(CONFIG), options, feed), options)
