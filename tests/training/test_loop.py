"""The loop of all trainings: legs by the clock, states, rates, averages; and a few steps of the voice's."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support.spoken import utterance
from training import loop
from training.voice.config import PUBLISHED
from training.voice.corpus import write
from training.voice.packing import Shape
from training.voice.train import Trainer as VoiceTrainer

pytestmark = pytest.mark.slow


class Line:
    """Learns y = 2 x."""

    name = "line"

    def __init__(self) -> None:
        self.steps, self.network = 0, nn.Linear(1, 1, bias=False)
        self.optimiser = loop.Optimiser(self.network)

    def step(self, rate: float, share: float) -> dict[str, Tensor]:
        loss = (self.network(torch.ones(1, 1)) - 2.0).square().sum()
        loss.backward()
        self.optimiser.step(rate)
        return {"loss": loss.detach()}

    def report(self) -> dict[str, float]:
        return {"hours": 0.12345}


@pytest.fixture(autouse=True)
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second goes by each time that the loop looks at the clock."""
    seconds: Iterator[int] = itertools.count()
    monkeypatch.setattr(loop.time, "monotonic", lambda: float(next(seconds)))


def options(out: Path, **more: object) -> argparse.Namespace:
    usual = {"out": out, "seconds": 24.0, "resume": out / "nothing.pt", "compile": False}
    return argparse.Namespace(**{**usual, "rate": 0.05, "decay": 0.0, **more})


def test_a_leg_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    torch.manual_seed(0)
    loop.run(Line(), options(tmp_path))
    state = torch.load(tmp_path / "line.pt", weights_only=True)
    assert state["steps"] == 24
    again = Line()
    loop.run(again, options(tmp_path, resume=tmp_path / "line.pt"))
    assert again.steps == 48
    lines = [json.loads(line) for line in (tmp_path / "line.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 12, 23, 25, 36, 47]
    assert lines[0]["hours"] == 0.1235 and lines[-1]["loss"] < lines[0]["loss"]
    with pytest.raises(ValueError, match=r"line\.pt: not the tensors of this network: .*weight"):
        loop.load(nn.Sequential(nn.Linear(1, 1)), tmp_path / "line.pt")


def test_the_published_voice_is_trained_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data/00000-00001.npz", [utterance(number) for number in range(48)])
    own = {"data": tmp_path / "data", "frames": 200_000, "guided": 0.0, "seed": 0, "seconds": 3.0}
    shape = Shape(rows=2, length=256, patches=160)
    begun = options(tmp_path, **own, resume=PUBLISHED / loop.WEIGHTS)
    loop.run(VoiceTrainer(begun, shape), begun)
    first = torch.load(tmp_path / "lm.pt", weights_only=True)
    resumed = options(tmp_path, **own, resume=tmp_path / "lm.pt")
    loop.run(VoiceTrainer(resumed, shape), resumed)
    then = torch.load(tmp_path / "lm.pt", weights_only=True)
    assert then["steps"] == 2 * first["steps"] == 6
    assert first["model"].keys() == then["model"].keys()
    assert any(not torch.equal(first["model"][name], then["model"][name]) for name in first["model"])
