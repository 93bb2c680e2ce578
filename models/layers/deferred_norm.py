"""An RMSNorm that is finished by the GEMM that reads it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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


Normed = Tensor | DeferredNorm
"""The x that a GEMM can read."""
