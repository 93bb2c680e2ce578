"""Attention of every kind against naive float64 loops and formulas, on buffers poisoned with NaN."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.checkpoints.checkpoint import fill_random
from models.layers.attention import cached_attention, varlen_attention
from models.layers.kv_cache import CacheSpec
from models.layers.mla import LatentAttention, LatentAttentionConfig
from models.layers.norms import RMSNorm, rms_norm
from models.layers.rotary import inverse_frequencies, rotary_cos_sin, rotate_half_split
from tests.support.paged import PagedCache


def naive(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """One sequence, float64: q [nq, Hq, D], k and v [nk, Hkv, ...]; the last query meets the last key."""
    group = q.shape[1] // k.shape[1]
    scale = scale or 1 / math.sqrt(q.shape[-1])
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[-1], dtype=torch.float64)
    for row in range(q.shape[0]):
        visible = k.shape[0] - q.shape[0] + row + 1 if causal else k.shape[0]
        if visible <= 0:
            continue
        for head in range(q.shape[1]):
            scores = k[:visible, head // group].double() @ q[row, head].double() * scale
            out[row, head] = torch.softmax(scores, 0) @ v[:visible, head // group].double()
    return out


def cu(lengths: list[int], tail: int = 0) -> Tensor:
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    return torch.tensor(sums + [sums[-1]] * tail, dtype=torch.int32)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    cached=st.integers(0, 6),
    tail=st.integers(0, 3),
    poisoned=st.integers(0, 4),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    causal=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_varlen_matches_naive(
    lengths: list[int], cached: int, tail: int, poisoned: int, heads: tuple[int, int], causal: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    key_lengths = [length + cached for length in lengths]
    q = torch.randn(sum(lengths) + poisoned, heads[0], 8, generator=generator)
    k = torch.randn(sum(key_lengths) + poisoned, heads[1], 8, generator=generator)
    v = torch.randn(sum(key_lengths) + poisoned, heads[1], 6, generator=generator)
    for values, real in ((q, sum(lengths)), (k, sum(key_lengths)), (v, sum(key_lengths))):
        values[real:] = float("nan")
    out = varlen_attention(q, k, v, cu(lengths, tail), cu(key_lengths, tail), causal=causal)
    assert torch.equal(out[sum(lengths) :], torch.zeros(poisoned, heads[0], 6)), "rows of no segment are zero"
    start_q = start_k = 0
    for length, key_length in zip(lengths, key_lengths, strict=True):
        rows, keys = slice(start_q, start_q + length), slice(start_k, start_k + key_length)
        expected = naive(q[rows], k[keys], v[keys], causal=causal)
        torch.testing.assert_close(out[rows].double(), expected, atol=1e-5, rtol=1e-5)
        start_q, start_k = start_q + length, start_k + key_length


@pytest.mark.parametrize("rotate", [False, True])
def test_cached_attention_of_decode_rows_and_chunked_prefills(rotate: bool) -> None:
    torch.manual_seed(2)
    cache = PagedCache([CacheSpec({"k": (1, 8), "v": (1, 8)})], num_pages=24, page_size=4)
    steps = {"decode": [6, 0, 1, 0, 1], "chunked": [4, 5, 0, 3, 0], "late": [0, 7, 0, 2, 0]}
    totals = {name: sum(counts) for name, counts in steps.items()}
    full = {name: [torch.randn(total, heads, 8) for heads in (2, 1, 1)] for name, total in totals.items()}
    angles = {name: torch.rand(total, 4) * 6 for name, total in totals.items()}
    sequences = {name: cache.new_sequence(total) for name, total in totals.items()}
    got: dict[str, list[Tensor]] = {name: [] for name in steps}
    for step in range(5):
        decodes = ["decode"] if step in (2, 4) else []
        prefills = [name for name in steps if name not in decodes and steps[name][step]]
        starts = {name: sequences[name].length for name in (*decodes, *prefills)}
        batch = cache.batch(
            [sequences[name] for name in decodes], [(sequences[name], steps[name][step]) for name in prefills]
        )
        q, k, v = (
            torch.cat([full[name][part][starts[name] : starts[name] + steps[name][step]] for name in starts])
            for part in range(3)
        )
        here = torch.cat([angles[name][starts[name] : starts[name] + steps[name][step]] for name in starts])
        out = cached_attention(q, k, v, 0, batch, (here.cos(), here.sin()) if rotate else None)
        for name, rows in zip(starts, out.split([steps[name][step] for name in starts]), strict=True):
            got[name].append(rows)
    for name, (q, k, v) in full.items():
        if rotate:
            q, k = (rotate_half_split(x, angles[name].cos(), angles[name].sin()) for x in (q, k))
        torch.testing.assert_close(torch.cat(got[name]).double(), naive(q, k, v, causal=True), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pictures", [1, 8])
def test_a_picture_costs_the_same_in_a_batch(pictures: int) -> None:
    """Pairs of rows of different pictures are not computed."""
    patches, heads, width = 64, 2, 16
    segments = cu([patches] * pictures)
    q = torch.randn(patches * pictures, heads, width)
    with torch.profiler.profile(with_flops=True, record_shapes=True) as profile:
        varlen_attention(q, q, q, segments, segments)
    calls = [event for event in profile.events() if event.name == "aten::scaled_dot_product_attention"]
    assert [call.input_shapes[0] for call in calls] == [[1, heads, patches, width]] * pictures


EPS = 1e-6


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def test_a_float32_weight_multiplies_before_the_only_rounding() -> None:
    x, norm = torch.randn(3, 64).bfloat16(), RMSNorm(64, EPS, float32=True)
    assert norm.float32_parameters == {"weight"} and not RMSNorm(64, EPS).float32_parameters
    weight = 1 + 1e-3 * torch.randn(64)
    expected = normed(x.double(), weight.double()).bfloat16()
    assert torch.equal(rms_norm(x, weight, EPS), expected)
    assert not torch.equal(rms_norm(x, weight.bfloat16(), EPS), expected)


CONFIG = LatentAttentionConfig(hidden_size=48, num_heads=3, rank=20, nope_dim=12, rope_dim=8, value_dim=10)


def _rotary(start: int, stop: int) -> tuple[Tensor, Tensor]:
    return rotary_cos_sin(torch.arange(start, stop), inverse_frequencies(CONFIG.rope_dim, 10000.0))


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
