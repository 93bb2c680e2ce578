"""The decoder of the voice's codec as it is trained: the server's arithmetic, its published layout, what it learns."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.voxcpm2.audio_vae import AudioVAE
from models.voxcpm2.config import load_config
from models.voxcpm2.vae_layers import residual_unit
from models.voxcpm2.vae_weights import load_audio_vae
from tests.support.spoken import utterance
from training.voice import codec
from training.voice.config import PUBLISHED
from training.voice.corpus import write
from training.voice.latents import FRAME_RATE, LATENT_DIM, SPECTRAL, Basis

pytestmark = pytest.mark.slow


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Two utterances of noise, the first held out."""
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "00000.npz", [utterance(2), utterance(10)], waves=True)
    monkeypatch.setattr(codec, "_HELD_OUT", 1)
    monkeypatch.setattr(codec, "_HEARD", 2)
    sizes = {"frames": 100, "least": 1.0, "batch": 2, "crop": 4}
    return argparse.Namespace(data=tmp_path / "data", out=tmp_path, compile=False, **sizes)


def published_codec(directory: Path) -> AudioVAE:
    config = load_config(PUBLISHED).vae
    vae = AudioVAE(config)
    load_audio_vae(vae, directory, config)
    return vae


@pytest.mark.parametrize("unit", [codec.unit, residual_unit.reference])
@torch.no_grad()
def test_what_is_trained_sounds_as_the_server_does(unit: object) -> None:
    decoder, latents = published_codec(PUBLISHED).decoder, torch.randn(2, LATENT_DIM, 5)
    torch.testing.assert_close(codec.sound(decoder, latents, unit), decoder(latents)[:, 0], atol=1e-5, rtol=0)  # type: ignore[arg-type]


def test_steps_change_the_decoder_alone(options: argparse.Namespace) -> None:
    trainer, before = codec.Trainer(options), load_file(PUBLISHED / "audiovae.safetensors")
    parts = []
    for trainer.steps in range(2):
        parts.append(trainer.step(1e-3, 0.0))
    assert all(part.isfinite() for each in parts for part in each.values())
    save_file(codec.published(trainer.optimiser.average), options.out / "audiovae.safetensors")
    after = load_file(options.out / "audiovae.safetensors")
    assert {name: (x.shape, x.dtype) for name, x in after.items()} == {
        name: (x.shape, x.dtype) for name, x in before.items()
    }
    for name, tensor in after.items():
        kept = name.startswith("encoder.") or name == "decoder.sr_bin_boundaries"
        assert torch.equal(tensor, before[name]) == kept, name
    # What is exported is the average.
    latents = torch.randn(1, LATENT_DIM, 5)
    with torch.no_grad():
        wanted = trainer.optimiser.average(latents)
        made, now = (decoder(latents) for decoder in (published_codec(options.out).decoder, trainer.network))
    torch.testing.assert_close(made, wanted, atol=2e-3, rtol=0)
    assert (made - now).abs().max() > 2e-3


def test_batches_leave_the_held_out_crops_alone(options: argparse.Namespace) -> None:
    trainer, held_out = codec.Trainer(options), 12
    assert trainer.store.first == [0, 6]
    for beginnings in (False, True):
        drawn = torch.cat([trainer._drawn(beginnings) for _ in range(50)])
        assert int(drawn.min()) >= held_out and int(drawn.max()) <= 48 - 12
        assert (set(drawn.tolist()) == {24}) == beginnings


def test_the_vocoder_sounds_the_pitch_in_whole_cycles_of_a_frame() -> None:
    basis = Basis.load(torch.device("cpu"))
    latents = torch.zeros(1, LATENT_DIM, 8)
    latents[:, SPECTRAL : SPECTRAL + 2] = (torch.tensor(8.2 * FRAME_RATE).log() - basis.pitch[0]) / basis.pitch[1]
    latents[:, SPECTRAL + 2 :] = 1.0
    frame = codec.Vocoder(torch.device("cpu"))(latents)[0, 4 * 1920 : 5 * 1920]
    power = torch.fft.rfft(frame).abs()[: int(2000 / FRAME_RATE)].square()
    assert power[8::8].sum() > 0.99 * power.sum()
