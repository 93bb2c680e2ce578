"""The AudioVAE decoder's units, one at a time, and the whole step of four latent frames."""

from __future__ import annotations

from unittest.mock import patch

import torch

from benchmarks.kernels.timing import Case, Run
from models.layers.kernels.vae import residual_unit_cuda, snake_upsample_cuda
from models.voxcpm2 import vae_layers
from models.voxcpm2.audio_vae import Decoder
from models.voxcpm2.config import AudioVAEConfig
from models.voxcpm2.vae_layers import residual_unit_reference, snake_upsample_reference

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
UNITS = [(1024, 32), (512, 192), (256, 960), (128, 1920), (64, 3840), (32, 7680)]
UPSAMPLES = [(2048, 4, 8), (1024, 32, 6), (512, 192, 5), (256, 960, 2), (128, 1920, 2), (64, 3840, 2)]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda")


def _unit(rows: int, width: int, length: int, tile: tuple[int, int, int] | None, warps: int, plain: bool) -> Run:
    x = [_random(rows, width, length) for _ in range(4)]
    alpha, depthwise, bias = torch.rand(width, device="cuda") + 0.5, _random(width, 1, 7), _random(width)
    pointwise = _random(width, width, 1) * width**-0.5
    memory = _random(rows + 1, width, 18)
    slots = torch.arange(1, rows + 1, device="cuda")
    rest = (alpha, depthwise, bias, 3, alpha, pointwise, bias, memory, slots)
    if plain:
        return lambda i: residual_unit_reference(x[i % 4], *rest)
    return lambda i: residual_unit_cuda(x[i % 4], *rest, tile=tile, num_warps=warps)


def _upsample(
    rows: int, width: int, length: int, stride: int, tile: tuple[int, int, int] | None, warps: int, plain: bool
) -> Run:
    x = [_random(rows, width, length) for _ in range(4)]
    scale, shift, alpha = _random(width), _random(width), torch.rand(width, device="cuda") + 0.5
    weight = (_random(2 * stride, width // 2, width) * width**-0.5).permute(2, 1, 0)
    bias = _random(width // 2)
    memory, slots = _random(rows + 1, width, 1), torch.arange(1, rows + 1, device="cuda")
    if plain:
        return lambda i: snake_upsample_reference(x[i % 4], scale, shift, alpha, weight, bias, stride, memory, slots)
    return lambda i: snake_upsample_cuda(
        x[i % 4], scale, shift, alpha, weight, bias, stride, memory, slots, tile=tile, num_warps=warps
    )


def _decoder(rows: int, plain: bool) -> Run:
    """The published size with random weights; TF32 in both variants."""
    decoder = Decoder(PUBLISHED).cuda()
    for parameter in decoder.parameters():
        parameter.data.uniform_(0.01, 0.02)
    table = torch.zeros(rows + 1, decoder.memory_size, device="cuda")
    streams = vae_layers.Streams(table, torch.arange(1, rows + 1, device="cuda"))
    latents = [_random(rows, PUBLISHED.latent_dim, 4) for _ in range(4)]

    @torch.inference_mode()
    def run(i: int) -> object:
        if not plain:
            return decoder(latents[i % 4], streams)
        with (
            patch.object(vae_layers, "residual_unit", vae_layers.residual_unit_reference),
            patch.object(vae_layers, "snake_upsample", vae_layers.snake_upsample_reference),
        ):
            return decoder(latents[i % 4], streams)

    return run


def cases() -> list[Case]:
    found = []
    for rows in (1, 32):
        for width, length in UNITS:
            c = min(width, 128)
            variants: list[tuple[str, tuple[int, int, int] | None, int, bool]] = [
                ("chosen", None, 4, False),
                ("32x32", (32, 32, 32), 4, False),
                (f"{c}x64 w8", (c, 64, 32), 8, False),
            ]
            for variant, tile, warps, plain in variants:
                make = lambda a=(rows, width, length, tile, warps, plain): _unit(*a)  # noqa: E731
                floor = 2 * rows * width**2 * length / 3.0e8
                found.append(Case("residual unit", f"{rows} x {width} x {length}", variant, make, floor, calls=12))
        for width, length, stride in UPSAMPLES:
            variants = [
                ("chosen", None, 4, False),
                ("32x32", (32, 32, 32), 4, False),
                ("128x64 w8", (128, 64, 32), 8, False),
            ]
            for variant, tile, warps, plain in variants:
                make = lambda a=(rows, width, length, stride, tile, warps, plain): _upsample(*a)  # noqa: E731
                floor = 2 * rows * width**2 * length * stride / 3.0e8
                found.append(Case("upsample", f"{rows} x {width} x {length}", variant, make, floor, calls=12))
    for rows in (1, 8, 32, 64):
        for variant in ("torch", "kernels"):
            make = lambda a=(rows, variant == "torch"): _decoder(*a)  # noqa: E731
            found.append(Case("decoder step", f"{rows} x 4 frames", variant, make, rows * 2.88e9 / 3.0e8, calls=4))
    return found
