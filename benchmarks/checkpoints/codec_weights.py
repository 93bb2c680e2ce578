"""Random weights of VoxCPM2's codec in the published layout, from a fixed seed: the same bytes on every machine."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

LOUDNESS = 0.03
"""Gain of the codec's last convolution: root mean square of the samples about 0.1."""


class Values:
    """Uniform numbers of a wanted spread, in a fixed order."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def uniform(self, shape: tuple[int, ...], low: float, high: float) -> Tensor:
        words = self._bits.random_raw(math.prod(shape)) >> np.uint64(40)
        return torch.from_numpy((words.astype(np.float64) * 2.0**-24 * (high - low) + low).astype(np.float32)).reshape(
            shape
        )

    def spread(self, shape: tuple[int, ...], deviation: float) -> Tensor:
        bound = deviation * math.sqrt(3.0)
        return self.uniform(shape, -bound, bound)


def codec_tensors(values: Values, vae: dict[str, Any]) -> dict[str, Tensor]:
    """audiovae.safetensors of an `audio_vae_config`, weight norm in two parts as published."""
    tensors: dict[str, Tensor] = {}

    def conv(name: str, out_features: int, in_width: int, kernel: int, gain: float = 1.0) -> None:
        tensors[f"{name}.weight_v"] = values.spread((out_features, in_width, kernel), 1.0)
        tensors[f"{name}.weight_g"] = torch.full((out_features, 1, 1), gain)
        tensors[f"{name}.bias"] = values.spread((out_features,), 0.01)

    def upsample(name: str, in_width: int, out_features: int, stride: int) -> None:
        tensors[f"{name}.weight_v"] = values.spread((in_width, out_features, 2 * stride), 1.0)
        # The norm runs over an input channel's taps; a sample sums two taps of every input channel.
        tensors[f"{name}.weight_g"] = torch.full((in_width, 1, 1), math.sqrt(stride * out_features / in_width))
        tensors[f"{name}.bias"] = values.spread((out_features,), 0.01)

    def alpha(name: str, width: int) -> None:
        tensors[f"{name}.alpha"] = values.uniform((1, width, 1), 0.5, 1.5)

    def unit(name: str, width: int) -> None:
        alpha(f"{name}.block.0", width)
        conv(f"{name}.block.1", width, 1, 7)
        alpha(f"{name}.block.2", width)
        conv(f"{name}.block.3", width, width, 1, gain=0.3)

    width, latent = vae["encoder_dim"], vae["latent_dim"]
    conv("encoder.block.0", width, 1, 7)
    for index, stride in enumerate(vae["encoder_rates"], start=1):
        for number in range(3):
            unit(f"encoder.block.{index}.block.{number}", width)
        alpha(f"encoder.block.{index}.block.3", width)
        conv(f"encoder.block.{index}.block.4", 2 * width, width, 2 * stride)
        width *= 2
    conv("encoder.fc_mu", latent, width, 3)
    conv("encoder.fc_logvar", latent, width, 3)

    tensors["decoder.sr_bin_boundaries"] = torch.tensor(vae["sr_bin_boundaries"], dtype=torch.int32)
    rates, width = len(vae["sr_bin_boundaries"]) + 1, vae["decoder_dim"]
    conv("decoder.model.0", latent, 1, 7)
    conv("decoder.model.1", width, latent, 1)
    for index, stride in enumerate(vae["decoder_rates"], start=2):
        tensors[f"decoder.sr_cond_model.{index}.scale_embed.weight"] = values.uniform((rates, width), 0.6, 0.9)
        tensors[f"decoder.sr_cond_model.{index}.bias_embed.weight"] = values.spread((rates, width), 0.02)
        alpha(f"decoder.model.{index}.block.0", width)
        upsample(f"decoder.model.{index}.block.1", width, width // 2, stride)
        width //= 2
        for number in range(2, 5):
            unit(f"decoder.model.{index}.block.{number}", width)
    end = 2 + len(vae["decoder_rates"])
    alpha(f"decoder.model.{end}", width)
    conv(f"decoder.model.{end + 1}", 1, width, 7, gain=LOUDNESS)
    return tensors
