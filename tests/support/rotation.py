"""Rotary embedding in the published order of pairs, which the loader reorders to half-split."""

from __future__ import annotations

import torch
from torch import Tensor

from models.layers.precision import upcast


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (2j, 2j + 1): x [..., n, heads, D], cos and sin float32 [n, D/2] -> like x."""
    even, odd = upcast(x).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)
