"""Mixture of experts: sigmoid routing with a correction bias, experts run grouped with routing on the device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.fused import silu_mul
from models.layers.mlp import SwiGLU
from models.layers.precision import wide

_FEW_ROWS = 4
"""Up to here every chosen expert is read by a product of its own; grouped products share what rows have in common."""


class SigmoidRouter(nn.Module):
    """DeepSeek-V3's gate (arXiv:2412.19437): scores sigmoid(x W^T) in float32, the top_k largest of score + bias are
    chosen, their weights are the scores without the bias, normalised to `scale`."""

    float32_parameters = frozenset({"weight", "bias"})

    def __init__(self, width: int, num_experts: int, top_k: int, scale: float, *, normalise: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, width))
        self.bias = nn.Parameter(torch.empty(num_experts))
        self.top_k = top_k
        self.scale = scale
        self.normalise = normalise

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [n, width] -> weights float32 [n, top_k] and experts int64 [n, top_k]."""
        if x.is_cuda:
            from models.layers.kernels.gemv import gemv_cuda
            from models.layers.kernels.moe import route_cuda

            few = x.shape[0] <= _FEW_ROWS
            logits = gemv_cuda(x, self.weight, out_dtype=torch.float32) if few else F.linear(x.float(), self.weight)
            return route_cuda(logits, self.bias, self.top_k, self.scale, self.normalise)
        scores = torch.sigmoid(F.linear(x.float(), self.weight))
        experts = torch.topk(scores + self.bias, self.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(-1, experts)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scale, experts


class Experts(nn.Module):
    """SwiGLU experts stacked on the leading axis; gate_up [experts, 2 * inner, width], down [experts, width, inner]."""

    def __init__(self, num_experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * inner, width))
        self.down = nn.Parameter(torch.empty(num_experts, width, inner))

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Sum over the chosen experts of weight * expert(x): x [n, width] -> [n, width], accumulated in float32."""
        if x.is_cuda and x.dtype == torch.bfloat16:
            return experts_grouped(x, weights, experts, self.gate_up, self.down)
        return experts_dense(x, weights, experts, self.gate_up, self.down)


def experts_dense(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Every expert on every row, weighted by 0 where it was not chosen: the plain path, exact and without a sort."""
    weights = wide(weights)
    spread = weights.new_zeros((x.shape[0], gate_up.shape[0])).scatter(1, experts, weights)
    total = wide(torch.zeros_like(x))
    for index, (expert_gate_up, expert_down) in enumerate(zip(gate_up, down, strict=True)):
        gate, up = F.linear(x, expert_gate_up).chunk(2, dim=-1)
        total = total + spread[:, index, None] * wide(F.linear(F.silu(gate) * up, expert_down))
    return total.to(x.dtype)


def experts_grouped(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Rows sorted by expert, one grouped product for each projection; offsets stay on the device."""
    rows, top_k = experts.shape
    order = torch.argsort(experts.flatten(), stable=True)
    counts = torch.zeros(gate_up.shape[0], dtype=torch.int32, device=x.device)
    counts = counts.scatter_add(0, experts.flatten(), torch.ones_like(order, dtype=torch.int32))
    offsets = counts.cumsum(0, dtype=torch.int32)
    sorted_x = x.index_select(0, order // top_k)
    hidden = silu_mul(F.grouped_mm(sorted_x, gate_up.transpose(1, 2), offs=offsets))
    sorted_y = F.grouped_mm(hidden, down.transpose(1, 2), offs=offsets)
    chosen = torch.empty_like(sorted_y).index_copy(0, order, sorted_y).view(rows, top_k, -1)
    return torch.einsum("nkw,nk->nw", wide(chosen), wide(weights)).to(x.dtype)


def experts_one_by_one(x: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Every chosen expert's answer to its row: x [n, width], experts [n, top_k] -> [n * top_k, width]. CUDA only."""
    from models.layers.kernels.gemv import gemv_cuda

    index = experts.flatten()
    hidden = gemv_cuda(x, gate_up, index=index, fan_out=experts.shape[1], silu_mul=True)
    return gemv_cuda(hidden, down, index=index)


class MixtureOfExperts(nn.Module):
    """Routed experts plus one shared SwiGLU that every row passes."""

    def __init__(self, router: SigmoidRouter, experts: Experts, shared: SwiGLU) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x)
        if x.is_cuda and x.shape[0] <= _FEW_ROWS:
            from models.layers.kernels.moe import combine_cuda

            rows = experts_one_by_one(x, chosen, self.experts.gate_up, self.experts.down)
            return combine_cuda(rows, weights, self.shared(x))
        return self.experts(x, weights, chosen) + self.shared(x)
