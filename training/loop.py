"""One loop for everything that is trained: by the clock, in legs that go on where the last one ended."""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import queue
import shutil
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

T = TypeVar("T")
WEIGHTS = "model.safetensors"
_KEEP = 60.0
"""Seconds between two states."""
_BEFORE_CAPTURE = 12
"""Steps of a kind that are not captured yet."""


class Trainer(Protocol):
    """What `run` trains. name: of its files, NAME.pt and NAME.jsonl; steps: of all legs; the average of `network` by
    `optimiser` is what is saved, and what the next leg goes on from: momenta begin anew."""

    name: str
    steps: int
    optimiser: Optimiser

    @property
    def network(self) -> nn.Module: ...

    def step(self, rate: float, share: float) -> Mapping[str, Tensor]:
        """One step of the optimiser; share: of this leg's time that has gone by. Returns what is reported, values of
        one element each."""
        ...

    def report(self) -> Mapping[str, float]:
        """More to report, such as how much data there is."""
        ...


def run(trainer: Trainer, options: argparse.Namespace) -> None:
    """Trains for options.seconds: reports every 10 s, saves every minute and at the end."""
    state = options.out / f"{trainer.name}.pt"
    if options.resume and options.resume.exists():
        trainer.steps = load(trainer.network, options.resume)
    first, begun = trainer.steps, time.monotonic()
    spent = reported = kept = 0.0
    with (options.out / f"{trainer.name}.jsonl").open("a", encoding="utf-8") as record:
        while spent < options.seconds:
            share, nth = spent / options.seconds, trainer.steps - first
            parts = trainer.step(options.rate * scheduled(share, nth, options.decay), share)
            trainer.steps += 1
            if spent - reported > 10.0 or nth == 0:
                values = {**trainer.report(), **{name: value.item() for name, value in parts.items()}}
                rounded = {name: round(value, 4) for name, value in values.items()}
                line, reported = {"s": round(spent, 1), "step": trainer.steps, **rounded}, spent
                say(line)
                record.write(json.dumps(line) + "\n")
                record.flush()
            if spent - kept > _KEEP:
                keep(trainer, state)
                kept = spent
            spent = time.monotonic() - begun
    keep(trainer, state)


def scheduled(share: float, nth: int, decay: float) -> float:
    """What part of the highest rate a step takes: up over 200 steps, constant, then down to 2 % in a straight line over
    the last `decay` of the time."""
    left = min(1.0, (1.0 - share) / decay) if decay else 1.0
    return min(1.0, (nth + 1) / 200) * (0.02 + 0.98 * left)


def keep(trainer: Trainer, path: Path) -> None:
    """A run that is cut short leaves a whole file. FloatingPointError rather than a state of no use."""
    model = trainer.optimiser.average.state_dict()
    if not all(value.isfinite().all() for value in model.values()):
        raise FloatingPointError(f"{trainer.name} has NaN or infinite weights")
    hidden = path.with_suffix(".part")
    torch.save({"model": model, "steps": trainer.steps}, hidden)
    hidden.rename(path)


def load(network: nn.Module, path: Path) -> int:
    """Takes the weights of a state, or of a published file, which lacks the heads that only help to train. Returns the
    steps of the state. ValueError for those of another network."""
    published = path.suffix == ".safetensors"
    found = {} if published else torch.load(path, "cpu", weights_only=True)
    missing = network.load_state_dict(load_file(path) if published else found["model"], strict=False)
    if missing.unexpected_keys or any(not name.startswith("auxiliary.") for name in missing.missing_keys):
        raise ValueError(f"{path}: not the tensors of this network: {missing}")
    return int(found.get("steps", 0))


