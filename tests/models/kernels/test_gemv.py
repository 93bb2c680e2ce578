from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from models.layers.fused import rms_norm, silu_mul
from models.layers.gemm import gemv
from models.layers.mla import rotate_and_cache_latent
from models.layers.moe import SigmoidRouter, combine, route, route_softmax
from tests.models.kernels.checking import relative_error, replayed, upcast

EPS = 1e-5


@pytest.mark.parametrize(("inputs", "outputs"), [(1536, 16), (2048, 8), (2816, 8), (96, 16)])
def test_gemv(device, inputs, outputs) -> None:
    x, weight = torch.randn(1, inputs, device=device), torch.randn(2 * outputs, inputs, device=device) * inputs**-0.5
    bias, residual, norm = (torch.randn(s, device=device) for s in ((2 * outputs,), (1, 2 * outputs), (inputs,)))
    normed = rms_norm.reference(*upcast(x, norm), EPS)
    out = replayed(device, lambda: gemv.kernel(x, weight, bias, norm=(norm, EPS), residual=residual))
    expected = F.linear(normed, *upcast(weight, bias)) + residual.double().cpu()
    assert relative_error(out, expected) < 2e-6
    out = replayed(device, lambda: gemv.kernel(x, weight, norm=(norm, EPS), silu_mul=True))
    assert relative_error(out, silu_mul.reference(F.linear(normed, *upcast(weight)))) < 2e-6


@pytest.mark.parametrize("fan_out", [1, 3])
def test_gemv_of_chosen_weights(device, fan_out) -> None:
    x, weight = torch.randn(6 // fan_out, 96, device=device), torch.randn(5, 16, 96, device=device)
    index = torch.tensor([4, 0, 1, 1, 3, 4], device=device)
    out = replayed(device, lambda: gemv.kernel(x, weight, index=index, fan_out=fan_out))
    wide_x, wide_weight = upcast(x, weight)
    expected = torch.stack([wide_weight[int(e)] @ wide_x[i // fan_out] for i, e in enumerate(index)])
    assert relative_error(out, expected) < 2e-6


@pytest.mark.parametrize("normalise", [True, False])
def test_route_and_combine(device, normalise) -> None:
    router = SigmoidRouter(32, 12, 5, 2.5, normalise=normalise).requires_grad_(False)
    router.weight.normal_()
    router.bias.normal_(std=0.3)
    x = torch.randn(7, 32)
    expected_weights, expected_experts = router(x)
    logits = F.linear(x, router.weight).to(device)
    bias = router.bias.to(device)
    weights, experts = replayed(device, lambda: route.kernel(logits, bias, 5, 2.5, normalise))
    spread = torch.zeros(7, 12).scatter(1, experts.cpu(), weights.cpu())
    assert relative_error(spread, torch.zeros(7, 12).scatter(1, expected_experts, expected_weights)) < 1e-6
    chosen, shared = torch.randn(35, 700, device=device), torch.randn(7, 700, device=device)
    out = replayed(device, lambda: combine.kernel(chosen, weights, shared))
    wide_chosen, wide_weights, wide_shared = upcast(chosen, weights, shared)
    expected = torch.einsum("nkw,nk->nw", wide_chosen.view(7, 5, 700), wide_weights) + wide_shared
    assert relative_error(out, expected) < 1e-6


@pytest.mark.parametrize(("experts", "top_k"), [(12, 5), (128, 8)])
def test_route_softmax(device, experts, top_k) -> None:
    logits = 30 * torch.randn(7, experts)
    given = logits.to(device)
    weights, chosen = replayed(device, lambda: route_softmax.kernel(given, top_k))
    expected_weights, expected = route_softmax.reference(logits.double(), top_k)
    spread = torch.zeros(7, experts).scatter(1, chosen.cpu(), weights.cpu())
    assert relative_error(spread, torch.zeros(7, experts).double().scatter(1, expected, expected_weights)) < 1e-6


def test_a_row_of_nan_stays_inside_the_stack(device) -> None:
    logits = torch.full((2, 12), float("nan"), device=device)
    _, chosen = replayed(device, lambda: route_softmax.kernel(logits, 5))
    assert chosen.min() >= 0 and chosen.max() < 12


def test_rotate_and_cache_latent(device) -> None:
    q, kv = torch.randn(3, 5, 24 + 8, device=device), torch.randn(3, 40 + 8, device=device)
    weight, cos, sin = (torch.randn(s, device=device) for s in ((40,), (3, 4), (3, 4)))
    cache = torch.randn(10, 1, 48, device=device)
    slots = torch.tensor([7, 0, 4], device=device)
    expected_cache, expected = cache.cpu().clone(), torch.zeros(3, 5, 48)
    rotary = cos.cpu(), sin.cpu()
    rotate_and_cache_latent.reference(
        q.cpu(), kv.cpu(), weight.cpu(), EPS, rotary, expected, expected_cache, slots.cpu()
    )

    def run() -> torch.Tensor:
        query = torch.empty(3, 5, 48, device=device)
        rotate_and_cache_latent.kernel(q, kv, weight, EPS, (cos, sin), query, cache, slots)
        return query

    out = replayed(device, run)
    assert out[..., :40].isnan().all()
    assert relative_error(out[..., 40:], expected[..., 40:]) < 1e-6
    assert relative_error(cache, expected_cache) < 1e-6
