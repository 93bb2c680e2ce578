"""The codec's training on a few seconds: a small codec, its last stage taken in, states written and read again."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest
import torch

from models.embedded import train_codec
from models.embedded.train_codec import Trainer, Waves, rate_at, resume, save
from models.embedded.voices import corpus
from models.embedded.voices.config import CONFIG
from models.embedded.voices.latents import HOP, LATENT_DIM

CPU = torch.device("cpu")


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    small = {**CONFIG["audio_vae_config"], "encoder_dim": 2, "decoder_dim": 64}
    monkeypatch.setattr(train_codec, "CONFIG", {**CONFIG, "audio_vae_config": small})
    basis = Path(corpus.__file__).parent / "basis.npz"
    return argparse.Namespace(batch=2, crop=3, noise=0.1, average=0.9, basis=basis, compile=False)


@pytest.fixture
def waves() -> Waves:
    random, made = np.random.default_rng(0), Waves(60, CPU)
    made.wave.copy_(torch.from_numpy(random.integers(-3000, 3000, 60 * HOP).astype(np.int16)))
    made.latents.copy_(torch.from_numpy(random.normal(0.0, 0.5, (60, LATENT_DIM))))
    made.frames = 60
    return made


def test_a_state_goes_on_where_it_was_left(options: argparse.Namespace, waves: Waves, tmp_path: Path) -> None:
    torch.manual_seed(0)
    trainer = Trainer(options, CPU)
    first = {name: value.item() for name, value in trainer.step(waves, 1e-3).items()}
    assert all(np.isfinite(list(first.values())))
    save(tmp_path, trainer, 7)
    again = Trainer(options, CPU)
    assert resume(tmp_path / "codec.pt", again) == 7
    assert not again.whole
    for mine, kept in zip(again.sounding.parameters[-2:], trainer.sounding.average.values[-2:], strict=True):
        torch.testing.assert_close(mine.detach(), kept)
    again.finish_head()
    again.step(waves, 1e-3)
    save(tmp_path, again, 8)
    last = Trainer(options, CPU)
    assert resume(tmp_path / "codec.pt", last) == 8
    assert last.whole


def test_the_last_stage_begins_where_the_head_ended(options: argparse.Namespace, waves: Waves) -> None:
    torch.manual_seed(0)
    trainer, latents = Trainer(options, CPU), waves.crops(1, 8)[1]
    with torch.no_grad():
        early = trainer.head(trainer.codec.decoder, latents)
        trainer.finish_head()
        whole = trainer.codec.decoder(latents)
    assert early.std() > 0
    assert abs(float(whole.std() / early.std()) - 1.0) < 0.2


def test_the_distance_falls(options: argparse.Namespace, waves: Waves) -> None:
    torch.manual_seed(0)
    trainer = Trainer(options, CPU)
    losses = [trainer.step(waves, 3e-3) for _ in range(25)]
    for name in ("latents", "samples"):
        early, late = (sum(part[name].item() for part in parts) for parts in (losses[:5], losses[-5:]))
        assert late < early, name


def test_the_rate_warms_up_and_dies_away() -> None:
    assert rate_at(0.0, 0, 1.0) == pytest.approx(0.01)
    assert rate_at(0.0, 1000, 1.0) == pytest.approx(1.0)
    assert rate_at(1.0, 1000, 1.0) == pytest.approx(0.02)
