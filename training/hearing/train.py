"""Trains the embedded recogniser on files of training.hearing.sounds, while they are being made.

python -m training.hearing.train DATA OUT --seconds 540 [--resume OUT/hearing.pt]
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from training import loop
from training.hearing.batches import Batches, Store, phones, tilts, together
from training.hearing.network import PHONES_PER_ROW, Features, Network
from training.hearing.sounds import UNKNOWN
from training.transformer import linear
from training.voice.corpus import Reader

_SHORT = 1500
"""Batches of the shortest items to begin with."""
_PHONES = 0.5
"""Weight of the loss of phones."""
Batch = dict[str, Tensor]


class Trainer:
    name = "hearing"

    def __init__(self, options: Namespace) -> None:
        self.steps, self.options, self.device = 0, options, loop.device()
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.features, self.network = Features().to(self.device), Network().to(self.device)
        self.optimiser = loop.Optimiser(
            self.network, inner=lambda name: ".layers." in name, decay=0.05, adam_decay=0.01, average=0.999
        )
        self.store = Store(options.hours, self.device)
        short, reader = 0 if options.resume else _SHORT, Reader(options.data)
        batches = Batches(self.store, options.audio, options.seed, short)
        self._feed = loop.Ahead(self._made(batches, reader), 8)
        self._graphs = loop.Graphs(self.losses, self.optimiser)

    def _made(self, batches: Batches, reader: Reader) -> Iterator[Batch]:
        """A pause of the training while there is too little."""
        while self.store.hours < self.options.least or not self.store.noises:
            self.store.take_in(reader, 8)
            time.sleep(0.1)
        while True:
            self.store.take_in(reader, 16)
            for _ in range(16):
                yield batches.batch()

    def step(self, rate: float, share: float) -> dict[str, Tensor]:
        """Each length of items is a graph of its own."""
        batch = self._feed.take()
        return self._graphs.step(rate, batch, int(batch.pop("seconds")))

    def losses(self, batch: Batch, seconds: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Of the answers' tokens and of the phones, and the share of tokens that are right."""
        wave = together(batch, self.store, seconds)
        mel = self.features(wave, batch["total"] // 160, batch["bank"], tilts(batch["tilt"])).to(self.dtype)
        rows, ids, network = batch["rows"], batch["ids"], self.network
        embeds, hidden = network.thinker.audio_tower(mel, rows)
        heard = linear(hidden, network.auxiliary).float().unflatten(2, (PHONES_PER_ROW, -1)).flatten(0, 2)
        wanted = phones(batch, self.store, seconds).flatten()
        known = (wanted != UNKNOWN).sum().clamp(min=1)
        sounds = F.cross_entropy(heard, wanted, ignore_index=UNKNOWN, reduction="sum") / known
        logits = network.thinker.model(ids, embeds, batch["begin"], rows).float()
        place = torch.arange(ids.shape[1], device=ids.device) + 1
        asked = (place >= batch["answer"][:, None]) & (place < batch["length"][:, None])
        labels = ids.roll(-1, 1).masked_fill(~asked, -100)
        text = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        right = ((logits.argmax(2) == labels) & asked).sum() / asked.sum()
        return text + _PHONES * sounds, {"text": text, "phones": sounds, "right": right}

    def report(self) -> dict[str, float]:
        return {"hours": self.store.hours, **{kind: len(known) for kind, known in self.store.of_kind.items()}}


if __name__ == "__main__":
    parser = loop.arguments(__doc__, seconds=540.0, rate=2e-3, decay=0.7)
    parser.add_argument("--hours", type=float, default=250.0, help="room for sounds")
    parser.add_argument("--least", type=float, default=0.5, help="hours of sounds to begin with")
    parser.add_argument("--audio", type=int, default=576, help="seconds of sounds in a batch")
    options = loop.begin(parser, graphs=True)
    loop.run(Trainer(options), options)
