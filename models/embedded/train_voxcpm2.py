"""Trains the embedded voice's language model on files of models.embedded.voices.corpus, while they are being made.

python -m models.embedded.train_voxcpm2 DATA OUT --seconds 540 [--resume STATE]
"""

from __future__ import annotations

import argparse
import queue
import threading
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from models.embedded.voices import training
from models.embedded.voices.config import CONFIG
from models.embedded.voices.corpus import Reader
from models.embedded.voices.losses import Objective, Weights
from models.embedded.voices.network import Block, Network
from models.embedded.voices.optimiser import Optimiser
from models.embedded.voices.packing import Batch, Mixture, Packer, Shape, Store
from models.embedded.voices.training import Clock, Record

WARM_UP = 150
"""Steps."""


class Feed:
    """Takes in new files and packs batches, in a thread of its own."""

    def __init__(self, store: Store, packer: Packer, reader: Reader) -> None:
        self._store, self._packer, self._reader = store, packer, reader
        self._ready: queue.Queue[Batch] = queue.Queue(maxsize=6)
        self.failure: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def next(self) -> Batch:
        while True:
            try:
                return self._ready.get(timeout=5)
            except queue.Empty:
                if self.failure is not None:
                    raise RuntimeError("the feed has failed") from self.failure

    def _run(self) -> None:
        try:
            while True:
                self._take_in(4 if len(self._store) > 1000 else 1000)
                if len(self._store) < 40:
                    time.sleep(0.2)
                    continue
                self._ready.put(self._packer.batch())
        except BaseException as error:
            self.failure = error
            raise

    def _take_in(self, most: int) -> None:
        if self._store.full:
            return
        for path in islice(self._reader.new(), most):
            self._store.add(path)
            if self._store.full:
                return


def rate_at(options: argparse.Namespace, step: int, share: float) -> float:
    """Learning rate: up over WARM_UP steps, then in a straight line from the first to the last over the time."""
    return min(1.0, (step + 1) / WARM_UP) * (options.rate + share * (options.last_rate - options.rate))


def train(options: argparse.Namespace) -> None:
    clock, device = Clock(options.seconds), training.prepare(options.seed)
    objective = Objective(Network(CONFIG), draws=options.draws).to(device)
    optimiser = Optimiser(objective, muon=not options.adam)
    steps = 0
    if options.resume:
        steps = restore(options.resume, objective, optimiser, device)
    if options.compile:
        torch._dynamo.config.recompile_limit = 64
        Block.forward = torch.compile(Block.forward, dynamic=False)  # type: ignore[method-assign]
    store = Store(options.frames, device)
    shape = Shape(options.rows, options.length, options.patches)
    feed = Feed(store, Packer(store, shape, Mixture(), options.seed), Reader(options.data))
    first, report, record = steps, clock.every(10), Record(options.out / "lm.jsonl")
    while clock.running():
        guidance = max(0.0, 0.3 * (1.0 - (options.guided + clock.share) / 0.8))
        weights = replace(Weights(), guidance=guidance)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, parts = objective(feed.next().to(device), store, weights)
        loss.backward()
        norm = optimiser.step(rate_at(options, steps - first, clock.share))
        steps += 1
        if report.due(anyway=steps % 100 == 0):
            record.write(clock, steps, store.patches * 0.16 / 3600, {**parts, "norm": norm})
    save(options.out, optimiser, steps)


def restore(path: Path, objective: Objective, optimiser: Optimiser, device: torch.device) -> int:
    """The moving average of an earlier run; momenta begin anew."""
    state = torch.load(path, map_location=device, weights_only=True)
    objective.load_state_dict({name: value.float() for name, value in state["model"].items()})
    optimiser.average.restart()
    return int(state["steps"])


def save(out: Path, optimiser: Optimiser, steps: int) -> None:
    """The moving average, in the precision that is shipped."""
    training.save(out / "lm.pt", {"model": optimiser.average.state(torch.bfloat16), "steps": steps})


def main() -> None:
    parser = training.arguments(__doc__, seconds=540.0, rate=2e-3)
    training.resumable(parser, frames=24_000_000)
    parser.add_argument("--last-rate", type=float, default=2e-5)
    parser.add_argument("--guided", type=float, default=0.0, help="share of the guided time that is already over")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--patches", type=int, default=5120)
    parser.add_argument("--adam", action="store_true", help="AdamW for everything")
    parser.add_argument("--compile", action="store_true")
    train(training.parsed(parser))


if __name__ == "__main__":
    main()
