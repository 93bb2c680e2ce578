"""Rotary position embeddings on packed rows.

Angles, cosines and sines are float32 [rows, head_dim / 2]; the rotation is done in float32 and cast back. They are made
once per forward and shared by all layers. Frequencies are built on the CPU even under `torch.device("meta")`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from models.layers.precision import wide


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """theta^(-2j / head_dim), float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return 1.0 / theta**exponents


def longrope_inverse_frequencies(
    head_dim: int,
    theta: float,
    *,
    short_factor: Sequence[float],
    long_factor: Sequence[float],
    max_positions: int,
    original_max_positions: int,
    factor: float | None = None,
) -> tuple[Tensor, float]:
    """LongRoPE (arXiv:2402.13753) as Llama-form MiniCPM4 and VoxCPM2 use it: frequencies and the factor of cos and sin.

    The long factors hold for tables longer than original_max_positions. `factor` is the config's own stretch, else
    max_positions / original_max_positions; a stretch of 1 or less leaves cos and sin as they are.
    """
    factors = long_factor if max_positions > original_max_positions else short_factor
    if len(factors) != head_dim // 2:
        raise ValueError(f"longrope: {len(factors)} factors for head_dim {head_dim}, expected {head_dim // 2}")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * theta**exponents)
    stretch = factor if factor is not None else max_positions / original_max_positions
    scale = math.sqrt(1 + math.log(stretch) / math.log(original_max_positions)) if stretch > 1 else 1.0
    return frequencies, scale


def section_axes(sections: Sequence[int]) -> Tensor:
    """Position axis of every frequency under contiguous M-RoPE sections: (1, 2, 1) -> [0, 1, 1, 2]."""
    counts = torch.tensor(list(sections), device="cpu")
    return torch.repeat_interleave(torch.arange(len(sections), device="cpu"), counts)


def rotary_cos_sin(
    positions: Tensor, frequencies: Tensor, axes: Tensor | None = None, *, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of packed rows, each float32 [n, head_dim / 2].

    positions: int [n], or [axes, n] with `axes` int64 [head_dim / 2] naming the position axis of every frequency.
    """
    if positions.is_cuda:
        from models.layers.kernels.packed import rotary_cos_sin_cuda

        return rotary_cos_sin_cuda(positions, frequencies, axes, scale)
    return rotary_cos_sin_reference(positions, frequencies, axes, scale)


def rotary_cos_sin_reference(
    positions: Tensor, frequencies: Tensor, axes: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    if axes is None:
        angles = positions.float()[:, None] * frequencies
    else:
        angles = positions.float().index_select(0, axes).T * frequencies
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)


def rotate_half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (j, j + D/2): x [..., n, heads, D], cos and sin float32 [n, D/2] -> like x."""
    first, second = wide(x).chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotate_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """rotate_half_split of q [n, Hq, D] and k [n, Hkv, D] by rotary (cos and sin float32 [n, D/2]; None: not at all).

    Stores k and v in rows slot_mapping int64 [n] of the caches [cache rows, Hkv, D] and returns q.
    """
    if q.is_cuda:
        from models.layers.kernels.rotary import rotate_and_cache_cuda

        return rotate_and_cache_cuda(q, k, v, rotary, k_cache, v_cache, slot_mapping)
    return rotate_and_cache_reference(q, k, v, rotary, k_cache, v_cache, slot_mapping)


def rotate_and_cache_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    if rotary is not None:
        q, k = rotate_half_split(q, *rotary), rotate_half_split(k, *rotary)
    k_cache.index_copy_(0, slot_mapping, k)
    v_cache.index_copy_(0, slot_mapping, v)
    return q


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (2j, 2j + 1): x [..., n, heads, D], cos and sin float32 [n, D/2] -> like x."""
    even, odd = wide(x).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)
