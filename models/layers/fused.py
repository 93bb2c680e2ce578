"""Element-wise chains of the transformer stacks. Each is one operation, so that it can be one kernel where that pays
off.

The references define what is computed: float32 inside, rounded to the input's dtype where the published code rounds.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.op import op
from models.layers.precision import upcast
from models.layers.rotary import rotate_half_split


@op(cuda="models.layers.kernels.elementwise:silu_mul")
def silu_mul(gate_up: Tensor) -> Tensor:
    """[..., 2 * inner], gate first -> silu(gate) * up [..., inner]; silu is rounded before it is multiplied."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@op(cuda="models.layers.kernels.gated_delta:sigmoid_mul")
def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), rounded once: x [n, heads, width] and gate like it with any strides, or x [n, width] and
    gate [n, 1]."""
    return (upcast(x) * torch.sigmoid(upcast(gate))).to(x.dtype)


@op(cuda="models.layers.kernels.elementwise:quantize")
def quantize(x: Tensor, scale: int) -> Tensor:
    """round(tanh(x) * scale) / scale, half to even: FSQ (arXiv:2309.15505); every operation is rounded to the dtype."""
    return torch.round(torch.tanh(x) * scale) / scale


@op(cuda="models.layers.kernels.rotary:rotary_dense_attention")
def rotary_dense_attention(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, first_query: int = 0) -> Tensor:
    """Bidirectional attention over N short sequences of equal length L, q and k rotated on the way in.

    q [N, Lq, Hq, D] holds rows first_query..first_query + Lq of the sequence; k and v [N, L, Hkv, D], any strides; cos
    and sin float32 [L, D/2]. Rotated values are rounded to the dtype before they are multiplied. -> [N, Lq, Hq, D].
    """
    rows = slice(first_query, first_query + q.shape[1])
    q, k = rotate_half_split(q, cos[rows], sin[rows]), rotate_half_split(k, cos, sin)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=k.shape[1] != q.shape[1]).transpose(1, 2)
