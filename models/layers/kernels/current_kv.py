"""The current step's queries, keys and values as paged decode attention reads them: heads are normed and rotated on the
way in."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.norms import weighted
from models.layers.norms import QKNorm


class CurrentKV(NamedTuple):
    """What is not in the cache yet: k and v [rows, Hkv, D] of each row's last position, cosines and sines float32
    [rows, R / 2], R <= D, that turn it and the queries (None: as they are), its KV slots, int64 [rows], and the QK norm
    before the rotation."""

    k: Tensor
    v: Tensor
    rotary: tuple[Tensor, Tensor] | None
    slot_mapping: Tensor
    qk_norm: QKNorm | None = None


@triton.jit
def angles(cos_row, sin_row, columns, here, D: tl.constexpr, R: tl.constexpr):
    """Cosines, and sines with the sign that a column's partner takes, of the shape of `here`. Columns from R on do not
    turn."""
    first = columns < R // 2
    angle = tl.broadcast_to(tl.where(first, columns, columns - R // 2), here.shape)
    if R < D:
        here = here & (columns < R)
    cos = tl.load(cos_row + angle, mask=here, other=0.0 if R == D else 1.0)
    sin = tl.load(sin_row + angle, mask=here, other=0.0)
    return cos, tl.where(first, -sin, sin)


@triton.jit
def reciprocal_rms(heads, columns, here1, rest, here2, eps, D: tl.constexpr, D2: tl.constexpr, NORM: tl.constexpr):
    """Of whole heads, which lie in one or two ranges of columns: float32, a column. 1 without NORM."""
    reciprocal = 1.0
    if NORM:
        x = tl.load(heads + tl.broadcast_to(columns, here1.shape), mask=here1, other=0.0).to(tl.float32)
        squares = tl.sum(x * x, 1)
        if D2 > 0:
            x = tl.load(heads + tl.broadcast_to(rest, here2.shape), mask=here2, other=0.0).to(tl.float32)
            squares += tl.sum(x * x, 1)
        reciprocal = tl.rsqrt(squares / D + eps)[:, None]
    return reciprocal


@triton.jit
def _normed(heads, columns, here, rstd, weight_ptr, NORM: tl.constexpr):
    x = tl.load(heads + columns, mask=here, other=0.0)
    if NORM:
        x = weighted(x.to(tl.float32), rstd, tl.load(weight_ptr + columns, mask=here, other=0.0), x.dtype)
    return x


@triton.jit
def rotated(heads, columns, here, cos, sin, rstd, weight_ptr, D: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr):
    """These columns of heads, normed and half-split rotated: the partner of one of the first R values is R / 2 columns
    away."""
    columns = tl.broadcast_to(columns, here.shape)
    x = _normed(heads, columns, here, rstd, weight_ptr, NORM)
    if R > 0:
        partners = tl.where(columns < R // 2, columns + R // 2, columns - R // 2)
        if R < D:
            partners = tl.where(columns < R, partners, columns)
        partner = _normed(heads, partners, here, rstd, weight_ptr, NORM)
        x = (x.to(tl.float32) * cos + partner.to(tl.float32) * sin).to(x.dtype)
    return x
