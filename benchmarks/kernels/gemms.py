"""The GEMMs of VoxCPM2's local decoder, of two language models in decode steps and prefills, and of Qwen2-VL's
encoder: every variant, against the rules without a table (cuBLAS or streamed weights and
kernels around them)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from benchmarks.kernels.timing import Case, Run, WrongResult
from models.layers.fused import silu_mul
from models.layers.kernels import gemm, gemm_configs, tiled_gemm
from models.layers.kernels.gemm_configs import fitted_for
from models.layers.kernels.gemm_types import Kind, Shape, Tile, Variant
from models.layers.kernels.gpu import INTERPRETER as H100
from models.layers.norms import DeferredNorm, Normed, rms_norm
from models.layers.quantized import QuantizedWeight, Weight

EPS = 1e-5
MAX_ERROR = 8e-3
"""Allowed error relative to the result's norm: that of rounding to bfloat16, with a margin."""
MAX_EIGHT_BIT_ERROR = 5e-2
"""The same for activations that are rounded to e4m3."""
_BEYOND_L2 = 200e6
"""Bytes of weights that are used in turn, so that each is read from memory."""


@dataclass(frozen=True)
class Part:
    """One GEMM of a layer; outputs as in gemm_configs.Shape."""

    name: str
    kind: Kind
    inputs: int
    outputs: int

    @property
    def shape(self) -> Shape:
        return Shape(self.kind, self.inputs, self.outputs)


@dataclass(frozen=True)
class Stack:
    """least: the smallest number of rows that has a choice. Each number of `rows` is measured for all numbers down to
    the previous one; with `most`, for all from the corresponding number of `most` down to the previous one."""

    name: str
    parts: tuple[Part, ...]
    least: int
    rows: tuple[int, ...]
    most: tuple[int, ...] = ()

    def span(self, rows: int) -> tuple[int, int]:
        """The fewest and the most rows that a choice measured at `rows` is for."""
        most = self.most or self.rows
        index = self.rows.index(rows)
        return most[index - 1] + 1 if index else self.least, most[index]


def layer(hidden_size: int, intermediate_size: int, heads: int, kv_heads: int) -> tuple[Part, ...]:
    return (
        Part("qkv", "plain", hidden_size, (heads + 2 * kv_heads) * 128),
        Part("out", "add_norm", heads * 128, hidden_size),
        Part("gate_up", "silu_mul", hidden_size, intermediate_size),
        Part("down", "add_norm", intermediate_size, hidden_size),
    )


PREFILLS, POWERS_OF_TWO = (128, 256, 448), (128, 256, 512)
"""A prefill has any number of rows: choices change where a warm-up of powers of two meets them."""
STACKS = (
    Stack("locdit", layer(1024, 4096, 16, 2), 129, (176, 352, 704, 1408)),
    Stack("voxcpm2 lm", layer(2048, 6144, 16, 2), 2, (8, 16, 32, 64)),
    Stack("qwen2b", layer(1536, 8960, 12, 2), 2, (8, 16, 32, 64)),
    Stack("voxcpm2 lm prefill", layer(2048, 6144, 16, 2), 65, PREFILLS, POWERS_OF_TWO),
    Stack("qwen2b prefill", layer(1536, 8960, 12, 2), 65, PREFILLS, POWERS_OF_TWO),
    Stack("qwen2 encoder", (Part("fc1", "quick_gelu", 1280, 5120),), 129, (256, 1024, 4096)),
)


