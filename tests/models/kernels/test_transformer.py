"""The kernels of transformer blocks against their references: norms, linear layers, activations, rotation."""

from __future__ import annotations

import pytest
import torch

from models.layers.fused import rotary_dense_attention, silu_mul
from models.layers.kernels.tiled_gemm import split_gemm_add_norm, tiled_gemm
from models.layers.norms import QKNorm, add_rms_norm, rms_norm
from models.layers.rotary import rotate_and_cache, rotate_half_split
from tests.models.kernels.checking import relative_error, replayed, wide_in_place

EPS = 1e-5


@pytest.fixture
def kind(device) -> torch.dtype:
    """The interpreter has no bfloat16 arithmetic of its own; float16 takes the same paths."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16


LIMIT = 8e-3


@pytest.mark.parametrize(("rows", "width"), [(3, 96), (22, 1024)])
def test_norms(device, rows, width) -> None:
    x, residual, weight = (torch.randn(shape, device=device) for shape in ((rows, width), (rows, width), (width,)))
    out = replayed(device, lambda: rms_norm.kernel(x, weight, EPS))
    assert relative_error(out, rms_norm.reference(*wide_in_place(x, weight), EPS)) < 1e-6
    normed, total = replayed(device, lambda: add_rms_norm.kernel(x, residual, weight, EPS))
    expected_normed, expected_total = add_rms_norm.reference(*wide_in_place(x, residual, weight), EPS)
    assert relative_error(normed, expected_normed) < 1e-6
    assert relative_error(total, expected_total) < 1e-6


def test_norm_rounds_like_its_reference(device, kind) -> None:
    x, residual, weight = (torch.randn(s, device=device).to(kind) for s in ((5, 96), (5, 96), (96,)))
    normed, total = replayed(device, lambda: add_rms_norm.kernel(x, residual, weight, EPS))
    expected_normed, expected_total = add_rms_norm.reference(x, residual, weight, EPS)
    torch.testing.assert_close(total, expected_total, rtol=0, atol=0)
    # rsqrt may differ in its last bit, which moves a rounding now and then.
    assert (normed != expected_normed).float().mean() < 0.02


def test_residuals_need_not_lie_together(device) -> None:
    """The kept rows of every sequence: a view with gaps."""
    whole, weight = torch.randn(3, 11, 96, device=device), torch.randn(96, device=device)
    for residual in (whole[:, 7:11], whole[:, ::3], whole.transpose(0, 1)):
        x = torch.randn(residual.shape, device=device)
        normed, total = replayed(device, lambda: add_rms_norm.kernel(x, residual, weight, EPS))  # noqa: B023
        expected_normed, expected_total = add_rms_norm.reference(*wide_in_place(x, residual, weight), EPS)
        assert relative_error(normed, expected_normed) < 1e-6
        assert relative_error(total, expected_total) < 1e-6


@pytest.mark.parametrize("rows", [1, 5, 22])
@pytest.mark.parametrize(("inputs", "width", "split"), [(256, 128, 2), (384, 64, 3), (256, 128, 1)])
def test_linear(device, kind, rows, inputs, width, split) -> None:
    x = torch.randn(rows, inputs, device=device).to(kind)
    weight = (torch.randn(width, inputs, device=device) * inputs**-0.5).to(kind)
    bias, residual, norm_weight = (torch.randn(s, device=device).to(kind) for s in ((width,), (rows, width), (width,)))
    product = torch.nn.functional.linear(*wide_in_place(x, weight))
    out = replayed(device, lambda: tiled_gemm(x, weight, bias))
    assert relative_error(out, product + bias.double()) < LIMIT
    out = replayed(device, lambda: tiled_gemm(x, weight, epilogue="silu_mul"))
    assert relative_error(out, silu_mul.reference(product)) < LIMIT
    normed, total = replayed(
        device, lambda: split_gemm_add_norm(x, weight, bias, residual, norm_weight, EPS, split=split)
    )
    expected = add_rms_norm.reference(product + bias.double(), *wide_in_place(residual, norm_weight), EPS)
    assert relative_error(normed, expected[0]) < LIMIT
    assert relative_error(total, expected[1]) < LIMIT


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 22, 64, 88])
@pytest.mark.parametrize(("inputs", "width"), [(1024, 2560), (2048, 1024), (4096, 1024), (6144, 2048), (8960, 1536)])
def test_linear_at_size(rows, inputs, width) -> None:
    device = torch.device("cuda")
    x = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16)
    weight = torch.randn(width, inputs, device=device, dtype=torch.bfloat16) * inputs**-0.5
    residual = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    norm_weight = torch.randn(width, device=device, dtype=torch.bfloat16)
    product = x.double() @ weight.double().T
    assert relative_error(replayed(device, lambda: tiled_gemm(x, weight, None)), product) < LIMIT
    assert (
        relative_error(
            replayed(device, lambda: tiled_gemm(x, weight, epilogue="silu_mul")), silu_mul.reference(product)
        )
        < LIMIT
    )
    normed, total = replayed(device, lambda: split_gemm_add_norm(x, weight, None, residual, norm_weight, EPS))
    expected = add_rms_norm.reference(product, residual.double(), norm_weight.double(), EPS)
    assert relative_error(normed, expected[0]) < LIMIT
    assert relative_error(total, expected[1]) < LIMIT


def test_silu_mul(device) -> None:
    x = torch.randn(3, 2, 1024, device=device)
    assert relative_error(replayed(device, lambda: silu_mul.kernel(x)), silu_mul.reference(*wide_in_place(x))) < 1e-6


@pytest.mark.parametrize(
    ("sequences", "length", "heads", "kv_heads", "width", "first", "heads_here"),
    [(3, 11, 4, 2, 16, 0, 1), (2, 11, 4, 2, 16, 7, 2), (2, 5, 4, 2, 12, 0, None), (2, 11, 16, 2, 128, 0, 8)],
)
def test_local_attention(device, sequences, length, heads, kv_heads, width, first, heads_here) -> None:
    qkv = torch.randn(sequences, length, heads + 2 * kv_heads, width, device=device)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=2)
    q = q[:, first:]
    cos, sin = torch.randn(length, width // 2, device=device), torch.randn(length, width // 2, device=device)
    out = replayed(device, lambda: rotary_dense_attention.kernel(q, k, v, cos, sin, first, heads_here=heads_here))
    reference = rotary_dense_attention.reference(*wide_in_place(q, k, v, cos, sin), first)
    assert relative_error(out, reference) < 2e-6


@pytest.mark.gpu
@pytest.mark.parametrize("sequences", [2, 16, 128])
@pytest.mark.parametrize("length", [5, 11])
def test_local_attention_at_size(sequences, length) -> None:
    device = torch.device("cuda")
    qkv = torch.randn(sequences, length, 20, 128, device=device, dtype=torch.bfloat16)
    q, k, v = qkv.split((16, 2, 2), dim=2)
    angles = torch.rand(length, 64, device=device) * 6
    cos, sin = angles.cos(), angles.sin()
    out = replayed(device, lambda: rotary_dense_attention.kernel(q, k, v, cos, sin, 0))
    reference = rotary_dense_attention.reference(*wide_in_place(q, k, v, cos, sin), 0)
    assert relative_error(out, reference) < LIMIT


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 16), (3, 1, 24)])
def test_rotate_and_cache(device, rotate, norm, heads, kv_heads, width) -> None:
    qkv = torch.randn(4, heads + 2 * kv_heads, width, device=device)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    cos, sin = torch.randn(2, 4, width // 2, device=device)
    k_cache, v_cache = torch.randn(2, 10, kv_heads, width, device=device)
    k_before = k_cache.clone()
    slots = torch.tensor([3, 0, 7, 9], device=device)
    rotary = (cos, sin) if rotate else None
    qk_norm = QKNorm(*torch.randn(2, width, device=device), EPS) if norm else None
    out, keys = replayed(device, lambda: rotate_and_cache.kernel(q, k, v, rotary, k_cache, v_cache, slots, qk_norm))
    wanted = wide_in_place(q, k)
    if qk_norm is not None:
        q_weight, k_weight = wide_in_place(qk_norm.q, qk_norm.k)
        wanted = rms_norm.reference(wanted[0], q_weight, EPS), rms_norm.reference(wanted[1], k_weight, EPS)
    if rotate:
        wanted = rotate_half_split(wanted[0], cos, sin), rotate_half_split(wanted[1], cos, sin)
    assert relative_error(out, wanted[0]) < 1e-6
    assert relative_error(keys, wanted[1]) < 1e-6
    assert torch.equal(k_cache[slots], keys)
    assert torch.equal(v_cache[slots], v)
    untouched = [1, 2, 4, 5, 6, 8]
    assert torch.equal(k_cache[untouched], k_before[untouched])
