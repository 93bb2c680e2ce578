"""Weights of linear layers that are held as codes: weight = (code - zero) * scale.

Published checkpoints (models.checkpoints.quantized) and `--quantization fp8` differ in the codes (e4m3, 8 or 4 bits),
in how many inputs share a scale, and in whether there are zeros. An output's inputs [K] are in G groups of K / G.

In memory, the inputs of every 128 are interleaved: j and j + 64 for codes of 8 bits; j, j + 32, j + 64 and j + 96 for
those of 4. A kernel reads them as one 16-bit unit, as it reads a bfloat16, and gets two or four tiles of weights from
one tile of units, each of consecutive inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from models.interfaces.errors import CheckpointError
from models.layers.kernels.gemm_tables import SM_90_E4M3_COPIES

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
GROUP = 128
"""Number of inputs whose parts are interleaved."""
COLUMNS = 64
"""Kernels take numbers of outputs that are multiples of this; other weights would be dequantised to 16 bits in each
step."""
MOST_STREAMED = 512
"""Rows of activations that a weight meets as codes, except e4m3 with a scale for each output; for more rows a GPU
dequantises it once."""
_ROWS_AT_A_TIME = 4096

CodeType = Literal["e4m3", "u8", "u4"]
PARTS = {"e4m3": 2, "u8": 2, "u4": 4}
"""Codes in a unit of 16 bits."""
_MIDDLE = {"e4m3": 0, "u8": 128, "u4": 8}
"""The zero of codes without stored zeros."""


@dataclass(frozen=True)
class Scheme:
    """How a weight is held. group: inputs that share a scale, 0: all. scale: its dtype. zeros: whether there are any.
    ordered: inputs are sorted by group (GPTQ's desc_act), so that those of x must be, too."""

    codes: CodeType = "e4m3"
    group: int = 0
    scale: torch.dtype = torch.float32
    zeros: bool = False
    ordered: bool = False

    def fits(self, outputs: int, inputs: int) -> bool:
        """Whether kernels read a weight [outputs, inputs] that is held so."""
        group = self.group or inputs
        whole = group % GROUP == 0 or (GROUP % group == 0 and group % (GROUP // PARTS[self.codes]) == 0)
        return outputs % COLUMNS == 0 and inputs % GROUP == 0 and inputs % group == 0 and whole


@dataclass(frozen=True, eq=False)
class Codes:
    """A weight as checkpoints mean it: W[n, k] = (values[n, k] - zeros[n // r, g]) * scale[n // r, g], where (r, c) is
    the block and g is k // c, or groups[k].

    values uint8 or e4m3 [..., N, K]; scale [..., ceil(N / r), ceil(K / c)]; zeros uint8 like scale, None: the middle;
    groups int64 [K] or None.
    """

    values: Tensor
    scale: Tensor
    block: tuple[int, int]
    bits: int = 8
    zeros: Tensor | None = None
    groups: Tensor | None = None

    @property
    def code_type(self) -> CodeType:
        return "e4m3" if self.values.dtype == E4M3 else "u8" if self.bits == 8 else "u4"

    @property
    def mT(self) -> Codes:
        """Inputs first; without groups and zeros."""
        return Codes(self.values.mT, self.scale.mT, self.block[::-1], self.bits)

    def by_output(self) -> tuple[Tensor, Tensor | None]:
        """Scale and zeros [..., N, G]."""
        return self._rows(self.scale), None if self.zeros is None else self._rows(self.zeros)

    def _rows(self, of_blocks: Tensor) -> Tensor:
        rows = self.values.shape[-2]
        return of_blocks if self.block[0] == 1 else of_blocks.repeat_interleave(self.block[0], -2)[..., :rows, :]

    def dequantised(self) -> Tensor:
        """float32 [..., N, K]: rounded once where a factor is float32, else exact."""
        inputs = self.values.shape[-1]
        groups = self.groups
        if groups is None:
            groups = torch.arange(inputs, device=self.values.device) // self.block[1]
        scale, zeros = self.by_output()
        values = widened(self.values) if self.code_type == "e4m3" else self.values
        zero = _MIDDLE[self.code_type] if zeros is None else zeros[..., groups].float()
        return (values.float() - zero) * scale.float()[..., groups]


class QuantizedRows(NamedTuple):
    """Rows of a QuantizedWeight, which are filled together."""

    codes: CodeType
    values: Tensor
    scale: Tensor
    zeros: Tensor | None

    @property
    def inputs(self) -> int:
        return self.values.shape[-1] * (4 if self.codes == "u4" else 1)

    def at(self, index: int | slice) -> QuantizedRows:
        """An item of the first axis, or a slice of it."""
        zeros = None if self.zeros is None else self.zeros[index]
        return QuantizedRows(self.codes, self.values[index], self.scale[index], zeros)

    def fill(self, made: Codes) -> None:
        """Takes the codes of a checkpoint, on their device."""
        values = made.values
        if made.groups is not None:
            values = values[..., made.groups.argsort(stable=True)]
        self.values.copy_(packed(values) if self.codes == "u4" else interleaved(values))
        scale, zeros = made.by_output()
        self.scale.copy_(scale)
        if self.zeros is not None and zeros is not None:
            self.zeros.copy_(zeros)

    def quantise(self, weight: Tensor, name: str) -> None:
        """Takes `quantise` of a weight [N, K], on their device, a few thousand rows at a time. CheckpointError names a
        weight that is not finite."""
        for first in range(0, weight.shape[0], _ROWS_AT_A_TIME):
            rows = slice(first, first + _ROWS_AT_A_TIME)
            made, factors = quantise(weight[rows].to(self.values.device))
            if not factors.isfinite().all():
                raise CheckpointError(f"{name}: values that are not finite cannot be quantised to e4m3")
            self.values[rows].copy_(interleaved(made))
            self.scale[rows].copy_(factors[:, None])

    def draw(self, generator: torch.Generator) -> None:
        """Random values of about N(0, 1 / fan_in)."""
        if self.codes == "e4m3":
            drawn = torch.empty(self.values.shape, dtype=torch.bfloat16, device=self.values.device)
            self.quantise(drawn.normal_(0.0, self.inputs**-0.5, generator=generator), "random")
            return
        self.values.view(torch.uint8).random_(0, 256, generator=generator)
        self.scale.fill_(self.inputs**-0.5 * 12**0.5 / (16 if self.codes == "u4" else 256))
        if self.zeros is not None:
            self.zeros.fill_(_MIDDLE[self.codes])


class QuantizedWeight(nn.Module):
    """Replaces a weight [..., N, K]: values interleaved, e4m3 or uint8 [..., N, K] or units of four codes int16
    [..., N, K / 4]; scale and, if the format has them, zeros uint8 [..., N, G]; order int64 [K] of the inputs."""

    def __init__(self, *shape: int, scheme: Scheme | None = None) -> None:
        super().__init__()
        self.scheme = scheme = scheme or Scheme()
        *leading, inputs = shape
        groups = inputs // (scheme.group or inputs)
        width, dtype = (inputs // 4, torch.int16) if scheme.codes == "u4" else (inputs, torch.uint8)

        def made(columns: int, kind: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(*leading, columns, dtype=kind), requires_grad=False)

        self.shape = torch.Size(shape)
        self.values = made(width, E4M3 if scheme.codes == "e4m3" else dtype)
        self.scale = made(groups, scheme.scale)
        self.zeros = made(groups, torch.uint8) if scheme.zeros else None
        self.order = (
            nn.Parameter(torch.empty(inputs, dtype=torch.int64), requires_grad=False) if scheme.ordered else None
        )
        self.copy: nn.Parameter | None = None
        """The same weight in 16 bits, for `copy_from` rows of activations and more."""
        self.copy_from = 0

    @property
    def rows(self) -> QuantizedRows:
        return QuantizedRows(self.scheme.codes, self.values, self.scale, self.zeros)

    @property
    def per_output(self) -> bool:
        """e4m3 whose sums are multiplied by one scale for each output."""
        return self.scheme.codes == "e4m3" and self.scale.shape[-1] == 1

    def numel(self) -> int:
        return self.shape.numel()

    def dequantised(self, dtype: torch.dtype, rows: int = 0) -> Tensor:
        """[..., N, K] in `dtype`, rounded once. rows: of activations that it is multiplied by."""
        if self.values.is_meta and rows > MOST_STREAMED and not self.per_output:
            return self.values.new_empty(self.shape, dtype=dtype)
        return self._dequantised(self.rows, dtype)

    def _dequantised(self, rows: QuantizedRows, dtype: torch.dtype) -> Tensor:
        if rows.values.is_meta:
            # A GPU's kernels make no such copy, so a dry run must count none.
            return rows.values.new_empty((1,), dtype=dtype).expand(*rows.values.shape[:-1], rows.inputs)
        wide = torch.promote_types(dtype, torch.float32)
        if self.scheme.codes == "e4m3":
            values = widened(ordered(rows.values)).to(wide)
        else:
            values = (unpacked(rows.values) if self.scheme.codes == "u4" else ordered(rows.values)).to(wide)
            zeros = _MIDDLE[self.scheme.codes] if rows.zeros is None else rows.zeros.to(wide)[..., None]
            values = (values.unflatten(-1, (rows.scale.shape[-1], -1)) - zeros).flatten(-2)
        scaled = (values.unflatten(-1, (rows.scale.shape[-1], -1)) * rows.scale.to(wide)[..., None]).flatten(-2)
        made = scaled.to(dtype)
        return made if self.order is None else made[..., self.order.argsort()]

    def matrices(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """`dequantised` of a stack [E, N, K], one [N, K] at a time."""
        return (self._dequantised(self.rows.at(index), dtype) for index in range(self.shape[0]))


Weight = Tensor | QuantizedWeight
"""The weight of a linear layer."""


def kernels_take(weight: Weight) -> bool:
    """Whether kernels read this weight: the halves of its inputs are interleaved. Another one is dequantised in each
    step, which is for kernels of torch: ours may read a weight before what stands ahead of them has written it."""
    return not isinstance(weight, QuantizedWeight) or weight.shape[-1] % GROUP == 0


def for_rows(weight: Weight, rows: int) -> Weight:
    """What a GEMM of so many rows reads of a weight: the copy in 16 bits where one is kept for them."""
    if isinstance(weight, QuantizedWeight) and weight.copy is not None and rows >= weight.copy_from:
        return weight.copy
    return weight


class QuantizedLinear(nn.Module):
    """Replaces an nn.Linear, or another QuantizedLinear, of the same sizes."""

    def __init__(self, layer: nn.Linear | QuantizedLinear, scheme: Scheme | None = None) -> None:
        super().__init__()
        self.in_features: int = layer.in_features
        self.out_features: int = layer.out_features
        self.weight = QuantizedWeight(self.out_features, self.in_features, scheme=scheme)
        self.bias: Tensor | None = layer.bias


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., N, K] -> values e4m3 like it and factors float32 [..., N]; a row of zeros has factor 0. Infinities and NaN
    become NaN factors, which the caller must check for.

    factor = largest magnitude of the row / 448, value = nearest e4m3 of weight / factor, ties to even. The error of a
    value is at most 1/16 of itself, or half of e4m3's smallest step, 2^-10, times the factor."""
    wide = weight.float()
    largest = wide.abs().amax(-1)
    # The factor of a tiny row would be subnormal, and its inverse infinite. Such a row is rounded to 0.
    scale = torch.where(largest < LARGEST * torch.finfo(torch.float32).tiny, 0.0, largest / LARGEST)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    values = wide / torch.where(scale == 0.0, 1.0, scale)[..., None]
    values = torch.where(scale[..., None] == 0.0, 0.0, values).clamp(-LARGEST, LARGEST)
    return values.to(E4M3), scale


def interleaved(values: Tensor) -> Tensor:
    """[..., K] of 8 bits in the order of the memory. Unchanged if K is not a multiple of GROUP."""
    if values.shape[-1] % GROUP:
        return values
    return values.unflatten(-1, (-1, 2, GROUP // 2)).mT.reshape(values.shape)


def ordered(values: Tensor) -> Tensor:
    """The inverse of interleaved."""
    if values.shape[-1] % GROUP:
        return values
    return values.unflatten(-1, (-1, GROUP // 2, 2)).mT.reshape(values.shape)


def packed(values: Tensor) -> Tensor:
    """Codes of 4 bits uint8 [..., K] -> units int16 [..., K / 4]: part p of every GROUP in bits 4 p."""
    parts = values.unflatten(-1, (-1, 4, GROUP // 4))
    low, high = parts[..., 0, :] | parts[..., 1, :] << 4, parts[..., 2, :] | parts[..., 3, :] << 4
    return torch.stack((low, high), -1).flatten(-3).view(torch.int16)


def unpacked(units: Tensor) -> Tensor:
    """The inverse of packed."""
    low, high = units.contiguous().view(torch.uint8).unflatten(-1, (-1, GROUP // 4, 2)).unbind(-1)
    return torch.stack((low & 15, low >> 4, high & 15, high >> 4), -2).flatten(-3)


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
    """Replaces the linear layers of a module on the meta device by QuantizedLinear, except for those that their owner
    names in `sixteen_bit_layers`."""
    children = [(owner, name, child) for owner in module.modules() for name, child in owner.named_children()]
    for owner, name, child in children:
        if isinstance(child, nn.Linear) and name not in getattr(owner, "sixteen_bit_layers", ()):
            setattr(owner, name, QuantizedLinear(child))


def keep_copies(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Gives the linear layers in e4m3 that the table of this GPU names a copy of their weight in `dtype`, dequantised.
    On the meta device, too, since it may stand for any GPU."""
    if device.type == "cpu" or (device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0)):
        return
    for layer in module.modules():
        if not isinstance(layer, QuantizedLinear) or not layer.weight.per_output:
            continue
        weight = layer.weight
        least = SM_90_E4M3_COPIES.get((layer.in_features, layer.out_features))
        if least is not None:
            made = torch.empty(weight.shape, device=device, dtype=dtype)
            weight.copy = nn.Parameter(made if made.is_meta else weight.dequantised(dtype), requires_grad=False)
            weight.copy_from = least