_MOST_SPLIT_PROGRAMS = 400
"""Thread blocks beyond which inputs are not split further: they fill any GPU."""
_MANY_ROWS = (
    Tile(128, 256, 64, warps=8, stages=3),
    Tile(128, 128, 64, warps=8, stages=4),
    Tile(128, 64, 64, warps=4, stages=4),
    Tile(64, 128, 64, warps=4, stages=4),
    Tile(64, 64, 128, warps=4, stages=4),
    Tile(64, 32, 128, warps=4, stages=4),
)
_MANY_ROWS_GATED = (
    Tile(128, 128, 64, warps=8, stages=3),
    Tile(128, 128, 64, warps=8, stages=4),
    Tile(256, 64, 64, warps=8, stages=4),
    Tile(128, 64, 64, warps=8, stages=4),
    Tile(64, 128, 64, warps=8, stages=3),
    Tile(64, 64, 64, warps=4, stages=4),
    Tile(64, 32, 128, warps=4, stages=3),
)


def _few_rows(rows: int, gated: bool) -> tuple[Tile, ...]:
    """Tiles of 16 to 64 rows: small enough that two thread blocks and more share an SM."""
    least = max(16, rows)
    if gated:
        return (
            Tile(least, 64, 128, stages=3, swap=True),
            Tile(least, 64, 64, stages=6, swap=True),
            Tile(least, 128, 64, stages=4, swap=True),
            Tile(least, 32, 128, stages=4),
        )
    return (
        Tile(least, 64, 128, stages=4, swap=True),
        Tile(least, 64, 128, stages=6, swap=True),
        Tile(least, 32, 128, stages=6),
        Tile(least, 16, 256, stages=4),
    )


def variants(part: Part, rows: int) -> Iterator[Variant]:
    """Tiles that fit the shape on an H100, with TMA and without; rows from 65 on may be any number, fewer a power of
    two."""
    gated = part.kind == "silu_mul"
    tiles = _few_rows(rows, gated) if rows <= 64 else _MANY_ROWS_GATED if gated else _MANY_ROWS
    found = (fitted_for(replace(tile, tma=tma), H100, gated=gated) for tile in tiles for tma in (False, True))
    for tile in dict.fromkeys(found):
        if not part.outputs % tile.columns and not part.inputs % tile.depth:
            yield from _ways_to_norm(part, rows, tile) if part.kind == "add_norm" else (Variant(tile),)


