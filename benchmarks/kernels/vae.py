"""The AudioVAE decoder's units, one at a time, and the whole step of four latent frames, by precision and tile."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import torch

from benchmarks.kernels.timing import Case
from benchmarks.steps.codec import PUBLISHED
from models.layers.precision import Precision
from models.voxcpm2 import vae_layers
from models.voxcpm2.audio_vae import CodecDecoder
from models.voxcpm2.kernels import vae
from models.voxcpm2.kernels.vae import UnitTile
from models.voxcpm2.kernels.vae_gemm import GemmTile
from models.voxcpm2.vae_layers import residual_unit, snake_upsample
from service.tuning.timer import Run

UNITS = [(1024, 32), (512, 192), (256, 960), (128, 1920), (64, 3840), (32, 7680)]
UPSAMPLES = [(2048, 4, 8), (1024, 32, 6), (512, 192, 5), (256, 960, 2), (128, 1920, 2), (64, 3840, 2)]
GEMM_TILES = (
    GemmTile(16, 64, 128, 4, 4),
    GemmTile(32, 32, 128, 4, 3),
    GemmTile(64, 64, 64, 4, 4),
    GemmTile(64, 64, 128, 4, 3),
    GemmTile(64, 128, 64, 4, 3),
    GemmTile(64, 256, 64, 8, 3),
    GemmTile(128, 64, 64, 4, 3),
    GemmTile(128, 128, 64, 8, 3),
    GemmTile(128, 128, 64, 8, 4),
    GemmTile(128, 256, 64, 8, 3),
)
"""Tried in float16."""


def unit_tiles(width: int) -> list[UnitTile]:
    """Whole units in one kernel where their channels fit, and walks that leave the GEMM to a second."""
    found = [UnitTile(64, 32, steps, warps, fused=False) for steps in (1, 2, 4, 8) for warps in (4, 8)]
    if width <= 128:
        sizes = [(lanes, lanes * width // values) for lanes in (16, 32, 64, 128) for values in (256, 512)]
        found += [UnitTile(lanes, width, s, w, fused=True) for lanes, w in sizes if 4 <= w <= 16 for s in (2, 4, 8, 16)]
    return found


@dataclass(frozen=True)
class _Variant:
    name: str
    precision: Precision | None
    unit: UnitTile | None = None
    gemm: GemmTile | None = None


def _named(unit: UnitTile | None = None, gemm: GemmTile | None = None) -> _Variant:
    if unit is not None:
        kind = "whole" if unit.fused else f"walk of {unit.channels}"
        return _Variant(f"{kind} {unit.lanes}x{unit.steps} w{unit.num_warps}", "float16", unit)
    assert gemm is not None
    size = f"{gemm.samples}x{gemm.outputs}x{gemm.inputs}"
    return _Variant(f"gemm {size} w{gemm.num_warps} s{gemm.num_stages}", "float16", None, gemm)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda")


def _signals(rows: int, width: int, length: int) -> list[torch.Tensor]:
    """Channels-last, as each kernel leaves them to the next."""
    return [_random(rows, length, width).transpose(1, 2) for _ in range(4)]


def _unit(rows: int, width: int, length: int, variant: _Variant) -> Run:
    x = _signals(rows, width, length)
    alpha, depthwise, bias = torch.rand(width, device="cuda") + 0.5, _random(width, 1, 7), _random(width)
    pointwise = _random(width, width, 1) * width**-0.5
    pointwise = pointwise.half() if variant.precision == "float16" else pointwise
    memory = _random(rows + 1, width, 18)
    slots = torch.arange(1, rows + 1, device="cuda")
    rest = (alpha, depthwise, bias, 3, alpha, pointwise, bias, memory, slots)
    if variant.precision is None:
        return lambda i: residual_unit.reference(x[i % 4], *rest)
    return lambda i: residual_unit.kernel(
        x[i % 4], *rest, precision=variant.precision, unit_tile=variant.unit, tile=variant.gemm
    )


def _upsample(rows: int, width: int, length: int, stride: int, variant: _Variant) -> Run:
    x = _signals(rows, width, length)
    scale, shift, alpha = _random(width), _random(width), torch.rand(width, device="cuda") + 0.5
    weight = _random(2 * stride, width // 2, width) * width**-0.5
    weight = (weight.half() if variant.precision == "float16" else weight).permute(2, 1, 0)
    bias = _random(width // 2)
    memory, slots = _random(rows + 1, width, 1), torch.arange(1, rows + 1, device="cuda")
    rest = (scale, shift, alpha, weight, bias, stride, memory, slots)
    if variant.precision is None:
        return lambda i: snake_upsample.reference(x[i % 4], *rest)
    return lambda i: snake_upsample.kernel(x[i % 4], *rest, tile=variant.gemm, precision=variant.precision)


def _torch_only() -> ExitStack:
    """Within it, modules take the references of their functions."""
    stack = ExitStack()
    for name in ("residual_unit", "snake_upsample"):
        reference = getattr(vae_layers, f"{name}_reference")
        stack.enter_context(patch.object(vae_layers, name, lambda *a, call=reference: call(*a[:-1])))
    stack.enter_context(patch("models.voxcpm2.audio_vae.snake_samples", vae_layers.snake_samples.reference))
    return stack


def decoder_step(rows: int, precision: Precision | None, units: int = 0, least_walk: int = 0) -> Run:
    """The published size with random weights. precision None: torch alone, in TF32. Units of more than `units` channels
    take two kernels (0: as chosen), and walks have at least `least_walk` samples."""
    decoder = CodecDecoder(PUBLISHED).cuda()
    for parameter in decoder.parameters():
        parameter.data.uniform_(-0.02, 0.02)
    decoder.set_precision(precision)
    table = torch.zeros(rows + 1, decoder.memory_size, device="cuda")
    streams = vae_layers.Streams(table, torch.arange(1, rows + 1, device="cuda"))
    latents = [_random(rows, PUBLISHED.latent_dim, 4) for _ in range(4)]
    chosen = vae.unit_tile_for

    def unit_tile(rows: int, width: int, precision: Precision) -> UnitTile:
        tile = chosen(rows, width, precision)
        if tile.fused and units and width > units:
            tile = UnitTile(64, 32, tile.steps, 4, fused=False)
        return replace(tile, steps=max(tile.steps, least_walk))

    @torch.inference_mode()
    def run(i: int) -> object:
        with _torch_only() if precision is None else patch.object(vae, "unit_tile_for", unit_tile):
            return decoder(latents[i % 4], streams)

    return run


def _decoder_cases(rows: int) -> list[Case]:
    variants: list[tuple[str, tuple[Precision | None, int, int]]] = [
        ("torch", (None, 0, 0)),
        ("tf32", ("tf32", 0, 0)),
        ("float16", ("float16", 0, 0)),
        *((f"float16, whole units to {units}", ("float16", units, 0)) for units in (1, 32, 64)),
        *((f"float16, walks from {steps}", ("float16", 0, steps)) for steps in (4, 8, 24)),
    ]
    floor = rows * 2.88e9 / 6.0e8
    found = []
    for name, arguments in variants:
        make = partial(decoder_step, rows, *arguments)
        predicted = PREDICTED_US[rows] if name == "float16" else None
        found.append(Case("decoder step", f"{rows} x 4 frames", name, make, floor, 4, predicted))
    return found


PREDICTED_US = {1: 230.0, 8: 360.0, 32: 1000.0, 64: 1850.0}
"""Predicted time of the chosen step in float16: bytes at 2.2 TB/s, GEMMs at 350 TFLOP/s, 3 us for each launch."""


def cases() -> list[Case]:
    found = []
    basic = [_Variant("tf32", "tf32"), _Variant("float16", "float16")]
    gemms = [_named(gemm=tile) for tile in GEMM_TILES]
    for rows in (1, 8, 64):
        for width, length in UNITS:
            walks = [_named(unit) for unit in unit_tiles(width)]
            for variant in (*basic, *walks, *(gemms if width > 128 else ())):
                make = lambda a=(rows, width, length, variant): _unit(*a)  # noqa: E731
                floor = max(rows * width * length * 8 / 3e6, 2 * rows * width**2 * length / 6.0e8)
                found.append(Case("residual unit", f"{rows} x {width} x {length}", variant.name, make, floor, calls=8))
        for width, length, stride in UPSAMPLES:
            for variant in (*basic, *gemms):
                make = lambda a=(rows, width, length, stride, variant): _upsample(*a)  # noqa: E731
                flops, moved = 2 * rows * width**2 * length * stride, rows * width * length * (4 + 2 * stride)
                floor = max(flops / 6.0e8, (moved + 2 * width**2 * stride) / 3e6)
                found.append(Case("upsample", f"{rows} x {width} x {length}", variant.name, make, floor, calls=8))
    for rows in PREDICTED_US:
        found += _decoder_cases(rows)
    return found
