"""Router and experts against a float64 loop over rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.checkpoints.checkpoint import fill_random
from models.layers.moe import Experts, SigmoidRouter, SoftmaxRouter, experts_dense, experts_grouped
from tests.models.kernels.checking import replayed

ROWS, WIDTH, INNER, EXPERTS, TOP_K, SCALE = 19, 32, 16, 8, 3, 2.446


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _expected(x: Tensor, router: SigmoidRouter, experts: Experts) -> tuple[Tensor, list[set[int]]]:
    rows, chosen = [], []
    for row in x.double():
        scores = 1 / (1 + torch.exp(-(router.weight.double() @ row)))
        ranked = sorted(range(EXPERTS), key=lambda e: -(scores[e] + router.bias[e].double()))[:TOP_K]
        total = sum(scores[e] for e in ranked)
        out = torch.zeros(WIDTH, dtype=torch.float64)
        for e in ranked:
            gate, up = (experts.gate_up[e].double() @ row).chunk(2)
            out += SCALE * scores[e] / total * (experts.down[e].double() @ (_silu(gate) * up))
        rows.append(out)
        chosen.append(set(ranked))
    return torch.stack(rows), chosen


@pytest.fixture
def layer() -> tuple[SigmoidRouter, Experts]:
    router = SigmoidRouter(WIDTH, EXPERTS, TOP_K, SCALE, normalise=True)
    experts = Experts(EXPERTS, WIDTH, INNER)
    for seed, module in enumerate((router, experts)):
        module.requires_grad_(False)
        fill_random(module, seed)
    router.bias.normal_(0, 0.3, generator=torch.Generator().manual_seed(5))
    return router, experts


def test_against_float64(layer: tuple[SigmoidRouter, Experts]) -> None:
    router, experts = layer
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    expected, chosen = _expected(x, router, experts)
    weights, indices = router(x)
    assert [set(row.tolist()) for row in indices] == chosen
    torch.testing.assert_close(weights.sum(-1), torch.full((ROWS,), SCALE))
    assert (experts_dense(x, weights, indices, experts.gate_up, experts.down).double() - expected).abs().max() < 1e-5


def test_scores_are_not_rounded_to_the_models_dtype(layer: tuple[SigmoidRouter, Experts]) -> None:
    """Near ties decide which expert runs: a product in bfloat16 moves weights by 1e-2."""
    router, _ = layer
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(6)).bfloat16()
    weights, indices = router(x)
    scores = torch.sigmoid(x.double() @ router.weight.double().T).gather(-1, indices)
    expected = SCALE * scores / scores.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), expected, atol=1e-5, rtol=0)


def test_grouped_experts_equal_the_dense_path(layer: tuple[SigmoidRouter, Experts]) -> None:
    router, experts = layer
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3)).bfloat16()
    gate_up, down = experts.gate_up.bfloat16(), experts.down.bfloat16()
    weights, indices = router(x)
    base = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(7)).bfloat16()
    grouped = experts_grouped(x, weights, indices, gate_up, down, base).float()
    dense = (experts_dense(x, weights, indices, gate_up, down) + base).float()
    assert (grouped - dense).norm() / dense.norm() < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 32, 64, 384, 500, 2048])
@pytest.mark.parametrize("family", ["kimi_vl_a3b", "qwen3_vl_30b_a3b"])
def test_grouped_experts_on_a_gpu(family: str, rows: int) -> None:
    """In a captured graph; rows of padding that are NaN change no other row, and a second replay changes no bit."""
    device = torch.device("cuda")
    router: SigmoidRouter | SoftmaxRouter
    if family == "kimi_vl_a3b":
        router, experts = SigmoidRouter(2048, 64, 6, SCALE, normalise=True), Experts(64, 2048, 1408)
    else:
        router, experts = SoftmaxRouter(2048, 128, 8), Experts(128, 2048, 768)
    router, experts = (module.requires_grad_(False).to(device) for module in (router, experts.bfloat16()))
    for seed, module in enumerate((router, experts)):
        fill_random(module, seed)
    x = torch.randn(rows, 2048, device=device, dtype=torch.bfloat16)
    padded = torch.full((rows + 3, 2048), float("nan"), device=device, dtype=torch.bfloat16)
    padded[:rows] = x
    base = torch.randn_like(padded)
    routed = router(padded)

    def run() -> Tensor:
        return experts_grouped(padded, *routed, experts.gate_up, experts.down, base)

    out = replayed(device, run)[:rows]
    assert torch.equal(out, replayed(device, run)[:rows])
    weights, indices = (each[:rows] for each in routed)
    wide = base[:rows].float()
    exact = experts_dense(x.float(), weights, indices, experts.gate_up.float(), experts.down.float()) + wide
    plain = experts_dense(x, weights, indices, experts.gate_up, experts.down) + base[:rows]
    assert (out - exact).norm() <= 1.5 * (plain - exact).norm()
