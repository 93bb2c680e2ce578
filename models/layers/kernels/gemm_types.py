"""What a table of GEMM configurations is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["plain", "silu_mul", "quick_gelu", "add_norm"]
"""What follows the GEMM: nothing but a bias; SiLU of one half times the other; bias and GELU; residual and norm."""


@dataclass(frozen=True)
class Tile:
    """One thread block's part of a GEMM: rows x columns of the output, `depth` inputs at a time, `stages` of them in
    flight.

    swap: the weight is the tensor cores' first operand, so that its columns fill their 64 rows instead of few rows of
    x. tma: TMA descriptors bring the operands, from compute capability 9.0 on.
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
    """A tile, and for "add_norm" how the norm is made: by the kernel that adds `split` split-K partitions, or
    (`deferred`) by the next GEMM, which scales its rows. eight_bit: a weight in e4m3 meets activations in e4m3."""

    tile: Tile
    split: int = 1
    deferred: bool = False
    eight_bit: bool = False

    def __str__(self) -> str:
        split = f" split {self.split}" if self.split > 1 else ""
        return f"{self.tile}{split}{' deferred' * self.deferred}{' eight bits' * self.eight_bit}"


class Blocks(NamedTuple):
    """What one program of a GEMV reads at a time: of so many outputs so many weights, or units of two in e4m3."""

    outputs: int
    depth: int
    warps: int = 4


@dataclass(frozen=True)
class Shape:
    """outputs: those of the result, half the weight's rows for "silu_mul". e4m3: the weight's dtype, else 16 bits.
    codes: those of a weight with scales of 128 inputs or more."""

    kind: Kind
    inputs: int
    outputs: int
    e4m3: bool = False
    codes: str = ""


@dataclass(frozen=True)
class Choice:
    """The variant for `least` to `most` rows."""

    least: int
    most: int
    variant: Variant


Table = Mapping[Shape, tuple[Choice, ...]]
