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


ROUTES: Mapping[Shape, tuple[Choice, ...]] = {
    Shape("plain", 1024, 2560): (
        Choice(129, 176, Variant(Tile(64, 64, 128, 4, 4, tma=True))),
        Choice(177, 352, Variant(Tile(128, 128, 64, 8, 4, tma=True))),
        Choice(353, 704, Variant(Tile(128, 128, 64, 8, 4))),
        Choice(705, 1408, Variant(Tile(128, 256, 64, 8, 3, tma=True))),
    ),
    Shape("add_norm", 2048, 1024): (
        Choice(129, 176, Variant(Tile(64, 64, 128, 4, 4, tma=True), split=2)),
        Choice(177, 352, Variant(Tile(64, 64, 128, 4, 4, tma=True), deferred=True)),
        Choice(353, 704, Variant(Tile(128, 128, 64, 8, 4), split=2)),
    ),
    Shape("add_norm", 4096, 1024): (
        Choice(129, 176, Variant(Tile(64, 64, 128, 4, 4, tma=True), split=2)),
        Choice(177, 352, Variant(Tile(128, 128, 64, 8, 4), split=4)),
        Choice(353, 704, Variant(Tile(128, 128, 64, 8, 4, tma=True), split=2)),
    ),
    Shape("silu_mul", 1024, 4096): (
        Choice(177, 352, Variant(Tile(128, 128, 64, 8, 3, tma=True))),
        Choice(705, 1408, Variant(Tile(128, 128, 64, 8, 4, tma=True))),
    ),
    Shape("plain", 2048, 2560): (
        Choice(2, 8, Variant(Tile(16, 64, 128, 4, 6, swap=True))),
        Choice(9, 16, Variant(Tile(16, 64, 128, 4, 6, swap=True))),
        Choice(17, 32, Variant(Tile(32, 64, 128, 4, 6, swap=True))),
        Choice(33, 64, Variant(Tile(64, 32, 128, 4, 6, tma=True))),
        Choice(65, 128, Variant(Tile(64, 64, 128, 4, 4, tma=True))),
    ),
    Shape("add_norm", 2048, 2048): (
        Choice(2, 8, Variant(Tile(16, 64, 128, 4, 6, swap=True), split=4)),
        Choice(9, 16, Variant(Tile(16, 64, 128, 4, 6, swap=True), deferred=True)),
        Choice(17, 32, Variant(Tile(32, 32, 128, 4, 6), split=2)),
        Choice(65, 128, Variant(Tile(64, 64, 128, 4, 4, tma=True), split=2)),
    ),
    Shape("silu_mul", 2048, 6144): (
        Choice(2, 8, Variant(Tile(16, 128, 64, 4, 4, swap=True))),
        Choice(9, 16, Variant(Tile(16, 64, 128, 4, 3, swap=True, tma=True))),
        Choice(17, 32, Variant(Tile(32, 64, 128, 4, 3, swap=True))),
        Choice(33, 64, Variant(Tile(64, 64, 128, 4, 3, swap=True, tma=True))),
        Choice(65, 128, Variant(Tile(128, 64, 64, 8, 4, tma=True))),
        Choice(129, 256, Variant(Tile(128, 128, 64, 8, 4, tma=True))),
    ),
    Shape("add_norm", 6144, 2048): (
        Choice(2, 8, Variant(Tile(16, 64, 128, 4, 4, swap=True), split=4)),
        Choice(9, 16, Variant(Tile(16, 64, 128, 4, 4, swap=True), split=4)),
        Choice(17, 32, Variant(Tile(32, 64, 128, 4, 4, swap=True), split=4)),
        Choice(33, 64, Variant(Tile(64, 32, 128, 4, 6, tma=True), split=2)),
        Choice(65, 128, Variant(Tile(64, 64, 128, 4, 4, tma=True), split=2)),
    ),
    Shape("plain", 1536, 2048): (
        Choice(2, 8, Variant(Tile(16, 64, 128, 4, 6, swap=True))),
        Choice(9, 16, Variant(Tile(16, 64, 128, 4, 6, swap=True))),
        Choice(17, 32, Variant(Tile(32, 64, 128, 4, 6, swap=True))),
        Choice(33, 64, Variant(Tile(64, 16, 256, 4, 4, tma=True))),
        Choice(65, 128, Variant(Tile(64, 64, 128, 4, 4, tma=True))),
    ),
    Shape("add_norm", 1536, 1536): (
        Choice(2, 8, Variant(Tile(16, 64, 128, 4, 6, swap=True), deferred=True)),
        Choice(9, 16, Variant(Tile(16, 64, 128, 4, 6, swap=True), deferred=True)),
        Choice(17, 32, Variant(Tile(32, 64, 128, 4, 6, swap=True), deferred=True)),
        Choice(33, 64, Variant(Tile(64, 16, 256, 4, 4, tma=True), split=2)),
        Choice(65, 128, Variant(Tile(64, 64, 128, 4, 4, tma=True), deferred=True)),
    ),
    Shape("silu_mul", 1536, 8960): (
        Choice(2, 8, Variant(Tile(16, 32, 128, 4, 4))),
        Choice(9, 16, Variant(Tile(16, 32, 128, 4, 4))),
        Choice(17, 32, Variant(Tile(32, 32, 128, 4, 4, tma=True))),
        Choice(33, 64, Variant(Tile(64, 32, 128, 4, 4, tma=True))),
        Choice(65, 128, Variant(Tile(128, 128, 64, 8, 4))),
        Choice(257, 512, Variant(Tile(128, 128, 64, 8, 4, tma=True))),
    ),
    Shape("add_norm", 8960, 1536): (
        Choice(2, 8, Variant(Tile(16, 64, 128, 4, 6, swap=True), split=5)),
        Choice(9, 16, Variant(Tile(16, 64, 128, 4, 6, swap=True), split=5)),
        Choice(33, 64, Variant(Tile(64, 32, 128, 4, 6, tma=True), split=2)),
        Choice(65, 128, Variant(Tile(128, 64, 64, 4, 4, tma=True), split=5)),
    ),
    Shape("quick_gelu", 1280, 5120): (Choice(1025, 4096, Variant(Tile(128, 256, 64, 8, 3, tma=True))),),
}


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
