"""The AudioVAE decoder's units, one at a time, and the whole step of four latent frames."""

from __future__ import annotations

import torch

from benchmarks.kernels.timing import Case, Run
from models.layers.kernels.vae import residual_unit_cuda, snake_upsample_cuda
from models.voxcpm2.vae_layers import residual_unit, snake_upsample

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
        return lambda i: residual_unit(x[i % 4], *rest)
    return lambda i: residual_unit_cuda(x[i % 4], *rest, tile=tile, num_warps=warps)


def _upsample(
    rows: int, width: int, length: int, stride: int, tile: tuple[int, int, int] | None, warps: int, plain: bool
) -> Run:
    x = [_random(rows, width, length) for _ in range(4)]
    scale, shift, alpha = _random(width), _random(width), torch.rand(width, device="cuda") + 0.5
    weight, bias = _random(width, width // 2, 2 * stride) * width**-0.5, _random(width // 2)
    memory, slots = _random(rows + 1, width, 1), torch.arange(1, rows + 1, device="cuda")
    if plain:
        return lambda i: snake_upsample(x[i % 4], scale, shift, alpha, weight, bias, stride, memory, slots)
    return lambda i: snake_upsample_cuda(
        x[i % 4], scale, shift, alpha, weight, bias, stride, memory, slots, tile=tile, num_warps=warps
    )


def cases() -> list[Case]:
    found = []
    for rows in (1, 32):
        for width, length in UNITS:
            c = min(width, 128)
            variants: list[tuple[str, tuple[int, int, int] | None, int, bool]] = [
                ("torch", None, 4, True),
                ("chosen", None, 4, False),
                ("32x32", (32, 32, 32), 4, False),
                (f"{c}x64 w8", (c, 64, 32), 8, False),
                (f"{c}x32 k16", (c, 32, 16), 4, False),
            ]
            if width >= 256:
                variants.append(("256x64 w8", (256, 64, 32), 8, False))
            for variant, tile, warps, plain in variants:
                make = lambda a=(rows, width, length, tile, warps, plain): _unit(*a)  # noqa: E731
                floor = 2 * rows * width**2 * length / 3.0e8
                found.append(Case("residual unit", f"{rows} x {width} x {length}", variant, make, floor, calls=12))
        for width, length, stride in UPSAMPLES:
            variants = [
                ("torch", None, 4, True),
                ("chosen", None, 4, False),
                ("64x16", (64, 16, 32), 4, False),
                ("64x64", (64, 64, 32), 4, False),
                ("128x64 w8", (128, 64, 32), 8, False),
            ]
            for variant, tile, warps, plain in variants:
                make = lambda a=(rows, width, length, stride, tile, warps, plain): _upsample(*a)  # noqa: E731
                floor = 2 * rows * width**2 * length * stride / 3.0e8
                found.append(Case("upsample", f"{rows} x {width} x {length}", variant, make, floor, calls=12))
    return found
