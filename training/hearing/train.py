"""Trains the embedded recogniser on files of training.hearing.sounds, while they are being made.

python -m training.hearing.train DATA OUT --seconds 540 [--resume OUT/hearing.pt]
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training import loop
from training.hearing.batches import Batches, Store, phones, tilts, together
from training.hearing.network import PHONES_PER_ROW, Features, Network, Vocabulary
from training.hearing.sounds import UNKNOWN
from training.transformer import linear
from training.voice.corpus import Reader

_STEPS_BEFORE_CAPTURE = 3
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
        vocabulary = Vocabulary()
        self.store = Store(options.hours, self.device, vocabulary)
        short, reader = 0 if options.resume else _SHORT, Reader(options.data)
        batches = Batches(self.store, vocabulary, options.audio, options.seed, short)
        self._feed = loop.Ahead(self._made(batches, reader), 8)
        self._seen = dict[int, int]()
        self._graphs = dict[int, tuple[torch.cuda.CUDAGraph, Batch, list[Tensor]]]()

    def _made(self, batches: Batches, reader: Reader) -> Iterator[Batch]:
        """A pause of the training while there is too little."""
        while self.store.hours < self.options.least or not self.store.noises:
            self.store.take_in(reader, 8)
            time.sleep(0.1)
        while True:
            self.store.take_in(reader, 16)
            for _ in range(16):
                yield batches.batch()

    def step(self, share: float, nth: int) -> dict[str, Tensor]:
        """Each length of items is captured as a graph of its own after some steps: it is many small kernels."""
        options, batch = self.options, self._feed.take()
        seconds = int(batch.pop("seconds"))
        self.optimiser.rate.fill_(loop.rate_at(options.rate, share, nth, warm=300, floor=0.02, decay=0.7))
        seen = self._seen[seconds] = self._seen.get(seconds, 0) + 1
        if self.device.type != "cuda" or seen <= _STEPS_BEFORE_CAPTURE:
            result = self._step({name: value.to(self.device) for name, value in batch.items()}, seconds)
        else:
            if seconds not in self._graphs:
                self._capture(batch, seconds)
            graph, inputs, result = self._graphs[seconds]
            for name, value in batch.items():
                inputs[name].copy_(value.pin_memory(), non_blocking=True)
            graph.replay()
        self.optimiser.average.step()
        if self.device.type == "cuda" and nth % 4 == 0:
            torch.cuda.synchronize()
        return dict(zip(("text", "phones", "right", "norm"), result, strict=True))

    def _capture(self, batch: Batch, seconds: int) -> None:
        inputs = {name: value.to(self.device) for name, value in batch.items()}
        graph = torch.cuda.CUDAGraph()
        # Another thread takes in new files meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = self._step(inputs, seconds)
        self._graphs[seconds] = graph, inputs, result

    def _step(self, batch: Batch, seconds: int) -> list[Tensor]:
        text, sounds, right = self.losses(batch, seconds)
        (text + _PHONES * sounds).backward()
        return [text.detach(), sounds.detach(), right, self.optimiser.update()]

    def losses(self, batch: Batch, seconds: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of the answers' tokens and of the phones, and the share of tokens that are right."""
        wave, found = together(batch, self.store, seconds)
        mel = self.features(wave, found["total"] // 160, found["bank"], tilts(batch["levels"])).to(self.dtype)
        rows, ids, network = found["rows"], batch["ids"], self.network
        embeds, hidden = network.audio_tower(mel, rows)
        heard = linear(hidden, network.auxiliary).float().unflatten(2, (PHONES_PER_ROW, -1)).flatten(0, 2)
        wanted = phones(found, self.store, seconds).flatten()
        known = (wanted != UNKNOWN).sum().clamp(min=1)
        sounds = F.cross_entropy(heard, wanted, ignore_index=UNKNOWN, reduction="sum") / known
        logits = network.model(ids, embeds, found["begin"], rows).float()
        place = torch.arange(ids.shape[1], device=ids.device) + 1
        asked = (place >= found["answer"][:, None]) & (place < found["length"][:, None])
        labels = ids.roll(-1, 1).masked_fill(~asked, -100)
        text = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return text, sounds, ((logits.argmax(2) == labels) & asked).sum() / asked.sum()

    def report(self) -> dict[str, float]:
        return {"hours": self.store.hours, **{kind: len(known) for kind, known in self.store.of_kind.items()}}

    def state(self) -> dict[str, Any]:
        """The moving average, in the precision that is shipped; momenta begin anew."""
        return {"model": self.optimiser.average.state(torch.bfloat16)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.network.load_state_dict(loop.wide(state["model"]))
        self.optimiser.average.restart()

    def kept(self) -> None: ...


if __name__ == "__main__":
    parser = loop.arguments(__doc__, seconds=540.0, rate=2e-3)
    parser.add_argument("--hours", type=float, default=250.0, help="room for sounds")
    parser.add_argument("--least", type=float, default=0.5, help="hours of sounds to begin with")
    parser.add_argument("--audio", type=int, default=576, help="seconds of sounds in a batch")
    options = loop.begin(parser)
    if loop.device().type == "cuda":
        # Graphs are captured on a stream of their own, and gradients remember the stream they were first made on.
        torch.cuda.set_stream(torch.cuda.Stream())
    loop.run(Trainer(options), options)
