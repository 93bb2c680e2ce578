"""Trains the embedded voice's language model on files of models.embedded.voices.corpus, while they are being made.

python -m models.embedded.train_voxcpm2 DATA OUT --seconds 540 [--resume STATE]
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch

from models.embedded.voices.config import CONFIG
from models.embedded.voices.corpus import Reader
from models.embedded.voices.losses import Objective, Weights
from models.embedded.voices.network import Block, Network
from models.embedded.voices.optimiser import Optimiser
from models.embedded.voices.packing import Batch, Mixture, Packer, Shape, Store

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
        for number, path in enumerate(self._reader.new()):
            self._store.add(path)
            if number + 1 >= most or self._store.full:
                return


def rate_at(options: argparse.Namespace, step: int, share: float) -> float:
    """Learning rate: up over WARM_UP steps, then in a straight line from the first to the last over the time."""
    return min(1.0, (step + 1) / WARM_UP) * (options.rate + share * (options.last_rate - options.rate))


def train(options: argparse.Namespace) -> None:
    begun = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
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
    first, reported, log = steps, begun, (options.out / "lm.jsonl").open("a")
    while (spent := time.monotonic() - begun) < options.seconds:
        share = spent / options.seconds
        guidance = max(0.0, 0.3 * (1.0 - (options.guided + share) / 0.8))
        weights = replace(Weights(), guidance=guidance)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, parts = objective(feed.next().to(device), store, weights)
        loss.backward()
        norm = optimiser.step(rate_at(options, steps - first, share))
        steps += 1
        if steps % 100 == 0 or time.monotonic() - reported > 10:
            reported = time.monotonic()
            values = {name: round(value.item(), 4) for name, value in {**parts, "norm": norm}.items()}
            entry = {"s": round(spent, 1), "step": steps, "hours": round(store.patches * 0.16 / 3600, 2), **values}
            print(json.dumps(entry), flush=True)
            log.write(json.dumps(entry) + "\n")
            log.flush()
    save(options.out, objective, optimiser, steps)


def restore(path: Path, objective: Objective, optimiser: Optimiser, device: torch.device) -> int:
    """The moving average of an earlier run; momenta begin anew."""
    state = torch.load(path, map_location=device, weights_only=True)
    objective.load_state_dict({name: value.float() for name, value in state["model"].items()})
    for own, parameter in zip(optimiser.average, objective.parameters(), strict=True):
        own.copy_(parameter)
    return int(state["steps"])


def save(out: Path, objective: Objective, optimiser: Optimiser, steps: int) -> None:
    """The moving average, in the precision that is shipped."""
    names = [name for name, _ in objective.named_parameters()]
    model = {name: value.bfloat16().cpu() for name, value in zip(names, optimiser.average, strict=True)}
    torch.save({"model": model, "steps": steps}, out / "lm.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--last-rate", type=float, default=2e-5)
    parser.add_argument("--guided", type=float, default=0.0, help="share of the guided time that is already over")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--patches", type=int, default=5120)
    parser.add_argument("--frames", type=int, default=24_000_000, help="room for latent frames (25 a second)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--adam", action="store_true", help="AdamW for everything")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    train(options)


if __name__ == "__main__":
    main()
