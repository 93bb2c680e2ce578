"""RMSNorm. LayerNorm is torch.nn.LayerNorm, which already computes in float32 inside."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.layers.fused import rms_norm


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) in float32, cast to x's dtype, THEN times weight (as the published Llama code)."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