def arguments(
    description: str | None, *, seconds: float, rate: float, decay: float = 1.0, data: bool = True
) -> argparse.ArgumentParser:
    """data: it learns from files, which are named first."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if data:
        parser.add_argument("data", type=Path, help="what it learns from; may still be growing")
    parser.add_argument("out", type=Path, help="directory of states and records")
    parser.add_argument("--seconds", type=float, default=seconds, help="of this leg")
    parser.add_argument("--rate", type=float, default=rate, help="highest learning rate")
    parser.add_argument("--decay", type=float, default=decay, help="share of the time, at its end, in which it falls")
    parser.add_argument("--resume", type=Path, help="state of an earlier leg, or published weights, to go on from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="on a GPU")
    return parser


def begin(parser: argparse.ArgumentParser, *, graphs: bool = False) -> argparse.Namespace:
    """The arguments of the command line; OUT exists, the seed and TF32 are set. graphs: steps are captured as `Graphs`,
    on a stream of their own, and gradients remember the stream they were first made on."""
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = True
    torch._dynamo.config.recompile_limit = 64
    if graphs and device().type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())
    return options


def device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def say(values: Mapping[str, object]) -> None:
    """A line of JSON on stdout, at once."""
    print(json.dumps(values), flush=True)


def publish(published: Path, directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """A published checkpoint with other weights, and without what was made of those that it has."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in published.iterdir() if directory.resolve() != published.resolve() else ():
        if path.name != WEIGHTS and path.suffix != ".npz":
            shutil.copyfile(path, directory / path.name)
    save_weights(directory / WEIGHTS, tensors)


def save_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """In the precision that is shipped, and without heads that only help to train."""
    kept = {
        name: tensor.detach().to(torch.bfloat16).cpu().contiguous()
        for name, tensor in sorted(tensors.items())
        if not name.startswith("auxiliary.")
    }
    save_file(kept, path, metadata={"format": "pt"})


def hashes(*files: Path) -> dict[str, str]:
    """SHA-256 by name, for the scores of these weights."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def orthogonalised(updates: Tensor) -> Tensor:
    """Matrices [n, rows, columns] -> nearly their nearest orthogonal ones, by five Newton-Schulz steps (Muon, K.
    Jordan, 2024)."""
    x = updates.bfloat16() if updates.is_cuda else updates
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Optimiser:
    """Muon (orthogonalised momentum) for some matrices, AdamW for everything else, and a moving average.

    A step of Muon has the size of an AdamW step (arXiv:2502.16982), so both take one rate. Matrices of one shape are
    treated together. inner: which ones; decay: weight decay of the matrices; adam_decay: of the other weights; average:
    what part of it stays in each step, once they are many."""

    def __init__(
        self,
        module: nn.Module,
        *,
        inner: Callable[[str], bool] = lambda name: False,
        decay: float = 0.0,
        adam_decay: float = 0.0,
        average: float = 0.999,
    ) -> None:
        named, self._decay = list(module.named_parameters()), decay
        self._groups: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        others: list[nn.Parameter] = []
        for name, parameter in named:
            if parameter.ndim == 2 and inner(name):
                rows, columns = parameter.shape
                self._groups[rows // 3 if name.endswith("qkv.weight") else rows, columns].append(parameter)
            else:
                others.append(parameter)
        self.parameters = [parameter for _, parameter in named]
        on = self.parameters[0].device
        self.momentum = {
            shape: torch.zeros(sum(len(p) for p in group) // shape[0], *shape, device=on)
            for shape, group in self._groups.items()
        }
        # A tensor, so that a captured step reads the rate of the day.
        self.rate = torch.zeros((), device=on)
        groups = [
            {"params": [p for p in others if p.ndim > 1], "weight_decay": adam_decay},
            {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
        ]
        fused = {"fused": True, "capturable": True} if on.type == "cuda" else {}
        self._adam = torch.optim.AdamW(groups, self.rate, betas=(0.9, 0.98), eps=1e-9, **fused)
        self.average = copy.deepcopy(module).requires_grad_(False)
        self._averaged, self._steps, self._least = list[Tensor](self.average.parameters()), 0, 1.0 - average

    def step(self, rate: float) -> Tensor:
        """Returns the norm of the gradients, which are cut to 1 and forgotten."""
        self.rate.fill_(rate)
        norm = self.update()
        self.take_average()
        return norm

    @torch.no_grad()
    def take_average(self) -> None:
        self._steps += 1
        torch._foreach_lerp_(self._averaged, list[Tensor](self.parameters), max(self._least, 1.0 / self._steps))

    @torch.no_grad()
    def update(self) -> Tensor:
        """What of a step can be captured: with `rate` as it is, and without the average."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self._adam.step()
        for shape, group in self._groups.items():
            gradients = torch.cat([p.grad for p in group]).view(-1, *shape)  # type: ignore[misc]
            momentum = self.momentum[shape].lerp_(gradients, 0.05)
            update = orthogonalised(gradients.lerp(momentum, 0.95)).float()
            update = update.reshape(-1, shape[1]) * (0.2 * max(shape) ** 0.5)
            torch._foreach_mul_(list[Tensor](group), 1.0 - self.rate * self._decay)
            parts = torch._foreach_mul(list(update.split([len(p) for p in group])), -self.rate)
            torch._foreach_add_(list[Tensor](group), list(parts))
        for parameter in self.parameters:
            parameter.grad = None
        return norm


