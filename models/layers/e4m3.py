"""Weights in e4m3, 8 bits each, with one scale factor for each output channel of the linear layer.

Weights of any dtype are quantised as they are loaded: factor = largest magnitude of the row / 448, value = nearest e4m3
of weight / factor, ties to even. The error of a value is at most 1/16 of itself, or half of e4m3's smallest step,
2^-10, times the factor.

In memory, inputs j and j + 64 of every 128 lie side by side. A kernel reads both as one 16-bit unit, as it reads a
bfloat16, and gets two tiles of weights from one tile of units, each of consecutive inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.interfaces.errors import CheckpointError
from models.layers.kernels.gemm_tables import SM_90_E4M3_COPIES

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
GROUP = 128
"""Number of inputs whose two halves are interleaved."""
COLUMNS = 64
"""Kernels take numbers of outputs that are multiples of this; other weights would be dequantised to 16 bits in each
step."""
_ROWS_AT_A_TIME = 4096


class E4M3Weight(nn.Module):
    """Replaces a weight: values e4m3 [..., N, K], interleaved, times scale float32 [..., N]."""

    float32_parameters = frozenset({"scale"})

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.empty(shape, dtype=E4M3), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(shape[:-1], dtype=torch.float32), requires_grad=False)
        self.copy: nn.Parameter | None = None
        """The same weight in 16 bits, for `copy_from` rows of activations and more."""
        self.copy_from = 0

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def numel(self) -> int:
        return self.values.numel()

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """[..., N, K] in `dtype`, rounded once."""
        if self.values.is_meta:
            # A GPU's kernels make no such copy, so a dry run must count none.
            return self.values.new_empty((1,), dtype=dtype).expand(self.shape)
        wide = torch.promote_types(dtype, torch.float32)
        return (widened(ordered(self.values)).to(wide) * self.scale[..., None]).to(dtype)


Weight = Tensor | E4M3Weight
"""The weight of a linear layer."""


def kernels_take(weight: Weight) -> bool:
    """Whether kernels read this weight: the halves of its inputs are interleaved. Another one is dequantised in each
    step, which is for kernels of torch: ours may read a weight before what stands ahead of them has written it."""
    return not isinstance(weight, E4M3Weight) or weight.shape[-1] % GROUP == 0


def for_rows(weight: Weight, rows: int) -> Weight:
    """What a GEMM of so many rows reads of a weight: the copy in 16 bits where one is kept for them."""
    if isinstance(weight, E4M3Weight) and weight.copy is not None and rows >= weight.copy_from:
        return weight.copy
    return weight


class E4M3Linear(nn.Module):
    """Replaces an nn.Linear of the same sizes."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = E4M3Weight(layer.out_features, layer.in_features)
        self.bias = layer.bias


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., N, K] -> values e4m3 like it and factors float32 [..., N]; a row of zeros has factor 0. Infinities and NaN
    become NaN factors, which the caller must check for."""
    wide = weight.float()
    largest = wide.abs().amax(-1)
    # The factor of a tiny row would be subnormal, and its inverse infinite. Such a row is rounded to 0.
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
    """[..., K] in the order of the memory. Unchanged if K is not a multiple of GROUP."""
    if values.shape[-1] % GROUP:
        return values
    return values.unflatten(-1, (-1, 2, GROUP // 2)).mT.reshape(values.shape)


def ordered(values: Tensor) -> Tensor:
    """The inverse of interleaved."""
    if values.shape[-1] % GROUP:
        return values
    return values.unflatten(-1, (-1, GROUP // 2, 2)).mT.reshape(values.shape)


def widened(values: Tensor) -> Tensor:
    """e4m3 -> float16, which can hold every e4m3 value. Done by bits, since torch's own conversion takes seven times
    longer on a CPU."""
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
    """Replaces the linear layers of a module on the meta device by E4M3Linear, except for those that their owner names
    in `sixteen_bit_layers`."""
    children = [(owner, name, child) for owner in module.modules() for name, child in owner.named_children()]
    for owner, name, child in children:
        if isinstance(child, nn.Linear) and name not in getattr(owner, "sixteen_bit_layers", ()):
            setattr(owner, name, E4M3Linear(child))


def keep_copies(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Gives the linear layers that the table of this GPU names a copy of their weight in `dtype`, dequantised. On
    the meta device, too, since it may stand for any GPU."""
    if device.type == "cpu" or (device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0)):
        return
    for layer in module.modules():
        if not isinstance(layer, E4M3Linear):
            continue
        weight = layer.weight
        least = SM_90_E4M3_COPIES.get((layer.in_features, layer.out_features))
        if least is not None:
            made = torch.empty(weight.shape, device=device, dtype=dtype)
            weight.copy = nn.Parameter(made if made.is_meta else weight.dequantised(dtype), requires_grad=False)
            weight.copy_from = least
