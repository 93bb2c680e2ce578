"""Gated GEMMs of many rows by persistent programs: what comes out, and which operands they are for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from models.layers.gemm import gemm as reference
from models.layers.kernels import gemm, persistent_gemm
from models.layers.kernels.gpu import INTERPRETER, Gpu
from tests.models.kernels.checking import relative_error, replayed, sixteen_bits, wide_in_place

LIMIT = 8e-3
H100, A100, B200 = INTERPRETER, Gpu("A100", (8, 0), 163 << 10, 108), Gpu("B200", (10, 0), 227 << 10, 148)


def operands(device: torch.device, rows: int, inputs: int, outputs: int) -> tuple[torch.Tensor, ...]:
    """x whose rows are not contiguous, weight and bias."""
    dtype = sixteen_bits(device)
    x, weight = torch.randn(rows, 2 * inputs, device=device), torch.randn(2 * outputs, inputs, device=device)
    return x.to(dtype)[:, inputs:], (weight * inputs**-0.5).to(dtype), torch.randn(2 * outputs, device=device).to(dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 128, 300])
def test_one_program_takes_tile_after_tile(
    device: torch.device, rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = dataclasses.replace(persistent_gemm.current_gpu(), num_sms=2)
    monkeypatch.setattr(persistent_gemm, "current_gpu", lambda: small)
    x, weight, offset = operands(device, rows, 128, 256)
    given = (x, weight, offset) if bias else (x, weight)
    out = replayed(device, lambda: persistent_gemm.persistent_gemm(*given))
    x, weight, *rest = wide_in_place(*given)
    assert relative_error(out, reference.reference(x, weight, rest[0] if rest else None, "silu_mul")) < LIMIT


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(span[1] - 24, *shape) for shape, spans in persistent_gemm.SM_90_PERSISTENT.items() for span in spans],
)
def test_at_size(rows: int, inputs: int, outputs: int) -> None:
    x, weight, bias = operands(torch.device("cuda"), rows, inputs, outputs)
    if torch.cuda.get_device_capability() == (9, 0):
        assert gemm.way_of("silu_mul", x, weight).kernel == "persistent"
    out = replayed(x.device, lambda: persistent_gemm.persistent_gemm(x, weight, bias))
    x, weight, bias = wide_in_place(x, weight, bias)
    assert relative_error(out, reference.reference(x, weight, bias, "silu_mul")) < LIMIT


@pytest.mark.parametrize(
    ("gpu", "rows", "outputs", "dtype", "kernel"),
    [
        (H100, 1024, 8960, torch.bfloat16, "persistent"),
        (H100, 2048, 8960, torch.float16, "persistent"),
        (H100, 2049, 8960, torch.bfloat16, "cublas"),
        (H100, 448, 8960, torch.bfloat16, "tiled"),
        (H100, 1024, 8960, torch.float32, "cublas"),
        (H100, 1024, 8832, torch.bfloat16, "cublas"),
        (A100, 1024, 8960, torch.bfloat16, "cublas"),
        (B200, 1024, 8960, torch.bfloat16, "cublas"),
    ],
)
def test_where_it_was_not_measured_cublas_multiplies(
    gpu: Gpu, rows: int, outputs: int, dtype: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.layers.kernels.gpu.probe", lambda: gpu)
    x, weight = (torch.empty(n, 1536, dtype=dtype, device="meta") for n in (rows, 2 * outputs))
    assert gemm.way_of("silu_mul", x, weight).kernel == kernel
