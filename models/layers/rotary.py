"""Rotary position embeddings on packed rows.

Angles, cosines and sines are float32 [rows, head_dim / 2]; the rotation is done in float32 and cast back. They are
computed once per forward and shared by all layers. Frequencies are built on the CPU even under `torch.device("meta")`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from models.layers.norms import QKNorm, rms_norm
from models.layers.op import op
from models.layers.precision import upcast


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """theta^(-2j / head_dim), float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return 1.0 / theta**exponents


def section_axes(sections: Sequence[int], *, interleaved: bool = False, count: int | None = None) -> Tensor:
    """Position axis of every frequency under M-RoPE sections: (1, 2, 1) -> [0, 1, 1, 2].

    interleaved (Qwen3-VL): axes take turns, each for as many turns as its section says, and the first axis gets the
    rest: (4, 2, 1) -> [0, 1, 2, 0, 1, 0, 0]. count: number of frequencies, if it is not the sum of the sections; turns
    beyond it are dropped.
    """
    if not interleaved:
        counts = torch.tensor(list(sections), device="cpu")
        return torch.repeat_interleave(torch.arange(len(sections), device="cpu"), counts)
    turns = torch.arange(count or sum(sections), device="cpu")
    axes = turns % len(sections)
    return torch.where(turns < len(sections) * torch.tensor(list(sections), device="cpu")[axes], axes, 0)


@op(cuda="models.layers.kernels.packed:rotary_cos_sin")
def rotary_cos_sin(
    positions: Tensor, frequencies: Tensor, axes: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of packed rows, each float32 [n, head_dim / 2].

    positions: int [n], or [axes, n] with `axes` int64 [head_dim / 2] naming the position axis of every frequency.
    """
    if axes is None:
        angles = positions.float()[:, None] * frequencies
    else:
        angles = positions.float().index_select(0, axes).T * frequencies
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)


def rotate_half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (j, j + R/2) of the first R <= D values: x [..., n, heads, D], cos and sin float32 [n, R/2] -> like x."""
    half = cos.shape[-1]
    first, second, rest = upcast(x).split((half, half, x.shape[-1] - 2 * half), dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


@op(cuda="models.layers.kernels.rotary:rotate_and_cache")
def rotate_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    qk_norm: QKNorm | None = None,
) -> tuple[Tensor, Tensor]:
    """The norm of q [n, Hq, D] and k [n, Hkv, D], if any, then rotate_half_split by rotary (cos and sin float32
    [n, R/2], R <= D; None: not at all).

    Stores k and v in rows slot_mapping int64 [n] of the caches [KV slots, Hkv, D] and returns q and k.
    """
    if qk_norm is not None:
        q, k = rms_norm(q, qk_norm.q, qk_norm.eps), rms_norm(k, qk_norm.k, qk_norm.eps)
    if rotary is not None:
        q, k = rotate_half_split(q, *rotary), rotate_half_split(k, *rotary)
    k_cache.index_copy_(0, slot_mapping, k)
    v_cache.index_copy_(0, slot_mapping, v)
    return q, k
