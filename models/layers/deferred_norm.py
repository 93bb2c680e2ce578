"""RMSNorms that are finished, or wholly made, by the GEMM that reads them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from models.layers.norms import rms_norm


class DeferredNorm(NamedTuple):
    """Rows of an RMSNorm before their scale: x times the norm's weight [..., K], the squares of x summed in parts,
    float32 [rows, parts], and eps. The GEMM scales its result afterwards, which gives the same values up to
    rounding."""

    rows: Tensor
    squares: Tensor
    eps: float

    @property
    def is_cuda(self) -> bool:
        return self.rows.is_cuda

    def normed(self) -> Tensor:
        """The norm itself, like rows."""
        scale = torch.rsqrt(self.squares.sum(1) / self.rows.shape[-1] + self.eps)
        return (self.rows.float() * scale.view(*self.rows.shape[:-1], 1)).to(self.rows.dtype)


class VectorNorm(NamedTuple):
    """The RMSNorm of a single row x [..., K], which each GEMV that reads it makes for itself: weight [K], and eps."""

    rows: Tensor
    weight: Tensor
    eps: float

    @property
    def is_cuda(self) -> bool:
        return self.rows.is_cuda

    def normed(self) -> Tensor:
        """The norm itself, like rows."""
        return rms_norm(self.rows, self.weight, self.eps)


TileRows = Tensor | DeferredNorm
"""The x that a tiled kernel can read."""
Normed = TileRows | VectorNorm
"""The x that a GEMM can read."""
