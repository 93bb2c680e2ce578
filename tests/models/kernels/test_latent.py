"""The kernels that rotate queries, store latents and assemble keys against their references."""

from __future__ import annotations

import torch

from models.layers.mla import head_keys, rotate_and_cache_latent
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


def test_queries_and_latents_are_rotated_in_place(device) -> None:
    q, kv = torch.randn(3, 5, 24 + 8, device=device), torch.randn(3, 40 + 8, device=device)
    weight, cos, sin = (torch.randn(s, device=device) for s in ((40,), (3, 4), (3, 4)))
    cache, slots = torch.zeros(10, 1, 48, device=device), torch.tensor([7, 0, 4], device=device)
    expected_q, expected_kv, expected_cache = (part.cpu().clone() for part in (q, kv, cache))
    rotary = cos.cpu(), sin.cpu()
    rotate_and_cache_latent.reference(
        expected_q, expected_kv, weight.cpu(), EPS, rotary, expected_q, expected_cache, slots.cpu(), keep=True
    )
    assert torch.equal(expected_kv, expected_cache[[7, 0, 4], 0])
    assert not torch.equal(expected_q, q.cpu())
    sources = q.clone(), kv.clone()

    def run() -> torch.Tensor:
        q.copy_(sources[0])
        kv.copy_(sources[1])
        rotate_and_cache_latent.kernel(q, kv, weight, EPS, (cos, sin), q, cache, slots, keep=True)
        return torch.cat((q.flatten(), kv.flatten()))

    out = replayed(device, run)
    assert relative_error(out, torch.cat((expected_q.flatten(), expected_kv.flatten()))) < 1e-6
    assert relative_error(cache, expected_cache) < 1e-6
    assert torch.equal(q[..., :24].cpu(), sources[0][..., :24].cpu())


def test_keys_of_heads_are_assembled(device) -> None:
    up, rows = torch.randn(7, 5, 24 + 16, device=device), torch.randn(7, 40 + 8, device=device)
    out = replayed(device, lambda: head_keys.kernel(up, rows[:, 40:], 24))
    assert torch.equal(out.cpu(), head_keys.reference(up.cpu(), rows[:, 40:].cpu(), 24))
