"""Element-wise chains of the transformer stacks, each one function so that each is one kernel where it pays.

The references here say what is computed: float32 inside, rounded to the input's dtype where the published code rounds.
CUDA runs models/layers/kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.attention import dense_attention
from models.layers.precision import wide
from models.layers.rotary import rotate_half_split

_MOST_VECTORS = 64
"""Rows that each read a narrow weight for themselves."""


class Unscaled(NamedTuple):
    """Rows of an RMSNorm before their scale: x times the norm's weight [..., K], the squares of x summed in parts,
    float32 [rows, parts], and eps. A product of them is scaled afterwards, which is the same but for rounding."""

    rows: Tensor
    squares: Tensor
    eps: float


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., width] -> like x: float32 statistics, cast to x's dtype, THEN times weight."""
    if x.is_cuda:
        from models.layers.kernels.norms import rms_norm_cuda

        return rms_norm_cuda(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    values = wide(x)
    return (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); the sum is rounded to the dtype before its norm."""
    if x.is_cuda:
        from models.layers.kernels.norms import add_rms_norm_cuda

        return add_rms_norm_cuda(x, residual, weight, eps)
    return add_rms_norm_reference(x, residual, weight, eps)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


def silu_mul(gate_up: Tensor) -> Tensor:
    """[..., 2 * inner], gate first -> silu(gate) * up [..., inner]; silu is rounded before the product."""
    if gate_up.is_cuda:
        from models.layers.kernels.elementwise import silu_mul_cuda

        return silu_mul_cuda(gate_up)
    return silu_mul_reference(gate_up)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def quantize(x: Tensor, scale: int) -> Tensor:
    """round(tanh(x) * scale) / scale, half to even: FSQ (arXiv:2309.15505); every operation is rounded to the dtype."""
    if x.is_cuda:
        from models.layers.kernels.elementwise import quantize_cuda

        return quantize_cuda(x, scale)
    return quantize_reference(x, scale)


def quantize_reference(x: Tensor, scale: int) -> Tensor:
    return torch.round(torch.tanh(x) * scale) / scale


def concatenate(a: Tensor, b: Tensor) -> Tensor:
    """[rows, width] each -> [rows, 2 * width]."""
    if a.is_cuda:
        from models.layers.kernels.elementwise import concatenate_cuda

        return concatenate_cuda(a, b)
    return torch.cat((a, b), dim=-1)


def linear(x: Tensor | Unscaled, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear; on a GPU, one row, few rows, heads over a vocabulary and shapes of models.layers.kernels.routes have
    kernels of their own."""
    if isinstance(x, Unscaled) or x.is_cuda:
        from models.layers.kernels.gemv import is_vector, vector_linear_cuda
        from models.layers.kernels.linear import linear_cuda, streams_alone, vocabulary_tile
        from models.layers.kernels.routes import route

        if isinstance(x, Unscaled):
            chosen = route("plain", x.rows, weight)
            return linear_cuda(x, weight, bias, chosen.tile if chosen else None)
        if is_vector(x):
            return vector_linear_cuda(x, weight, bias)
        if chosen := route("plain", x, weight):
            return linear_cuda(x, weight, bias, chosen.tile)
        if streams_alone(x, weight):
            return linear_cuda(x, weight, bias)
        if tile := vocabulary_tile(x, weight):
            return linear_cuda(x, weight, bias, tile)
    return F.linear(x, weight, bias)


def narrow_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear to few outputs: what bounds it is the way along its inputs, so that many programs share its rows."""
    if x.is_cuda:
        from models.layers.kernels.gemv import gemv_cuda
        from models.layers.kernels.linear import narrow_linear_cuda, streams_narrow

        rows = x.reshape(-1, x.shape[-1])
        if rows.shape[0] <= _MOST_VECTORS:
            return gemv_cuda(rows, weight, bias).view(*x.shape[:-1], -1)
        if streams_narrow(rows, weight):
            return narrow_linear_cuda(x, weight, bias)
    return F.linear(x, weight, bias)


def linear_silu_mul(x: Tensor | Unscaled, weight: Tensor) -> Tensor:
    """silu_mul of x times weight [2 * inner, width]: [..., width] -> [..., inner]."""
    if isinstance(x, Unscaled) or x.is_cuda:
        from models.layers.kernels.gemv import is_vector, vector_linear_cuda
        from models.layers.kernels.linear import linear_silu_mul_cuda, streams
        from models.layers.kernels.routes import route

        if isinstance(x, Unscaled):
            chosen = route("silu_mul", x.rows, weight)
            return linear_silu_mul_cuda(x, weight, chosen.tile if chosen else None)
        if is_vector(x):
            return vector_linear_cuda(x, weight, silu_mul=True)
        if chosen := route("silu_mul", x, weight):
            return linear_silu_mul_cuda(x, weight, chosen.tile)
        if streams(x, weight):
            return linear_silu_mul_cuda(x, weight)
    return silu_mul(F.linear(x, weight))


def linear_add_rms_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """add_rms_norm of a projection: x [..., k], weight [width, k], residual [..., width]."""
    if x.is_cuda:
        from models.layers.kernels.gemv import is_vector, vector_linear_cuda
        from models.layers.kernels.linear import linear_add_rms_norm_cuda, linear_add_unscaled_cuda, streams
        from models.layers.kernels.routes import route

        if is_vector(x):
            total = vector_linear_cuda(x, weight, bias, residual=residual)
            return rms_norm(total, norm_weight, eps), total
        if chosen := route("add_norm", x, weight):
            if chosen.deferred:
                _, total = linear_add_unscaled_cuda(x, weight, bias, residual, norm_weight, eps, chosen.tile)
                return rms_norm(total, norm_weight, eps), total
            return linear_add_rms_norm_cuda(
                x, weight, bias, residual, norm_weight, eps, split=chosen.split, tile=chosen.tile
            )
        if streams(x, weight):
            return linear_add_rms_norm_cuda(x, weight, bias, residual, norm_weight, eps)
    return add_rms_norm(F.linear(x, weight, bias), residual, norm_weight, eps)


def linear_add_norm_for_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor | Unscaled, Tensor]:
    """linear_add_rms_norm whose norm is read by `linear` or `linear_silu_mul` alone, so that its scale may wait."""
    if x.is_cuda:
        from models.layers.kernels.gemv import is_vector
        from models.layers.kernels.linear import linear_add_unscaled_cuda
        from models.layers.kernels.routes import route

        chosen = route("add_norm", x, weight)
        if chosen and chosen.deferred and not is_vector(x):
            return linear_add_unscaled_cuda(x, weight, bias, residual, norm_weight, eps, chosen.tile)
    return linear_add_rms_norm(x, weight, bias, residual, norm_weight, eps)


def rotary_dense_attention(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *, first_query: int = 0
) -> Tensor:
    """Bidirectional attention over N short sequences of equal length L, q and k rotated on the way in.

    q [N, Lq, Hq, D] holds rows first_query..first_query + Lq of the sequence; k and v [N, L, Hkv, D], any strides; cos
    and sin float32 [L, D/2]. Rotated values are rounded to the dtype before the products. Returns [N, Lq, Hq, D].
    """
    if q.is_cuda:
        from models.layers.kernels.rotary import rotary_dense_attention_cuda

        return rotary_dense_attention_cuda(q, k, v, cos, sin, first_query)
    return rotary_dense_attention_reference(q, k, v, cos, sin, first_query)


def rotary_dense_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, first_query: int
) -> Tensor:
    rows = slice(first_query, first_query + q.shape[1])
    return dense_attention(rotate_half_split(q, cos[rows], sin[rows]), rotate_half_split(k, cos, sin), v)
