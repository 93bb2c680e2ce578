"""Which kernel makes a product: measured choices by shape.

A product that is not in the table goes by the rules of models.layers.fused: one vector by a kernel of its own, few rows
streamed, more by cuBLAS with kernels around it.

`python -m benchmarks.kernels.choose` writes the table from the results of `python -m benchmarks.kernels products`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["plain", "silu_mul", "quick_gelu", "add_norm"]
"""What follows the product: nothing but a bias; SiLU of one half times the other; bias and GELU; residual and norm."""


@dataclass(frozen=True)
class Tile:
    """One program's part of a product: rows x columns of the output, `depth` inputs at a time, `stages` of them in
    flight.

    swap: the weight is the tensor cores' first operand, so that its columns fill their 64 rows instead of few rows of
    x. tma: the copy engine brings the operands.
    """

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 4
    swap: bool = False
    tma: bool = False

    def __str__(self) -> str:
        extras = " swap" * self.swap + " tma" * self.tma
        return f"{self.rows}x{self.columns}x{self.depth}w{self.warps}s{self.stages}{extras}"


@dataclass(frozen=True)
class Variant:
    """A tile, and for "add_norm" how the norm is made: by the kernel that adds `split` shares of the inputs, or
    (`deferred`) by the next product, which scales its rows."""

    tile: Tile
    split: int = 1
    deferred: bool = False

    def __str__(self) -> str:
        return f"{self.tile}{f' split {self.split}' if self.split > 1 else ''}{' deferred' if self.deferred else ''}"


@dataclass(frozen=True)
class Shape:
    """outputs: those of the result, half the weight's rows for "silu_mul"."""

    kind: Kind
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Choice:
    """For `least` to `most` rows."""

    least: int
    most: int
    variant: Variant


ROUTES: Mapping[Shape, tuple[Choice, ...]] = {}


def route(kind: Kind, x: Tensor, weight: Tensor) -> Variant | None:
    """The measured choice for x [..., K] times weight [N, K], None where the rules hold."""
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype or weight.stride(1) != 1:
        return None
    outputs = weight.shape[0] // (2 if kind == "silu_mul" else 1)
    rows = x.numel() // x.shape[-1]
    for choice in ROUTES.get(Shape(kind, weight.shape[1], outputs), ()):
        if choice.least <= rows <= choice.most:
            return choice.variant
    return None
