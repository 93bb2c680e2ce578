"""What the trainings share, and a few steps of each on utterances that nobody spoke."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from pickle import PicklingError

import numpy as np
import pytest
import torch
from torch import nn

from models.embedded import train_codec, train_voxcpm2
from models.embedded.voices import corpus, training
from models.embedded.voices.config import CONFIG
from models.embedded.voices.corpus import Spoken
from models.embedded.voices.latents import FRAMES, LATENT_DIM, PATCH
from models.embedded.voices.training import Average, Clock, Record


class Ticks:
    """A clock's `now`: one second more each time."""

    def __init__(self) -> None:
        self._seconds: Iterator[int] = itertools.count()

    def __call__(self) -> float:
        return float(next(self._seconds))


def test_a_training_ends_by_the_clock() -> None:
    now = 100.0
    clock = Clock(8.0, lambda: now)
    assert clock.running() and clock.share == 0.0
    now = 106.0
    assert clock.running() and (clock.spent, clock.share) == (6.0, 0.75)
    now = 108.0
    assert not clock.running()


def test_what_is_done_every_few_seconds() -> None:
    now = 0.0
    every = Clock(100.0, lambda: now).every(10.0)
    now = 10.0
    assert not every.due()
    now = 11.0
    assert every.due() and not every.due()
    now = 15.0
    assert every.due(anyway=True)
    now = 25.0
    assert not every.due()
    now = 26.0
    assert every.due()


def test_an_average_is_of_all_steps_at_first() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, 1.0)
    average = Average(module, kept=0.75)
    for value in (2.0, 3.0, 4.0):
        nn.init.constant_(module.weight, value)
        average.step()
    assert average.values[0].item() == pytest.approx(2.5)
    nn.init.constant_(module.weight, 6.5)
    average.step()
    assert average.values[0].item() == pytest.approx(0.75 * 2.5 + 0.25 * 6.5)
    assert average.state(torch.half) == {"weight": torch.tensor([[3.5]], dtype=torch.half)}
    other = nn.Linear(1, 1, bias=False)
    average.copy_to(other)
    assert other.weight.item() == pytest.approx(3.5) and module.weight.item() == pytest.approx(6.5)
    average.restart()
    assert average.values[0].item() == pytest.approx(6.5)


def test_a_record_goes_on_where_it_was_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock(10.0, Ticks())
    assert clock.running()
    for step in (1, 2):
        Record(tmp_path / "log.jsonl").write(clock, step, 0.5, {"loss": torch.tensor(0.123456)})
    entry = {"s": 1.0, "step": 1, "hours": 0.5, "loss": 0.1235}
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [entry, {**entry, "step": 2}]
    assert capsys.readouterr().out.splitlines() == lines


def test_a_state_that_cannot_be_written_leaves_the_last_one(tmp_path: Path) -> None:
    training.save(tmp_path / "lm.pt", {"steps": 1})
    with pytest.raises((AttributeError, TypeError, PicklingError)):  # by the version of Python
        training.save(tmp_path / "lm.pt", {"steps": 2, "what": lambda: 0})
    assert torch.load(tmp_path / "lm.pt", weights_only=True) == {"steps": 1}


def utterance(number: int) -> Spoken:
    """Of 4 to 11 patches."""
    drawn, patches = np.random.default_rng(number), 4 + number % 8
    text = "a fox and a dog meet at the old mill today"[: 4 * patches]
    begins = np.linspace(0, len(text) - 2, patches).astype(np.int16)
    return Spoken(
        text,
        text,
        drawn.integers(-3000, 3000, patches * PATCH).astype(np.int16),
        drawn.normal(0.0, 0.5, (patches * FRAMES, LATENT_DIM)).astype(np.float16),
        drawn.integers(0, 40, patches * FRAMES).astype(np.uint8),
        drawn.integers(0, 40, 2 * patches * FRAMES).astype(np.uint8),
        np.stack((begins, begins + 2), axis=1),
    )


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    (tmp_path / "data").mkdir()
    corpus.write(tmp_path / "data/00000-00001.npz", [utterance(number) for number in range(48)])
    for module in (train_codec, train_voxcpm2):
        monkeypatch.setattr(module, "Clock", lambda seconds: Clock(seconds, Ticks()))
    shared = {"data": tmp_path / "data", "out": tmp_path, "resume": None, "seed": 0, "rate": 1e-3, "compile": False}
    return argparse.Namespace(**shared, seconds=24.0, frames=200_000, average=0.9)


def steps_of(path: Path) -> int:
    return int(torch.load(path, weights_only=True)["steps"])


def recorded(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_the_language_model_is_trained_and_goes_on(options: argparse.Namespace, tmp_path: Path) -> None:
    own = {"last_rate": 1e-5, "guided": 0.0, "draws": 1, "rows": 2, "length": 256, "patches": 160, "adam": False}
    vars(options).update(own)
    train_voxcpm2.train(options)
    steps = steps_of(tmp_path / "lm.pt")
    assert steps > 4 and recorded(tmp_path / "lm.jsonl")
    first = torch.load(tmp_path / "lm.pt", weights_only=True)["model"]
    options.resume = tmp_path / "lm.pt"
    train_voxcpm2.train(options)
    assert steps_of(tmp_path / "lm.pt") == 2 * steps
    then = torch.load(tmp_path / "lm.pt", weights_only=True)["model"]
    assert first.keys() == then.keys() and any(not torch.equal(first[name], then[name]) for name in first)


@pytest.mark.slow
def test_the_codec_is_trained_and_goes_on(
    options: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {**CONFIG["audio_vae_config"], "encoder_dim": 2, "decoder_dim": 64}
    monkeypatch.setattr(train_codec, "CONFIG", {**CONFIG, "audio_vae_config": small})
    basis = Path(corpus.__file__).parent / "basis.npz"
    vars(options).update({"whole": 0.5, "batch": 2, "crop": 3, "noise": 0.1, "least": 10, "basis": basis})
    train_codec.train(options)
    steps, state = steps_of(tmp_path / "codec.pt"), torch.load(tmp_path / "codec.pt", weights_only=True)
    assert steps > 4 and state["whole"] and recorded(tmp_path / "codec.jsonl")[0] == 1
    options.resume = tmp_path / "codec.pt"
    train_codec.train(options)
    assert steps_of(tmp_path / "codec.pt") == 2 * steps
