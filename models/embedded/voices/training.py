"""What the trainings of the voice's parts have in common: arguments, the clock that ends them, moving averages, records
and states on disk."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def arguments(description: str | None, *, seconds: float, rate: float) -> argparse.ArgumentParser:
    """DATA and OUT, how long to train, and the highest learning rate."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "data", type=Path, help="files of models.embedded.voices.corpus, also while they are being made"
    )
    parser.add_argument("out", type=Path, help="directory of states and records")
    parser.add_argument("--seconds", type=float, default=seconds)
    parser.add_argument("--rate", type=float, default=rate)
    return parser


def resumable(parser: argparse.ArgumentParser, *, frames: int) -> argparse.ArgumentParser:
    """The parser with what the codec and the language model take beside it."""
    parser.add_argument("--resume", type=Path, help="state to go on from")
    parser.add_argument("--frames", type=int, default=frames, help="room for latent frames (25 a second)")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments of the command line; OUT exists."""
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def prepare(seed: int) -> torch.device:
    """-> where to train, with the seed and TF32 set."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    return device()


class Every:
    """Says once in so many seconds that it is time."""

    def __init__(self, seconds: float, now: Callable[[], float]) -> None:
        self._seconds, self._now, self._last = seconds, now, now()

    def due(self, anyway: bool = False) -> bool:
        """Whether the seconds have gone by since the last time that it was; anyway: it is now."""
        if not anyway and self._now() - self._last <= self._seconds:
            return False
        self._last = self._now()
        return True


class Clock:
    """The time of a training, which ends by it. now: seconds that only grow."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._now, self._begun = seconds, now, now()
        self.spent = 0.0
        """Seconds when `running` was asked."""

    def running(self) -> bool:
        self.spent = self._now() - self._begun
        return self.spent < self._seconds

    @property
    def share(self) -> float:
        """Of the time that had gone by when `running` was asked, 0 to 1."""
        return self.spent / self._seconds

    def every(self, seconds: float) -> Every:
        return Every(seconds, self._now)


class Average:
    """A moving average of a module's parameters: of all steps while they are few, then each takes `1 - kept` of it."""

    def __init__(self, module: nn.Module, kept: float) -> None:
        self._names = [name for name, _ in module.named_parameters()]
        self._parameters = list(module.parameters())
        self._weight, self._steps = 1.0 - kept, 0
        self.values = [parameter.detach().clone() for parameter in self._parameters]

    def _now(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self._parameters]

    def step(self) -> None:
        """After each step of the optimiser."""
        self._steps += 1
        torch._foreach_lerp_(self.values, self._now(), max(self._weight, 1.0 / (self._steps + 1)))

    def restart(self) -> None:
        """The average is the parameters as they are."""
        torch._foreach_copy_(self.values, self._now())

    @torch.no_grad()
    def copy_to(self, module: nn.Module) -> None:
        """module: the one that is averaged, or a copy of it."""
        torch._foreach_copy_(list[Tensor](module.parameters()), self.values)

    def state(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The parameters of the average by name, on the CPU."""
        return {name: value.to(dtype).cpu() for name, value in zip(self._names, self.values, strict=True)}


def say(values: Mapping[str, object]) -> None:
    """A line of JSON on stdout, at once."""
    print(json.dumps(values), flush=True)


class Record:
    """Lines of JSON in a file that earlier runs have begun, and on stdout."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, clock: Clock, step: int, hours: float, values: Mapping[str, Tensor]) -> None:
        """hours: of speech so far. values: of one element each."""
        entry = {"s": round(clock.spent, 1), "step": step, "hours": round(hours, 2)}
        entry |= {name: round(value.item(), 4) for name, value in values.items()}
        say(entry)
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()


def save(path: Path, state: Mapping[str, Any]) -> None:
    """A run that is cut short leaves a whole file."""
    hidden = path.with_suffix(".part")
    torch.save(dict(state), hidden)
    hidden.rename(path)
