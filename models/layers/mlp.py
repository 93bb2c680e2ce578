"""Feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Activation = Literal["gelu", "gelu_tanh", "quick_gelu"]


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
}


class MLP(nn.Module):
    """fc2(activation(fc1(x))), with biases."""

    def __init__(self, width: int, inner: int, activation: Activation, *, out_width: int | None = None) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, out_width or width)
        self.activation = _ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); gate_up holds the rows of gate, then those of up."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)
