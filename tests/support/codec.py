"""VoxCPM2's codec with random weights, and its audio as it is streamed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.voxcpm2.audio_vae import AudioVAE, CodecDecoder
from models.voxcpm2.config import AudioVAEConfig
from models.voxcpm2.vae_layers import Streams
from models.voxcpm2.vae_weights import randomise_audio_vae

PUBLISHED = AudioVAEConfig(
    encoder_dim=128,
    encoder_rates=(2, 5, 8, 8),
    latent_dim=64,
    decoder_dim=2048,
    decoder_rates=(8, 6, 5, 2, 2, 2),
    sr_bin_boundaries=(20000, 30000, 40000),
    sample_rate=16000,
    out_sample_rate=48000,
)
FRAMES_A_STEP = 4
LOUDNESS = 0.1
"""Root mean square of the output to which the last convolution is scaled: as loud as speech, where tanh is nearly
linear."""


def random_codec(config: AudioVAEConfig, seed: int) -> AudioVAE:
    """Random weights that keep a signal's scale through the decoder, and give an output as loud as LOUDNESS."""
    vae = AudioVAE(config).requires_grad_(False)
    randomise_audio_vae(vae, seed)
    last = vae.decoder.last
    quiet = vae.decoder(latents(config, 1, FRAMES_A_STEP, seed))
    last.weight.mul_(LOUDNESS / float(quiet.std()))
    last.bias.zero_()
    return vae


def latents(config: AudioVAEConfig, rows: int, frames: int, seed: int) -> Tensor:
    return torch.randn(rows, config.latent_dim, frames, generator=torch.Generator().manual_seed(seed))


def streamed(decoder: CodecDecoder, z: Tensor) -> Tensor:
    """Samples [rows, T * hop] of z [rows, latent_dim, T], FRAMES_A_STEP at a time, as they are served."""
    rows = z.shape[0]
    memory = torch.zeros(rows, decoder.memory_size, dtype=z.dtype, device=z.device)
    streams = Streams(memory, torch.arange(rows, device=z.device))
    return torch.cat([decoder(part, streams)[:, 0] for part in z.split(FRAMES_A_STEP, dim=-1)], dim=-1)


def decibels(audio: Tensor, reference: Tensor) -> float:
    """Signal-to-noise ratio; infinite for equal signals."""
    audio, reference = audio.double().cpu(), reference.double().cpu()
    noise = float((audio - reference).norm())
    return 20 * math.log10(float(reference.norm()) / noise) if noise else math.inf
