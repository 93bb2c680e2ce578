"""What the CPU computes in fewer operations than the references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from models.layers.gemm import gemm_add_norm, lay_out_for_host
from models.layers.norms import RMSNorm, add_rms_norm, rms_norm
from models.layers.packed import widen_inputs

EPS = 1e-5
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13}


def assert_close(out: Tensor, expected: Tensor) -> None:
    assert out.dtype in TOLERANCE
    torch.testing.assert_close(out.double(), expected.double(), atol=TOLERANCE[out.dtype], rtol=TOLERANCE[out.dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 1e4])
def test_norms(dtype: torch.dtype, scale: float) -> None:
    """Rows of zeros and rows that eps outweighs too; what a sum is added to stays as it was."""
    x, residual = (torch.randn(2, 11, 192).to(dtype) * scale for _ in range(2))
    weight, given = torch.randn(192).to(dtype), residual.clone()
    assert_close(rms_norm(x, weight, EPS), rms_norm.reference(x.double(), weight.double(), EPS))
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert_close(normed, rms_norm.reference(total.double(), weight.double(), EPS))
    assert torch.equal(residual, given)


@pytest.mark.parametrize("bias", [None, torch.linspace(-2, 2, 32)])
def test_norm_behind_a_gemm(bias: Tensor | None) -> None:
    x, weight, residual, norm = torch.randn(5, 48), torch.randn(32, 48) / 7, torch.randn(5, 32), torch.randn(32)
    normed, total = gemm_add_norm(x, weight, bias, residual, norm, EPS)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_close(total, expected + residual.double())
    assert_close(normed, rms_norm.reference(total.double(), norm.double(), EPS))


def test_a_norm_can_be_trained_outside_of_inference() -> None:
    """Its constants may have been made in inference mode first."""
    norm = RMSNorm(24, 3e-5)
    with torch.inference_mode():
        norm(torch.randn(2, 24))
    x = torch.randn(2, 24)
    norm(x).sum().backward()
    expected = torch.autograd.grad(rms_norm.reference(x, norm.weight, 3e-5).sum(), norm.weight)[0]
    assert norm.weight.grad is not None
    torch.testing.assert_close(norm.weight.grad, expected)


def test_layout_for_gemms() -> None:
    """Values stay; float32 alone moves."""
    module = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 4).bfloat16())
    before = [parameter.clone() for parameter in module.parameters()]
    lay_out_for_host(module)
    assert all(torch.equal(x, y) for x, y in zip(module.parameters(), before, strict=True))
    assert (module[0].weight.stride(), module[2].weight.stride()) == ((1, 10), (10, 1))


def test_widened_inputs_read_zeros() -> None:
    linear = nn.Linear(10, 3).requires_grad_(False)
    x = torch.randn(4, 10)
    expected = linear(x)
    widen_inputs(linear, 8)
    assert linear.in_features == 16 and linear.weight.shape == (3, 16)
    torch.testing.assert_close(linear(nn.functional.pad(x, (0, 6))), expected)
