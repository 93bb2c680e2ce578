"""The kernel that rotates queries and stores latents against its reference."""

from __future__ import annotations

import torch

from models.layers.mla import rotate_and_cache_latent
from tests.models.kernels.checking import relative_error, replayed

EPS = 1e-5


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
