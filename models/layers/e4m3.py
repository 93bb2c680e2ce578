"""Weights in e4m3, 8 bits each, with one factor for each output (channel) of their linear layer.

A weight is made at load, from any dtype: factor = largest magnitude of its row / 448, value = nearest e4m3 of weight /
factor, ties to even. A value is off by 1/16 of itself, or by half of e4m3's least step, 2^-10, times the factor.

In memory, inputs j and j + 64 of every 128 lie side by side. A kernel reads both as one 16-bit unit, as it reads a
bfloat16, and has of a tile of units two tiles of weights, each of consecutive inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.errors import CheckpointError

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
GROUP = 128
"""Inputs whose halves are interleaved."""
COLUMNS = 64
"""Outputs of which kernels take whole multiples; others would be multiplied out in each step."""
_ROWS_AT_A_TIME = 4096


class E4M3Weight(nn.Module):
    """values e4m3 [..., N, K], interleaved, times scale float32 [..., N]: what stands in a weight's place."""

    float32_parameters = frozenset({"scale"})

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.empty(shape, dtype=E4M3), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(shape[:-1], dtype=torch.float32), requires_grad=False)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def numel(self) -> int:
        return self.values.numel()

    def multiplied_out(self, dtype: torch.dtype) -> Tensor:
        """[..., N, K] in `dtype`, rounded once."""
        wide = torch.promote_types(dtype, torch.float32)
        return (widened(ordered(self.values)).to(wide) * self.scale[..., None]).to(dtype)


Weight = Tensor | E4M3Weight
"""What a linear layer multiplies by."""


class E4M3Linear(nn.Module):
    """Stands in the place of an nn.Linear of the same sizes."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = E4M3Weight(layer.out_features, layer.in_features)
        self.bias = layer.bias


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., N, K] -> values e4m3 like it and factors float32 [..., N]; a row of zeros has factor 0. Infinities and NaN
    become NaN factors: the caller looks."""
    wide = weight.float()
    largest = wide.abs().amax(-1)
    # A tiny row's factor would be subnormal, and its inverse infinite: its values are no more than rounding to 0.
    scale = torch.where(largest < LARGEST * torch.finfo(torch.float32).tiny, 0.0, largest / LARGEST)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    values = wide / torch.where(scale == 0.0, 1.0, scale)[..., None]
    values = torch.where(scale[..., None] == 0.0, 0.0, values).clamp(-LARGEST, LARGEST)
    return values.to(E4M3), scale


def fill_rows(weight: Tensor, values: Tensor, scale: Tensor, name: str) -> None:
    """quantise(weight) [N, K] into values, interleaved, and scale, on their device, a few thousand rows at a time.
    CheckpointError names a weight that is not finite."""
    for first in range(0, weight.shape[0], _ROWS_AT_A_TIME):
        rows = slice(first, first + _ROWS_AT_A_TIME)
        made, factors = quantise(weight[rows].to(values.device))
        if not factors.isfinite().all():
            raise CheckpointError(f"{name}: values that are not finite cannot be quantised to e4m3")
        values[rows].copy_(interleaved(made))
        scale[rows].copy_(factors)


def interleaved(values: Tensor) -> Tensor:
    """[..., K] as it lies in memory; K that is no multiple of GROUP stays as it is."""
    if values.shape[-1] % GROUP:
        return values
    return values.unflatten(-1, (-1, 2, GROUP // 2)).mT.reshape(values.shape)


def ordered(values: Tensor) -> Tensor:
    """The inverse of interleaved."""
    if values.shape[-1] % GROUP:
        return values
    return values.unflatten(-1, (-1, GROUP // 2, 2)).mT.reshape(values.shape)


def widened(values: Tensor) -> Tensor:
    """e4m3 -> float16, which holds every value of it. By bits: torch itself takes seven times longer on a CPU."""
    if not values.is_cpu:
        return values.to(torch.float16)
    bits = values.contiguous().view(torch.int8).to(torch.int16)
    # Exponents of e4m3 are biased by 7 and those of float16 by 15.
    return ((bits << 7) & 0x3FFF | bits & -0x8000).view(torch.float16) * 256.0


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Activations [..., K], row by row: values e4m3, interleaved as weights are, and factors float32 [...]."""
    values, scale = quantise(x)
    return interleaved(values), scale


def hold_in_e4m3(module: nn.Module) -> None:
    """The linear layers of a module without memory give their place to e4m3, but for those that their owner names in
    `sixteen_bit_layers`."""
    children = [(owner, name, child) for owner in module.modules() for name, child in owner.named_children()]
    for owner, name, child in children:
        if isinstance(child, nn.Linear) and name not in getattr(owner, "sixteen_bit_layers", ()):
            setattr(owner, name, E4M3Linear(child))