def _ways_to_norm(part: Part, rows: int, tile: Tile) -> Iterator[Variant]:
    """Deferred, or behind a split GEMM that makes about one thread block an SM."""
    yield Variant(tile, deferred=True)
    programs = -(-rows // tile.rows) * (part.outputs // tile.columns)
    splits = [split for split in range(2, 9) if part.inputs % (split * tile.depth) == 0]
    split = min(splits, key=lambda split: abs(split * programs - H100.num_sms), default=0)
    if split and split * programs <= _MOST_SPLIT_PROGRAMS:
        yield Variant(tile, split=split)


def _in_e4m3(weight: Tensor) -> QuantizedWeight:
    with weight.device:
        made = QuantizedWeight(*weight.shape)
    if not weight.is_meta:
        made.rows.quantise(weight, "a weight")
    return made


class Operands:
    """x [rows, inputs] and weights of a shape in bfloat16, enough of them to leave the L2 cache behind."""

    def __init__(self, shape: Shape, rows: int, device: torch.device) -> None:
        def random(*size: int, scale: float = 1.0) -> Tensor:
            return torch.randn(size, device=device, dtype=torch.bfloat16) * scale

        self.shape = shape
        columns = shape.outputs * (2 if shape.kind == "silu_mul" else 1)
        copies = max(2, min(24, int(_BEYOND_L2 / (columns * shape.inputs * (1 if shape.e4m3 else 2)))))
        self.x = random(rows, shape.inputs)
        made = (random(columns, shape.inputs, scale=shape.inputs**-0.5) for _ in range(copies))
        self.weights: list[Weight] = [_in_e4m3(weight) if shape.e4m3 else weight for weight in made]
        self.bias, self.norm, self.residual = random(columns), random(columns), random(rows, columns)

    def run(self, index: int, variant: Variant | None) -> Tensor | tuple[Normed, Tensor]:
        """Runs it with weight number `index`. None: by the rules for shapes without a table entry."""
        weight = self.weights[index % len(self.weights)]
        return self._by_rule(weight) if variant is None else self._configured(weight, variant)

    def _by_rule(self, weight: Weight) -> Tensor | tuple[Normed, Tensor]:
        match self.shape.kind:
            case "add_norm":
                return gemm.gemm_add_norm(self.x, weight, None, self.residual, self.norm, EPS)
            case "quick_gelu":
                return gemm.gemm(self.x, weight, self.bias, "quick_gelu")
            case "silu_mul":
                return gemm.gemm(self.x, weight, None, "silu_mul")
        return gemm.gemm(self.x, weight, None)

    def _configured(self, weight: Weight, variant: Variant) -> Tensor | tuple[Normed, Tensor]:
        x, tile, after = self.x, variant.tile, (self.residual, self.norm, EPS)
        made = partial(tiled_gemm.tiled_gemm, x, weight, tile=tile, eight_bit=variant.eight_bit)
        match self.shape.kind:
            case "add_norm" if variant.deferred:
                return tiled_gemm.gemm_add_deferred_norm(x, weight, None, *after, tile, eight_bit=variant.eight_bit)
            case "add_norm":
                return tiled_gemm.split_gemm_add_norm(
                    x, weight, None, *after, split=variant.split, tile=tile, eight_bit=variant.eight_bit
                )
            case "quick_gelu":
                return made(bias=self.bias, epilogue="quick_gelu")
            case "silu_mul":
                return made(epilogue="silu_mul")
        return made()

    def check(self, variant: Variant | None) -> None:
        """Raises WrongResult if the result with the first weight differs from the reference in float64."""
        # By the rules, many rows with a weight in e4m3 have 8-bit activations.
        eight_bit = variant.eight_bit if variant is not None else self.shape.e4m3
        made = self.run(0, variant)
        out, expected = made[0] if isinstance(made, tuple) else made, self._expected
        if isinstance(out, DeferredNorm):
            mean = out.squares.sum(1, keepdim=True) / self.shape.outputs
            out = out.rows.double() * torch.rsqrt(mean.double() + EPS)
        assert isinstance(out, Tensor)
        error = float((out.double() - expected).norm() / expected.norm())
        if not error < (MAX_EIGHT_BIT_ERROR if eight_bit else MAX_ERROR):
            raise WrongResult(f"relative error {error:.1e}")

    @cached_property
    def _expected(self) -> Tensor:
        weight = self.weights[0]
        wide = weight.dequantised(torch.float64) if isinstance(weight, QuantizedWeight) else weight.double()
        product = self.x.double() @ wide.T
        match self.shape.kind:
            case "silu_mul":
                return silu_mul.reference(product)
            case "quick_gelu":
                product = product + self.bias.double()
                return product * torch.sigmoid(1.702 * product)
            case "add_norm":
                return rms_norm.reference(product + self.residual.double(), self.norm.double(), EPS)
        return product


def _make(part: Part, rows: int, variant: Variant | None) -> Run:
    operands = Operands(part.shape, rows, torch.device("cuda"))

    def run(index: int) -> object:
        if variant is not None:
            return operands.run(index, variant)
        with gemm_configs.using({}):
            return operands.run(index, None)

    with gemm_configs.using({}):
        operands.check(variant)
    return run


def shape_name(stack: Stack, part: Part, rows: int) -> str:
    return f"{stack.name} {part.name}, {rows} rows"


def cases() -> list[Case]:
    found = []
    for stack in STACKS:
        for part in stack.parts:
            for rows in stack.rows:
                shape = shape_name(stack, part, rows)
                runs = {"rules": None, **{str(variant): variant for variant in variants(part, rows)}}
                for name, variant in runs.items():
                    make = lambda a=(part, rows, variant): _make(*a)  # noqa: E731
                    found.append(Case(part.kind, shape, name, make))
    return found
