"""Gated attention, and the shared expert with a gate, against their formulas in float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.checkpoints.checkpoint import fill_random
from models.layers.gated_attention import GatedAttention
from models.layers.kv_cache import CacheSpec, PagedBatch
from models.layers.mlp import SwiGLU
from models.layers.moe import Experts, MixtureOfExperts, SoftmaxRouter
from models.layers.norms import RMSNorm, rms_norm
from models.layers.rotary import inverse_frequencies, rotary_cos_sin

HIDDEN, HEADS, KV_HEADS, WIDTH, ROTATED, EPS = 24, 4, 2, 16, 4, 1e-6


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotated(x: Tensor) -> Tensor:
    """The first ROTATED values of each head [rows, heads, WIDTH] by its row's number."""
    out = x.clone()
    for row in range(len(x)):
        for j in range(ROTATED // 2):
            angle = torch.tensor(row / 100.0 ** (2 * j / ROTATED), dtype=torch.float64)
            a, b = x[row, :, j], x[row, :, j + ROTATED // 2]
            out[row, :, j] = a * angle.cos() - b * angle.sin()
            out[row, :, j + ROTATED // 2] = b * angle.cos() + a * angle.sin()
    return out


def test_gated_attention() -> None:
    rows = 7
    layer = GatedAttention(HIDDEN, HEADS, KV_HEADS, WIDTH, EPS).requires_grad_(False)
    fill_random(layer, 0)
    x = torch.randn(rows, HIDDEN)
    caches = [CacheSpec({"k": (KV_HEADS, WIDTH), "v": (KV_HEADS, WIDTH)}).allocate(2, 16, x.device, x.dtype)]
    bounds = torch.tensor([0, rows], dtype=torch.int32)
    batch = PagedBatch(caches, 16, 16 + torch.arange(rows), cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    rotary = rotary_cos_sin(torch.arange(rows), inverse_frequencies(ROTATED, 100.0))
    out = layer(x, rotary, 0, batch)

    q_and_gate, k, v = (x.double() @ layer.qkv.weight.double().T).split(
        [2 * HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH], dim=1
    )
    q, gate = q_and_gate.view(rows, HEADS, 2, WIDTH).unbind(2)
    q = rotated(normed(q, layer.q_norm.weight.double()))
    k = rotated(normed(k.view(rows, KV_HEADS, WIDTH), layer.k_norm.weight.double()))
    v = v.view(rows, KV_HEADS, WIDTH)
    expected = torch.zeros(rows, HEADS, WIDTH, dtype=torch.float64)
    for row in range(rows):
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            weights = torch.softmax(k[: row + 1, shared] @ q[row, head] / WIDTH**0.5, dim=0)
            expected[row, head] = weights @ v[: row + 1, shared] / (1 + torch.exp(-gate[row, head]))
    torch.testing.assert_close(out.double(), expected.flatten(1), rtol=0, atol=1e-6)


def test_a_float32_weight_multiplies_before_the_only_rounding() -> None:
    x, norm = torch.randn(3, 64).bfloat16(), RMSNorm(64, EPS, float32=True)
    assert norm.float32_parameters == {"weight"} and not RMSNorm(64, EPS).float32_parameters
    weight = 1 + 1e-3 * torch.randn(64)
    expected = normed(x.double(), weight.double()).bfloat16()
    assert torch.equal(rms_norm(x, weight, EPS), expected)
    assert not torch.equal(rms_norm(x, weight.bfloat16(), EPS), expected)


def test_the_shared_expert_has_its_gate() -> None:
    shared, gate = SwiGLU(HIDDEN, 16), nn.Linear(HIDDEN, 1, bias=False)
    layer = MixtureOfExperts(SoftmaxRouter(HIDDEN, 4, 2), Experts(4, HIDDEN, 8), shared, gate).requires_grad_(False)
    fill_random(layer, 0)
    x = torch.randn(5, HIDDEN)
    routed = MixtureOfExperts(layer.router, layer.experts)(x)
    expected = routed + shared(x) / (1 + torch.exp(-gate(x)))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-6)
