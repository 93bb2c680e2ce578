"""The codec with random weights on which precisions are compared, and the comparison in decibels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.steps.codec import LOUDNESS, PUBLISHED, decibels, latents, random_codec, streamed


@torch.inference_mode()
def test_a_random_codec_is_as_loud_as_speech_and_streams_as_in_one_pass() -> None:
    config = replace(PUBLISHED, encoder_dim=8, decoder_dim=256)
    decoder = random_codec(config, seed=0).decoder
    z = latents(config, 2, 8, seed=1)
    audio = streamed(decoder, z)
    assert LOUDNESS / 2 < float(audio.square().mean().sqrt()) < 2 * LOUDNESS
    assert float(audio.abs().max()) < 0.95, "tanh would hide errors"
    assert decibels(audio, decoder(z)[:, 0]) > 100


def test_decibels() -> None:
    signal = torch.ones(1000)
    assert decibels(signal + 0.01, signal) == pytest.approx(40, abs=1e-3)
    assert decibels(signal, signal) == float("inf")
