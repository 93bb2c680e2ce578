"""The products of VoxCPM2's local decoder, of two language models in decode steps and prefills, and of Qwen2-VL's
encoder: every variant that could win by prediction, against the rules without a table (cuBLAS or streamed weights and
kernels around them)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.kernels.predict import cublas_us, variant_us
from benchmarks.kernels.timing import Case, Run, WrongResult
from models.layers import fused, packed
from models.layers.kernels import linear, routes
from models.layers.kernels.routes import Kind, Tile, Variant

EPS = 1e-5
WORTH = 1.4
"""Variants that are predicted to take more than this many times the least prediction are not measured."""


@dataclass(frozen=True)
class Part:
    """One product of a layer; outputs as in routes.Shape."""

    name: str
    kind: Kind
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Stack:
    """least: the fewest rows that a choice is for. `rows` are measured, each for all down to the one before; or, with
    `most`, each for as many as stand there and all down to the number before."""

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


def layer(width: int, inner: int, heads: int, kv_heads: int) -> tuple[Part, ...]:
    return (
        Part("qkv", "plain", width, (heads + 2 * kv_heads) * 128),
        Part("out", "add_norm", heads * 128, width),
        Part("gate_up", "silu_mul", width, inner),
        Part("down", "add_norm", inner, width),
    )


PREFILLS, OCTAVES = (128, 256, 448), (128, 256, 512)
"""A prefill has any number of rows: choices change where a warm-up of powers of two meets them."""
STACKS = (
    Stack("locdit", layer(1024, 4096, 16, 2), 129, (176, 352, 704, 1408)),
    Stack("voxcpm2 lm", layer(2048, 6144, 16, 2), 2, (8, 16, 32, 64)),
    Stack("qwen2b", layer(1536, 8960, 12, 2), 2, (8, 16, 32, 64)),
    Stack("voxcpm2 lm prefill", layer(2048, 6144, 16, 2), 65, PREFILLS, OCTAVES),
    Stack("qwen2b prefill", layer(1536, 8960, 12, 2), 65, PREFILLS, OCTAVES),
    Stack("qwen2 encoder", (Part("fc1", "quick_gelu", 1280, 5120),), 129, (256, 1024, 4096)),
)

MANY_ROWS = (
    Tile(128, 256, 64, warps=8, stages=3),
    Tile(128, 128, 64, warps=8, stages=4),
    Tile(128, 64, 64, warps=4, stages=4),
    Tile(64, 128, 64, warps=4, stages=4),
    Tile(64, 64, 128, warps=4, stages=4),
    Tile(64, 32, 128, warps=4, stages=4),
)
MANY_ROWS_GATED = (
    Tile(128, 128, 64, warps=8, stages=3),
    Tile(128, 128, 64, warps=8, stages=4),
    Tile(256, 64, 64, warps=8, stages=4),
    Tile(128, 64, 64, warps=8, stages=4),
    Tile(64, 128, 64, warps=8, stages=3),
    Tile(64, 64, 64, warps=4, stages=4),
    Tile(64, 32, 128, warps=4, stages=3),
)


def few_rows(rows: int, gated: bool) -> tuple[Tile, ...]:
    """Tiles of 16 to 64 rows: small enough that two programs and more share a multiprocessor."""
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
    """All that fit the shape, with and without the copy engine."""
    gated = part.kind == "silu_mul"
    tiles = few_rows(rows, gated) if rows <= 64 else MANY_ROWS_GATED if gated else MANY_ROWS
    for plain in tiles:
        for tma in (False, True):
            tile = Tile(plain.rows, plain.columns, plain.depth, plain.warps, plain.stages, plain.swap, tma)
            if part.outputs % tile.columns or part.inputs % tile.depth:
                continue
            if part.kind != "add_norm":
                yield Variant(tile)
                continue
            yield Variant(tile, deferred=True)
            programs = -(-rows // tile.rows) * (part.outputs // tile.columns)
            splits = [s for s in (2, 3, 4, 5, 6, 7, 8) if part.inputs % (s * tile.depth) == 0]
            # About one program a multiprocessor.
            split = min(splits, key=lambda s: abs(s * programs - 128), default=0)
            if split and split * programs <= 400:
                yield Variant(tile, split=split)


def predicted_us(part: Part, rows: int, variant: Variant) -> float:
    return variant_us(part.kind, rows, part.inputs, part.outputs, variant.tile, variant.split, variant.deferred)


def rules_us(part: Part, rows: int) -> float:
    """The prediction without a table: weights of few rows are streamed, more go to cuBLAS."""
    if rows > 64:
        return cublas_us(part.kind, rows, part.inputs, part.outputs)
    split = linear.default_split(part.outputs, part.inputs) if part.kind == "add_norm" else 1
    return predicted_us(part, rows, Variant(linear.streaming_tile(rows), split))


class Operands:
    """Random inputs of a part: one x, and weights enough to leave the L2 cache behind."""

    def __init__(self, part: Part, rows: int) -> None:
        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale

        self.part = part
        columns = part.outputs * (2 if part.kind == "silu_mul" else 1)
        copies = max(2, min(24, int(200e6 / (columns * part.inputs * 2))))
        self.x = random(rows, part.inputs)
        self.weights = [random(columns, part.inputs, scale=part.inputs**-0.5) for _ in range(copies)]
        self.bias, self.norm, self.residual = random(columns), random(columns), random(rows, columns)

    def run(self, index: int, variant: Variant | None) -> Tensor | tuple[Tensor | fused.Unscaled, Tensor]:
        """The part with weight `index`; None: by the rules."""
        x, weight, kind = self.x, self.weights[index % len(self.weights)], self.part.kind
        after = self.residual, self.norm, EPS
        if kind == "add_norm" and (variant is None or not variant.deferred):
            if variant is None:
                return fused.linear_add_rms_norm(x, weight, None, *after)
            return linear.linear_add_rms_norm_cuda(x, weight, None, *after, split=variant.split, tile=variant.tile)
        if variant is None:
            if kind == "quick_gelu":
                return packed.linear_quick_gelu(x, weight, self.bias)
            return fused.linear(x, weight, None) if kind == "plain" else fused.linear_silu_mul(x, weight)
        if kind == "add_norm":
            return linear.linear_add_unscaled_cuda(x, weight, None, *after, variant.tile)
        if kind == "quick_gelu":
            return linear.linear_quick_gelu_cuda(x, weight, self.bias, variant.tile)
        if kind == "silu_mul":
            return linear.linear_silu_mul_cuda(x, weight, variant.tile)
        return linear.linear_cuda(x, weight, None, variant.tile)

    def check(self, variant: Variant | None) -> None:
        out = self.run(0, variant)
        x, weight = self.x.double(), self.weights[0].double()
        expected = x @ weight.T
        if self.part.kind == "silu_mul":
            expected = fused.silu_mul_reference(expected)
        elif self.part.kind == "quick_gelu":
            expected = expected + self.bias.double()
            expected = expected * torch.sigmoid(1.702 * expected)
        elif self.part.kind == "add_norm":
            expected = fused.rms_norm_reference(expected + self.residual.double(), self.norm.double(), EPS)
            normed = out[0]
            if isinstance(normed, fused.Unscaled):
                mean = normed.squares.sum(1, keepdim=True) / self.part.outputs
                out = normed.rows.double() * torch.rsqrt(mean.double() + EPS)
            else:
                out = normed
        assert isinstance(out, Tensor)
        error = float((out.double() - expected).norm() / expected.norm())
        if not error < 8e-3:
            raise WrongResult(f"relative error {error:.1e}")


def _make(part: Part, rows: int, variant: Variant | None) -> Run:
    operands = Operands(part, rows)

    def run(index: int) -> object:
        if variant is not None:
            return operands.run(index, variant)
        with patch.object(routes, "ROUTES", {}):
            return operands.run(index, None)

    with patch.object(routes, "ROUTES", {}):
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
                all_of = {variant: predicted_us(part, rows, variant) for variant in variants(part, rows)}
                make = lambda a=(part, rows, None): _make(*a)  # noqa: E731
                found.append(Case(part.kind, shape, "rules", make, predicted_us=rules_us(part, rows)))
                # Each way to the norm has its own best.
                for deferred in (False, True):
                    ways = {v: time for v, time in all_of.items() if v.deferred is deferred}
                    for variant, time in ways.items():
                        if time <= WORTH * min(ways.values()):
                            make = lambda a=(part, rows, variant): _make(*a)  # noqa: E731
                            found.append(Case(part.kind, shape, str(variant), make, predicted_us=time))
    return found
