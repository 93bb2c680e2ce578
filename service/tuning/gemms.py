"""One GEMM of a layer with random operands: run in any configuration, and compared with float64."""

from __future__ import annotations

from functools import cached_property, partial

import torch
from torch import Tensor

from models.layers.deferred_norm import DeferredNorm
from models.layers.e4m3 import E4M3Weight, Weight, fill_rows
from models.layers.fused import silu_mul
from models.layers.kernels import gemm, tiled_gemm
from models.layers.kernels.gemm_types import Shape, Variant
from models.layers.norms import rms_norm

EPS = 1e-5
MAX_ERROR = 8e-3
"""Allowed error relative to the result's norm: that of rounding to bfloat16, with a margin."""
MAX_EIGHT_BIT_ERROR = 5e-2
"""The same for activations that are rounded to e4m3."""
_BEYOND_L2 = 200e6
"""Bytes of weights that are used in turn, so that each is read from memory."""


class WrongResult(Exception):
    """A configuration gives a wrong result."""


def _in_e4m3(weight: Tensor) -> E4M3Weight:
    with weight.device:
        made = E4M3Weight(*weight.shape)
    if not weight.is_meta:
        fill_rows(weight, made.values, made.scale, "a weight")
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

    def run(self, index: int, variant: Variant | None) -> Tensor | tuple[Tensor | DeferredNorm, Tensor]:
        """Runs it with weight number `index`. None: by the rules for shapes without a table entry."""
        weight = self.weights[index % len(self.weights)]
        return self._by_rule(weight) if variant is None else self._configured(weight, variant)

    def _by_rule(self, weight: Weight) -> Tensor | tuple[Tensor | DeferredNorm, Tensor]:
        match self.shape.kind:
            case "add_norm":
                return gemm.gemm_add_norm(self.x, weight, None, self.residual, self.norm, EPS)
            case "quick_gelu":
                return gemm.gemm(self.x, weight, self.bias, "quick_gelu")
            case "silu_mul":
                return gemm.gemm(self.x, weight, None, "silu_mul")
        return gemm.gemm(self.x, weight, None)

    def _configured(self, weight: Weight, variant: Variant) -> Tensor | tuple[Tensor | DeferredNorm, Tensor]:
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
        error = float((out.double() - expected).norm() / expected.norm())
        if not error < (MAX_EIGHT_BIT_ERROR if eight_bit else MAX_ERROR):
            raise WrongResult(f"relative error {error:.1e}")

    @cached_property
    def _expected(self) -> Tensor:
        weight = self.weights[0]
        wide = weight.dequantised(torch.float64) if isinstance(weight, E4M3Weight) else weight.double()
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
