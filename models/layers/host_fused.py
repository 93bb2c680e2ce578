"""Chains of small operations on the CPU, where an operation takes longer to dispatch than to compute. They do what
models.layers.norms does in fewer operations, and differ from it in the last bits.

Only for float32, the default on a CPU. Other dtypes must be rounded between operations as in the references.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def rms_norm_float32(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """models.layers.norms.rms_norm: x * weight * sqrt(width) / sqrt(|x|^2 + width * eps)."""
    width = x.shape[-1]
    zero, floor = _scalar(0.0, x.device), _scalar((width * eps) ** 0.5, x.device)
    lengths = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), floor)
    return torch.addcmul(zero, x, weight, value=width**0.5).div_(lengths)


@cache
def _scalar(value: float, device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):
        return torch.tensor(value, dtype=torch.float32, device=device)
