"""Latent attention: absorbed decode equals the unabsorbed prefill and a float64 formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.checkpoints.checkpoint import fill_random
from models.layers.mla import LatentAttention, LatentAttentionConfig, half_split_rows
from models.layers.rotary import inverse_frequencies, rotary_cos_sin, rotate_half_split
from tests.support.paged import PagedCache
from tests.support.rotation import rotate_interleaved

CONFIG = LatentAttentionConfig(hidden_size=48, num_heads=3, rank=20, nope_dim=12, rope_dim=8, value_dim=10)


def _rotary(start: int, stop: int) -> tuple[Tensor, Tensor]:
    return rotary_cos_sin(torch.arange(start, stop), inverse_frequencies(CONFIG.rope_dim, 10000.0))


def test_absorbed_decode_equals_unabsorbed_prefill() -> None:
    layer = LatentAttention(CONFIG).requires_grad_(False)
    fill_random(layer, 0)
    x = torch.randn(23, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1))
    whole = PagedCache([CONFIG.cache_spec], page_size=4)
    sequence = whole.new_sequence(23)
    expected = layer(x, _rotary(0, 23), 0, whole.batch(prefills=[(sequence, 23)]))
    stepwise = PagedCache([CONFIG.cache_spec], page_size=4)
    sequence = stepwise.new_sequence(23)
    outputs = [layer(x[:9], _rotary(0, 9), 0, stepwise.batch(prefills=[(sequence, 9)]))]
    outputs.append(layer(x[9:15], _rotary(9, 15), 0, stepwise.batch(prefills=[(sequence, 6)])))
    for row in range(15, 23):
        outputs.append(layer(x[row : row + 1], _rotary(row, row + 1), 0, stepwise.batch(decodes=[sequence])))
    torch.testing.assert_close(torch.cat(outputs), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("scale", [1.0, 0.002])
def test_prefill_against_float64(scale: float) -> None:
    """Latents of the small scale show the norm's eps, 1e-6 whatever rms_norm_eps says."""
    layer = LatentAttention(CONFIG).requires_grad_(False)
    fill_random(layer, 3)
    x = scale * torch.randn(11, CONFIG.hidden_size, generator=torch.Generator().manual_seed(4))
    cache = PagedCache([CONFIG.cache_spec], page_size=4)
    actual = layer(x, _rotary(0, 11), 0, cache.batch(prefills=[(cache.new_sequence(11), 11)]))
    exact = LatentAttention(CONFIG).double().requires_grad_(False)
    exact.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    upcast = x.double()
    q = exact.q(upcast).view(11, CONFIG.num_heads, -1)
    latent, k_rope = exact.kv_down(upcast).split((CONFIG.rank, CONFIG.rope_dim), -1)
    latent = latent / (latent.square().mean(-1, keepdim=True) + 1e-6).sqrt() * exact.latent_norm.weight
    up = exact.kv_up(latent).view(11, CONFIG.num_heads, -1)
    cos, sin = (table.double() for table in _rotary(0, 11))
    q_rope = rotate_half_split(q[..., CONFIG.nope_dim :], cos, sin).double()
    k_rope = rotate_half_split(k_rope[:, None], cos, sin).double().expand(-1, CONFIG.num_heads, -1)
    queries = torch.cat((q[..., : CONFIG.nope_dim], q_rope), -1)
    keys = torch.cat((up[..., : CONFIG.nope_dim], k_rope), -1)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * CONFIG.scale
    scores = scores.masked_fill(torch.ones(11, 11).triu(1).bool(), -torch.inf)
    attended = torch.einsum("hqk,khv->qhv", scores.softmax(-1), up[..., CONFIG.nope_dim :])
    assert (actual.double() - exact.out(attended.flatten(1))).abs().max() < 2e-5


def test_half_split_order_keeps_scores() -> None:
    weight = torch.randn(2 * (5 + 8), 16, generator=torch.Generator().manual_seed(5))
    permuted = weight.clone()
    half_split_rows(permuted, head_rows=13, rope_rows=8)
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(6))
    cos, sin = _rotary(0, 6)
    before = (x @ weight.T).view(6, 2, 13)
    after = (x @ permuted.T).view(6, 2, 13)
    assert torch.equal(before[..., :5], after[..., :5])
    interleaved = rotate_interleaved(before[..., 5:], cos, sin)
    halves = rotate_half_split(after[..., 5:], cos, sin)
    torch.testing.assert_close(
        torch.einsum("qhd,khd->hqk", interleaved, interleaved), torch.einsum("qhd,khd->hqk", halves, halves)
    )
