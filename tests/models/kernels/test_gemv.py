"""The GEMV kernel against its reference: with what stands before and behind it, and with weights of its own for each
row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from models.layers.fused import silu_mul
from models.layers.gemm import gemv
from models.layers.norms import rms_norm
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
    for given in ((weight,), (weight, bias)):
        out = replayed(device, lambda: gemv.kernel(x, *given, norm=(norm, EPS), silu_mul=True))  # noqa: B023
        assert relative_error(out, silu_mul.reference(F.linear(normed, *upcast(*given)))) < 2e-6


@pytest.mark.parametrize("fan_out", [1, 3])
def test_gemv_of_chosen_weights(device, fan_out) -> None:
    x, weight = torch.randn(6 // fan_out, 96, device=device), torch.randn(5, 16, 96, device=device)
    index = torch.tensor([4, 0, 1, 1, 3, 4], device=device)
    out = replayed(device, lambda: gemv.kernel(x, weight, index=index, fan_out=fan_out))
    wide_x, wide_weight = upcast(x, weight)
    expected = torch.stack([wide_weight[int(e)] @ wide_x[i // fan_out] for i, e in enumerate(index)])
    assert relative_error(out, expected) < 2e-6
