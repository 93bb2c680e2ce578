"""Feed-forward layers."""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.gemm import gemm
from models.layers.norms import Normed

Activation = Literal["gelu", "gelu_tanh", "quick_gelu"]
N = TypeVar("N", bound=nn.Module)


class MLP(nn.Module):
    """fc2(activation(fc1(x))), with biases: [..., hidden_size] -> [..., out_features], by default hidden_size."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: Activation, *, out_features: int | None = None
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, intermediate_size)
        self.fc2 = nn.Linear(intermediate_size, out_features or hidden_size)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        layer = self.fc1
        if self.activation == "quick_gelu":
            hidden = gemm(x, layer.weight, layer.bias, "quick_gelu")
        elif self.activation == "gelu_tanh" and x.is_cuda and x.dtype != torch.float32:
            # cuBLASLt applies bias and tanh GELU inside the GEMM, before its result is rounded.
            hidden = torch._addmm_activation(layer.bias, x, layer.weight.t(), use_gelu=True)
        else:
            hidden = F.gelu(layer(x), approximate="tanh" if self.activation == "gelu_tanh" else "none")
        return self.fc2(hidden)


class Merger(nn.Module, Generic[N]):
    """Packed rows side by side, as many as fill `width`, and two linears around a GELU: [n, hidden_size] -> [n *
    hidden_size / width, out_features]. The caller applies the norm: to rows, or to what they fill."""

    def __init__(
        self, norm: N, width: int, out_features: int, inner: int | None = None, activation: Activation = "gelu"
    ) -> None:
        super().__init__()
        self.width = width
        self.norm = norm
        self.mlp = MLP(width, inner or width, activation, out_features=out_features)

    def forward(self, normed: Tensor) -> Tensor:
        return self.mlp(normed.view(-1, self.width))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), [..., hidden_size] -> like x; gate_up holds the rows of gate, then those of up."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def widen(self, multiple: int) -> None:
        """Pads intermediate_size of loaded parameters with zeros to a multiple of `multiple`. The result stays the
        same, since the padding contributes silu(0) * 0."""
        more = -self.down.in_features % multiple
        if not more:
            return
        for name, parameter in list(self.gate_up.named_parameters()):
            rest = (0, 0) * (parameter.dim() - 1) + (0, more)
            halves = [F.pad(half, rest) for half in parameter.chunk(2)]
            setattr(self.gate_up, name, nn.Parameter(torch.cat(halves), requires_grad=False))
        self.down.weight = nn.Parameter(F.pad(self.down.weight, (0, more)), requires_grad=False)
        self.down.in_features += more
        self.gate_up.out_features += 2 * more

    def gated(self, x: Normed) -> Tensor:
        """[..., hidden_size] -> silu(gate(x)) * up(x) [..., intermediate_size]."""
        return gemm(x, self.gate_up.weight, self.gate_up.bias, "silu_mul")

    def forward(self, x: Tensor) -> Tensor:
        return gemm(self.gated(x), self.down.weight, self.down.bias)