Losses = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""A batch and what else a step was given -> the loss, and its parts for people."""


class Graphs:
    """Steps of many small kernels: on a GPU each kind of them, after a few, is captured as a graph and replayed."""

    def __init__(self, losses: Losses, optimiser: Optimiser, *, captures: bool = True) -> None:
        self._losses, self._optimiser = losses, optimiser
        self._on, self._captures = device(), captures and device().type == "cuda"
        self._seen = Counter[tuple[int, ...]]()
        self._graphs = dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, dict[str, Tensor], dict[str, Tensor]]]()

    def step(self, rate: float, batch: Mapping[str, Tensor], *kind: int) -> dict[str, Tensor]:
        self._optimiser.rate.fill_(rate)
        self._seen[kind] += 1
        if not self._captures or self._seen[kind] <= _BEFORE_CAPTURE:
            result = self._step({name: value.to(self._on) for name, value in batch.items()}, kind)
        else:
            result = self._replayed(batch, kind)
        self._optimiser.take_average()
        if self._on.type == "cuda" and self._seen.total() % 4 == 0:
            torch.cuda.synchronize()
        return result

    def _step(self, batch: dict[str, Tensor], kind: tuple[int, ...]) -> dict[str, Tensor]:
        loss, parts = self._losses(batch, *kind)
        loss.backward()
        return {**{name: part.detach() for name, part in parts.items()}, "norm": self._optimiser.update()}

    def _replayed(self, batch: Mapping[str, Tensor], kind: tuple[int, ...]) -> dict[str, Tensor]:
        if kind not in self._graphs:
            inputs, graph = {name: value.to(self._on) for name, value in batch.items()}, torch.cuda.CUDAGraph()
            # Another thread takes in new data meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                result = self._step(inputs, kind)
            self._graphs[kind] = graph, inputs, result
        graph, inputs, result = self._graphs[kind]
        for name, value in batch.items():
            inputs[name].copy_(value if value.is_cuda else value.pin_memory(), non_blocking=True)
        graph.replay()
        return result


class Ahead(Generic[T]):
    """Items of an endless source, made ahead in a thread."""

    def __init__(self, source: Iterator[T], most: int) -> None:
        self._ready: queue.Queue[T | BaseException] = queue.Queue(most)
        threading.Thread(target=self._run, args=(source,), daemon=True).start()

    def _run(self, source: Iterator[T]) -> None:
        try:
            for item in source:
                self._ready.put(item)
        except BaseException as error:
            self._ready.put(error)

    def take(self, wait: bool = True) -> T:
        """Raises queue.Empty where there is none and nobody wants to wait, and RuntimeError when the source failed."""
        item = self._ready.get(wait)
        if isinstance(item, BaseException):
            raise RuntimeError("what makes the data has failed") from item
        return item
