"""What the decoder learns to sound, and the stages of its training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.embedded.voices import codec as codecs
from models.embedded.voices import corpus
from models.embedded.voices.codec import Codec, Head, Snake
from models.embedded.voices.config import CONFIG
from models.embedded.voices.distances import NEAR, SpectralDistance, sample_distance
from models.embedded.voices.latents import DELAY, LATENT_DIM, Basis, Spectrum
from models.embedded.voices.resampling import down
from models.embedded.voices.vocoder import Vocoder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def basis() -> Basis:
    return Basis.load(Path(corpus.__file__).parent / "basis.npz", CPU)


def steady(basis: Basis, cycles: int, voiced: float, frames: int = 8) -> Tensor:
    """Frames of one loud spectrum that falls with frequency, [1, D, frames]."""
    mel = torch.linspace(2.0, 0.0, 80).repeat(4)[None]
    tone = torch.full((1, 2), 25.0 * cycles).log()
    values = basis.latents(mel, torch.cat((tone, torch.full((1, 4), voiced)), dim=1))
    return values.T[None].repeat(1, 1, frames)


def strengths(wave: Tensor) -> Tensor:
    """Amplitude of each multiple of 25 Hz in the last frame of samples at 48 kHz."""
    return torch.fft.rfft(wave[0, -1920:]).abs() / 960


@pytest.mark.parametrize("cycles", [6, 7, 8])
def test_a_voice_is_made_of_multiples_of_its_pitch(basis: Basis, cycles: int) -> None:
    found = strengths(Vocoder(basis, CPU)(steady(basis, cycles, 1.0)))[: 2000 // 25]
    harmonic = torch.arange(len(found)) % cycles == 0
    harmonic[0] = False
    assert found[harmonic].square().sum() > 50.0 * found[~harmonic].square().sum()


def test_breath_fills_every_multiple_of_the_frame_rate(basis: Basis) -> None:
    found = strengths(Vocoder(basis, CPU)(steady(basis, 7, 0.0)))
    beside = found[5:301] / found[4:300]
    assert beside.min() > 0.5
    assert beside.max() < 2.0
    assert found[321:].max() < 1e-3 * found[4:300].mean()


def test_alike_frames_sound_alike(basis: Basis) -> None:
    wave = Vocoder(basis, CPU)(steady(basis, 7, 1.0))
    torch.testing.assert_close(wave[:, 1920:3840], wave[:, -1920:], atol=1e-5, rtol=1e-4)


def test_what_is_sounded_depends_on_no_later_frame(basis: Basis) -> None:
    vocoder, latents = Vocoder(basis, CPU), steady(basis, 7, 1.0)
    other = latents.clone()
    other[:, :, 5:] = steady(basis, 8, 0.0, 3)
    first, second = vocoder(latents), vocoder(other)
    torch.testing.assert_close(first[:, : 5 * 1920], second[:, : 5 * 1920], atol=1e-6, rtol=0.0)
    assert (first - second)[:, 5 * 1920 :].abs().max() > 1e-3


def test_breath_has_the_spectrum_of_its_latents(basis: Basis) -> None:
    latents = steady(basis, 7, 0.0, 20)
    heard = Spectrum(CPU)(down(Vocoder(basis, CPU)(latents))[0, DELAY:-DELAY], torch.full((19,), 175.0))[4:-4]
    wanted = basis.spectrum(latents[0].T)[4:-5]
    assert (heard - wanted).view(-1, 80)[:, 5:75].mean().abs() < 0.25
    assert latents.shape[1] == LATENT_DIM


def test_the_written_gradient_of_the_snake() -> None:
    snake = Snake(3).double()
    snake.alpha.data.uniform_(0.2, 1.5)
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 3, 5, dtype=torch.float64)
    wanted = torch.autograd.grad((codecs._snake_forward(x, snake.alpha) * weights).sum(), (x, snake.alpha))
    made = torch.autograd.grad((snake(x) * weights).sum(), (x, snake.alpha))
    torch.testing.assert_close(made, wanted, atol=1e-5, rtol=1e-5)


def test_the_last_stage_takes_over_what_the_head_did() -> None:
    torch.manual_seed(0)
    decoder = Codec(CONFIG["audio_vae_config"]).decoder
    head, latents = Head(decoder), torch.randn(1, decoder.model[0].groups, 4)
    with torch.no_grad():
        early = head(decoder, latents)[0, 0]
        head.hand_over(decoder)
        whole = decoder(latents)[0, 0]
    early, whole = early[640:-16], whole[3 * 640 + Head.EARLY :: 3][: len(early) - 656]
    assert (early - whole).square().mean() < 1e-3 * early.square().mean()


def test_distances_have_gradients_in_silence_that_are_sane() -> None:
    torch.manual_seed(0)
    wanted = torch.cat((torch.zeros(1, 8000), 0.1 * torch.randn(1, 8000)), dim=1)
    made = (wanted * 0.5 + 1e-6 * torch.randn_like(wanted)).requires_grad_()
    distance = SpectralDistance(NEAR)
    assert distance(wanted, wanted) == 0.0
    loss = distance(made, wanted) + sample_distance(made, wanted)
    (gradient,) = torch.autograd.grad(loss, made)
    assert gradient[:, :7000].norm() < 2.0 * gradient[:, 9000:].norm()
    assert 0.2 < loss.item() < 2.0
