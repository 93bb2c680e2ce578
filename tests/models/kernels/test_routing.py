"""Routing of a mixture, and the sum of its experts, against their references."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from models.layers.moe import SigmoidRouter, combine, route, route_softmax, router_logits
from tests.models.kernels.checking import relative_error, replayed, upcast


@pytest.mark.parametrize("normalise", [True, False])
def test_route_and_combine(device, normalise) -> None:
    router = SigmoidRouter(32, 12, 5, 2.5, normalise=normalise).requires_grad_(False)
    router.weight.normal_()
    router.bias.normal_(std=0.3)
    x = torch.randn(7, 32)
    expected_weights, expected_experts = router(x)
    halves = F.linear(x[:, :16], router.weight[:, :16]), F.linear(x[:, 16:], router.weight[:, 16:])
    logits = torch.stack(halves).to(device)
    bias = router.bias.to(device)
    weights, experts = replayed(device, lambda: route.kernel(logits, bias, 5, 2.5, normalise))
    spread = torch.zeros(7, 12).scatter(1, experts.cpu(), weights.cpu())
    assert relative_error(spread, torch.zeros(7, 12).scatter(1, expected_experts, expected_weights)) < 1e-6
    chosen, shared = torch.randn(35, 700, device=device), torch.randn(7, 700, device=device)
    out = replayed(device, lambda: combine.kernel(chosen, weights, shared))
    wide_chosen, wide_weights, wide_shared = upcast(chosen, weights, shared)
    expected = torch.einsum("nkw,nk->nw", wide_chosen.view(7, 5, 700), wide_weights) + wide_shared
    assert relative_error(out, expected) < 1e-6


@pytest.mark.parametrize(
    ("rows", "width", "splits"), [(5, 2048, 32), (40, 200, 4), (100, 512, 8), (600, 2048, 16), (1100, 64, 1)]
)
def test_logits_are_as_exact_as_in_float32(device, rows, width, splits) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # The interpreter multiplies no bfloat16.
    x = torch.randn(rows, width + 8, device=device, dtype=dtype)[:, :width]
    weight = torch.randn(12, width, device=device)
    out = replayed(device, lambda: router_logits.kernel(x, weight))
    assert out.shape == (splits, rows, 12)
    assert relative_error(out.sum(0), x.double() @ weight.double().T) < 2e-6


@pytest.mark.parametrize(("experts", "top_k"), [(12, 5), (128, 8)])
def test_route_softmax(device, experts, top_k) -> None:
    logits = 30 * torch.randn(3, 7, experts)
    given = logits.to(device)
    weights, chosen = replayed(device, lambda: route_softmax.kernel(given, top_k))
    expected_weights, expected = route_softmax.reference(logits.double(), top_k)
    spread = torch.zeros(7, experts).scatter(1, chosen.cpu(), weights.cpu())
    assert relative_error(spread, torch.zeros(7, experts).double().scatter(1, expected, expected_weights)) < 1e-6


def test_a_row_of_nan_stays_inside_the_stack(device) -> None:
    logits = torch.full((1, 2, 12), float("nan"), device=device)
    _, chosen = replayed(device, lambda: route_softmax.kernel(logits, 5))
    assert chosen.min() >= 0 and chosen.max() < 12
