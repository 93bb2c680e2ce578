"""RMSNorm: of rows, with the residual sum before it, finished or wholly made by the GEMM that reads it, and of the
heads of queries and keys. LayerNorm is torch.nn.LayerNorm, which already computes in float32 inside.

The references define what is computed: float32 inside, rounded to the input's dtype where the published code rounds.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.layers.op import op
from models.layers.precision import upcast


def rms_norm_float32(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm on the CPU, where an operation takes longer to dispatch than to compute, in fewer operations: x * weight
    * sqrt(width) / sqrt(|x|^2 + width * eps). It differs from its reference in the last bits, and is for float32 alone:
    other dtypes must be rounded between operations."""
    width = x.shape[-1]
    zero, floor = _scalar(0.0, x.device), _scalar((width * eps) ** 0.5, x.device)
    lengths = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), floor)
    return torch.addcmul(zero, x, weight, value=width**0.5).div_(lengths)


@cache
def _scalar(value: float, device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):
        return torch.tensor(value, dtype=torch.float32, device=device)


def _rms_norm_host(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == weight.dtype == torch.float32:
        return rms_norm_float32(x, weight, eps)
    return rms_norm.reference(x, weight, eps)


@op(cuda="models.layers.kernels.norms:rms_norm", cpu=_rms_norm_host)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., width] -> like x: float32 statistics, cast to x's dtype, THEN times weight. A float32 weight multiplies
    before the cast."""
    values = upcast(x)
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (normed.to(torch.promote_types(x.dtype, weight.dtype)) * weight).to(x.dtype)


@op(cuda="models.layers.kernels.norms:add_rms_norm")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); the sum is rounded to the dtype before its norm."""
    total = x + residual
    return rms_norm(total, weight, eps), total


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


class QKNorm(NamedTuple):
    """QK norm: RMSNorm of each head of queries and of keys, before their rotation (Qwen3). Weights [head_dim]."""

    q: Tensor
    k: Tensor
    eps: float


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) in float32, cast to x's dtype, THEN times weight (as the published Llama code).

    float32: the weight stays in float32 and multiplies before the cast, for norms that are published as w and multiply
    by 1 + w, which 16 bits would round.
    """

    def __init__(self, hidden_size: int, eps: float, *, float32: bool = False) -> None:
        super().__init__()
        self.float32_parameters = frozenset({"weight"} if float32 else ())
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
