"""Mixture of experts: sigmoid or softmax routing on the device, and grouped GEMMs over the experts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.fused import sigmoid_mul, silu_mul
from models.layers.gemm import gemv
from models.layers.mlp import SwiGLU
from models.layers.op import op
from models.layers.precision import upcast
from models.layers.quantized import COLUMNS, GROUP, QuantizedWeight, Weight

_FEW_ROWS = 4
"""Up to this many rows, each chosen expert of a row is a GEMV. For more rows a grouped GEMM reads an expert once for
all of its rows."""
_ROWS_OF_EXPERT = 48
"""On average, up to which our own grouped GEMM is faster than torch's."""


class SigmoidRouter(nn.Module):
    """DeepSeek-V3's gate (arXiv:2412.19437): scores sigmoid(x W^T) in float32, the top_k largest of score + bias are
    chosen, their weights are the scores without the bias, normalised to `scale`."""

    float32_parameters = frozenset({"weight", "bias"})

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, scale: float, *, normalise: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(num_experts))
        self.top_k = top_k
        self.scale = scale
        self.normalise = normalise

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [n, hidden_size] -> weights float32 [n, top_k] and experts int64 [n, top_k]."""
        return route(_logits(x, self.weight), self.bias, self.top_k, self.scale, self.normalise)


class SoftmaxRouter(nn.Module):
    """Qwen3's gate (arXiv:2505.09388): softmax(x W^T) in float32, the top_k largest, their weights normalised to 1."""

    float32_parameters = frozenset({"weight"})

    def __init__(self, hidden_size: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.top_k = top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [n, hidden_size] -> weights float32 [n, top_k] and experts int64 [n, top_k]."""
        return route(_logits(x, self.weight), None, self.top_k)


Router = SigmoidRouter | SoftmaxRouter


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    """router_logits, or a GEMV for few rows."""
    if x.shape[0] <= _FEW_ROWS:
        return gemv(x, weight, out_dtype=torch.float32)[None]
    return router_logits(x, weight)


@op(cuda="models.layers.kernels.moe:router_logits", takes=lambda x, _: x.dtype == torch.bfloat16)
def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in float32, in parts that have to be added: x [n, hidden_size] and weight float32 [experts, hidden_size] ->
    float32 [splits, n, experts]."""
    return F.linear(x.float(), weight)[None]


@op(cuda="models.layers.kernels.moe:route")
def route(
    logits: Tensor, bias: Tensor | None, top_k: int, scale: float = 1.0, normalise: bool = True
) -> tuple[Tensor, Tensor]:
    """SigmoidRouter from its logits float32 [splits, n, experts], which are added; without a bias SoftmaxRouter. The
    order of a row's experts is free."""
    if bias is None:
        # The softmax of all, normalised over the chosen, is the softmax of the chosen alone.
        chosen, experts = torch.topk(logits.sum(0), top_k, dim=-1, sorted=False)
        return torch.softmax(chosen, dim=-1), experts
    scores = torch.sigmoid(logits.sum(0))
    experts = torch.topk(scores + bias, top_k, dim=-1, sorted=False).indices
    weights = scores.gather(-1, experts)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, experts


@op(cuda="models.layers.kernels.moe:expert_places")
def expert_places(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The permutation of a grouped GEMM, which brings the rows of each expert together: the lowest expert first, each
    expert's rows in their order. experts int64 [n, top_k] -> the place of each entry int64 [n, top_k], and the end of
    each expert's places int32 [num_experts]."""
    flat = experts.flatten()
    order = torch.argsort(flat, stable=True)
    places = torch.empty_like(order).index_copy(0, order, torch.arange(order.shape[0], device=order.device))
    counts = torch.zeros(num_experts, dtype=torch.int32, device=flat.device)
    counts = counts.scatter_add(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return places.view(experts.shape), counts.cumsum(0, dtype=torch.int32)


@op(cuda="models.layers.kernels.moe:spread_rows")
def spread_rows(x: Tensor, places: Tensor) -> Tensor:
    """Permute: x [n, hidden_size] -> [n * top_k, hidden_size], where row i lies at each of places[i], int64 [n,
    top_k]."""
    rows, top_k = places.shape
    spread = x.new_empty((rows * top_k, x.shape[1]))
    return spread.index_copy(0, places.flatten(), x.repeat_interleave(top_k, 0))


Gate = tuple[Tensor, Tensor]
"""x [n, hidden_size] and weight [1, hidden_size] of a gate sigmoid(x W^T)."""


@op(cuda="models.layers.kernels.moe:combine")
def combine(
    chosen: Tensor, weights: Tensor, shared: Tensor, places: Tensor | None = None, gate: Gate | None = None
) -> Tensor:
    """Unpermute and sum: gated(shared) + sum over k of weights [n, k] * chosen [n * k, hidden_size] -> like shared. The
    sum is in float32, and rounded before shared is added. places int64 [n, k]: the rows of chosen; None: they lie in
    order."""
    if places is not None:
        chosen = chosen.index_select(0, places.flatten())
    total = torch.einsum("nkw,nk->nw", upcast(chosen.view(*weights.shape, -1)), upcast(weights))
    return total.to(shared.dtype) + gated(shared, gate)


def gated(shared: Tensor, gate: Gate | None) -> Tensor:
    """shared [n, hidden_size] times its gate, if it has one."""
    return shared if gate is None else sigmoid_mul(shared, F.linear(*gate))


class Experts(nn.Module):
    """SwiGLU experts stacked on the leading axis; gate_up [experts, 2 * intermediate_size, hidden_size], down
    [experts, hidden_size, intermediate_size]."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up: Weight = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down: Weight = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor, base: Tensor, gate: Gate | None = None) -> Tensor:
        """gated(base) + sum over the chosen experts of weight * expert(x): x and base [n, hidden_size] -> like x. The
        sum is in float32, and rounded before base is added."""
        if not x.is_cpu and x.dtype == torch.bfloat16:
            return experts_grouped(x, weights, experts, self.gate_up, self.down, base, gate)
        return experts_dense(x, weights, experts, self.gate_up, self.down) + gated(base, gate)


def experts_dense(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """Every expert on every row, with weight 0 where it was not chosen: the plain form, exact and without sorting."""
    weights = upcast(weights)
    spread = weights.new_zeros((x.shape[0], gate_up.shape[0])).scatter(1, experts, weights)
    total = upcast(torch.zeros_like(x))
    for index, (expert_gate_up, expert_down) in enumerate(zip(_each(gate_up, x), _each(down, x), strict=True)):
        gate, up = F.linear(x, expert_gate_up).chunk(2, dim=-1)
        total = total + spread[:, index, None] * upcast(F.linear(F.silu(gate) * up, expert_down))
    return total.to(x.dtype)


def _each(stack: Weight, x: Tensor) -> Iterable[Tensor]:
    """The matrices of a stack."""
    return stack.matrices(x.dtype) if isinstance(stack, QuantizedWeight) else stack


def experts_grouped(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Weight, down: Weight, base: Tensor, gate: Gate | None = None
) -> Tensor:
    """Permute, one grouped GEMM for each projection, unpermute. The ends of the groups stay on the device."""
    places, ends = expert_places(experts, gate_up.shape[0])
    hidden = silu_mul(grouped_linear(spread_rows(x, places), gate_up, ends))
    return combine(grouped_linear(hidden, down, ends), weights, base, places, gate)


def grouped_linear(x: Tensor, stack: Weight, ends: Tensor) -> Tensor:
    """Rows of x [n, K] in the order of experts, which end at `ends` int32 [experts], times the matrices of a stack
    [experts, N, K] -> [n, N]."""
    if isinstance(stack, QuantizedWeight):
        # A dry run counts bytes: on the meta device the reference would take an expert after the other.
        return x.new_empty((x.shape[0], stack.shape[1])) if x.is_meta else grouped_codes(x, stack, ends)
    return grouped_gemm(x, stack, ends)


def _streams(x: Tensor, stack: Tensor, _: Tensor) -> bool:
    """Whether experts have few rows each, so that time goes into reading their weights: torch's tiles are of 64 rows
    and more."""
    experts, outputs, inputs = stack.shape
    return x.shape[0] <= _ROWS_OF_EXPERT * experts and outputs % COLUMNS == 0 and inputs % GROUP == 0


@op(cuda="models.layers.kernels.moe:grouped_gemm", takes=_streams)
def grouped_gemm(x: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
    """grouped_linear of a stack in 16 bits."""
    return F.grouped_mm(x, stack.transpose(1, 2), offs=ends)


@op(cuda="models.layers.kernels.moe:grouped_codes")
def grouped_codes(x: Tensor, stack: QuantizedWeight, ends: Tensor) -> Tensor:
    """grouped_linear of a stack that is held as codes."""
    experts = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device, dtype=ends.dtype), right=True)
    out = x.new_zeros((x.shape[0], stack.shape[1]))
    for expert, matrix in enumerate(stack.matrices(x.dtype)):
        out = torch.where(experts[:, None] == expert, F.linear(x, matrix), out)
    return out


def experts_one_by_one(x: Tensor, experts: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """Output of every chosen expert for its row: x [n, hidden_size], experts [n, top_k] -> [n * top_k, hidden_size].
    CUDA only."""
    index = experts.flatten()
    hidden = gemv(x, gate_up, index=index, fan_out=experts.shape[1], silu_mul=True)
    return gemv(hidden, down, index=index)


class MixtureOfExperts(nn.Module):
    """Routed experts, and a shared SwiGLU for every row if the model has one, times sigmoid(shared_gate(x)) if it has
    that."""

    sixteen_bit_layers = frozenset({"shared_gate"})

    def __init__(
        self, router: Router, experts: Experts, shared: SwiGLU | None = None, shared_gate: nn.Linear | None = None
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[n, hidden_size] -> like x. residual: of a mixture without a shared SwiGLU, added to its experts."""
        weights, chosen = self.router(x)
        gate = None if self.shared_gate is None else (x, self.shared_gate.weight)
        if self.shared is not None:
            assert residual is None
            base = self.shared(x)
        else:
            base = torch.zeros_like(x) if residual is None else residual
        if x.is_cuda and x.shape[0] <= _FEW_ROWS:
            rows = experts_one_by_one(x, chosen, self.experts.gate_up, self.experts.down)
            return combine(rows, weights, base, None, gate)
        return self.experts(x, weights, chosen, base, gate)


def weight_bytes(module: nn.Module, rows: float, left_out: tuple[str, ...]) -> float:
    """Bytes of weights that `rows` tokens read, without those whose names begin so: all, but of experts the share that
    random choices touch."""
    chosen = chosen_experts(module)
    num_bytes = 0.0
    for name, parameter in module.named_parameters():
        if not name.startswith(left_out):
            untouched = (1 - chosen[id(parameter)] / parameter.shape[0]) ** rows if id(parameter) in chosen else 0.0
            num_bytes += (1 - untouched) * parameter.numel() * parameter.element_size()
    return num_bytes


def chosen_experts(module: nn.Module) -> dict[int, int]:
    """Number of experts of a row, by the id of a stack of experts' weights."""
    mixtures = [part for part in module.modules() if isinstance(part, MixtureOfExperts)]
    return {id(weight): mixture.router.top_k for mixture in mixtures for weight in mixture.experts.parameters()}
