"""Attention on the CPU against the references, which are checked with the kernels."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.layers.attention import attend_pages, attend_segments, paged_decode_attention, varlen_attention

NAN = float("nan")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float64: 1e-12}
HEADS = [(4, 4, 12, 12), (4, 2, 16, 16), (6, 1, 24, 16)]
"""Query heads, key heads, their width, width of values."""


def ends(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def assert_close(out: Tensor, reference: Tensor) -> None:
    assert out.shape == reference.shape
    torch.testing.assert_close(out.double(), reference.double(), atol=TOLERANCE[out.dtype], rtol=TOLERANCE[out.dtype])


@settings(deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5),
    heads=st.sampled_from(HEADS),
    causal=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
    unused=st.integers(0, 3),
)
def test_packed_segments(
    lengths: list[tuple[int, int]], heads: tuple[int, int, int, int], causal: bool, dtype: torch.dtype, unused: int
) -> None:
    """Any lengths, queries without a key among them; rows of no segment may hold anything, and give zeros."""
    cu_q, cu_k = ends([n for n, _ in lengths]), ends([m for _, m in lengths])
    rows, keys = int(cu_q[-1]), int(cu_k[-1])
    query_heads, key_heads, width, value_width = heads
    torch.manual_seed(rows)
    q = torch.randn(rows + unused, query_heads, width).to(dtype)
    k = torch.randn(keys + unused, key_heads, width).to(dtype)
    v = torch.randn(keys + unused, key_heads, value_width).to(dtype)
    q[rows:], k[keys:], v[keys:] = NAN, NAN, NAN
    scale = width**-0.5
    out = varlen_attention(q, k, v, cu_q, cu_k, scale=scale, causal=causal)
    upcast = (x.double().nan_to_num(0.0) for x in (q, k, v))
    assert_close(out, attend_segments.reference(*upcast, cu_q, cu_k, scale, causal))
    assert not out[rows:].any()


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    heads=st.sampled_from(HEADS),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_pages(lengths: list[int], heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """What no sequence has written is never read: pages of others, and the rest of its own last page."""
    page, most = 8, 5
    query_heads, key_heads, width, value_width = heads
    torch.manual_seed(sum(lengths))
    cache = torch.full((page * (1 + most * len(lengths)), key_heads, width), NAN, dtype=dtype)
    tables = torch.randperm(most * len(lengths)).int().view(len(lengths), most) + 1
    for table, length in zip(tables, lengths, strict=True):
        for position in range(length):
            cache[int(table[position // page]) * page + position % page] = torch.randn(key_heads, width).to(dtype)
    values = cache[..., :value_width]
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    q = torch.randn(len(lengths), query_heads, width).to(dtype)
    scale = width**-0.5
    out = paged_decode_attention(q, cache, values, tables, seq_lens, page, scale=scale)
    upcast = (x.double().nan_to_num(0.0) for x in (q, cache, values))
    assert_close(out, attend_pages.reference(*upcast, tables, seq_lens, page, scale))


@pytest.mark.parametrize("pictures", [1, 8])
def test_a_picture_costs_the_same_in_a_batch(pictures: int) -> None:
    """Pairs of rows of different pictures are not computed."""
    patches, heads, width = 64, 2, 16
    cu = ends([patches] * pictures)
    q = torch.randn(patches * pictures, heads, width)
    with torch.profiler.profile(with_flops=True, record_shapes=True) as profile:
        varlen_attention(q, q, q, cu, cu)
    calls = [event for event in profile.events() if event.name == "aten::scaled_dot_product_attention"]
    assert [call.input_shapes[0] for call in calls] == [[1, heads, patches, width]] * pictures


def test_the_first_call_does_not_bring_in_the_compiler() -> None:
    program = """
import sys
import torch
from models.layers.attention import varlen_attention
q, ends = torch.ones(3, 2, 4), torch.tensor([0, 3], dtype=torch.int32)
with torch.inference_mode():
    varlen_attention(q, q, q, ends, ends)
sys.exit("torch._dynamo" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
