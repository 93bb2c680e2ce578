"""What goes into a tiled GEMM beside its weight: the operand that its rows are read from, and what a deferred norm
needs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from models.layers.deferred_norm import DeferredNorm, TileRows
from models.layers.kernels.e4m3 import quantise_rows


class AddNorm(NamedTuple):
    """The epilogue of a GEMM whose norm is deferred: residual and the norm's weight go in, the rest comes out."""

    residual: Tensor
    norm_weight: Tensor
    scaled: Tensor
    squares: Tensor


class Operand(NamedTuple):
    """x as a launch reads it: rows [n, K], in e4m3 with their factors [n, 1], or with a norm before them."""

    rows: Tensor
    row_scale: Tensor | None = None
    before: DeferredNorm | None = None


def operand_of(x: TileRows, *, eight_bit: bool) -> tuple[Operand, torch.Size, torch.dtype]:
    """x's operand, shape and dtype."""
    plain = x.rows if isinstance(x, DeferredNorm) else x
    if eight_bit:
        return Operand(*quantise_rows(x)), plain.shape, plain.dtype
    before = x if isinstance(x, DeferredNorm) else None
    return Operand(_rows(plain), before=before), plain.shape, plain.dtype


def _rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
