"""Feed-forward layers."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.fused import linear, linear_silu_mul
from models.layers.packed import linear_quick_gelu

Activation = Literal["gelu", "gelu_tanh", "quick_gelu"]


class MLP(nn.Module):
    """fc2(activation(fc1(x))), with biases."""

    def __init__(self, width: int, inner: int, activation: Activation, *, out_width: int | None = None) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, out_width or width)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(_activated_linear(x, self.fc1, self.activation))


def _activated_linear(x: Tensor, layer: nn.Linear, activation: Activation) -> Tensor:
    if activation == "quick_gelu":
        return linear_quick_gelu(x, layer.weight, layer.bias)
    if activation == "gelu_tanh" and x.is_cuda and x.dtype != torch.float32:
        # cuBLASLt applies bias and the tanh form to the product before it is rounded: no kernel of its own.
        return torch._addmm_activation(layer.bias, x, layer.weight.t(), use_gelu=True)
    return F.gelu(layer(x), approximate="tanh" if activation == "gelu_tanh" else "none")


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); gate_up holds the rows of gate, then those of up."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(linear_silu_mul(x, self.gate_up.weight), self.down.weight, None)
