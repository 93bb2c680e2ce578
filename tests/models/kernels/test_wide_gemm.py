"""GEMMs of many rows by persistent programs: what comes out, and which operands they are for."""

from __future__ import annotations

import pytest
import torch

from models.layers.gemm import gemm as reference
from models.layers.kernels import gemm, gemm_configs, wide_gemm
from models.layers.kernels.gemm_types import Kind
from models.layers.kernels.gpu import INTERPRETER, Gpu
from tests.models.kernels.checking import relative_error, replayed, wide_in_place

KINDS: tuple[Kind, ...] = ("silu_mul", "quick_gelu")
LIMIT = 8e-3
A100 = Gpu("A100", (8, 0), 163 << 10, 108)
B200 = Gpu("B200", (10, 0), 227 << 10, 148)


def operands(device: torch.device, rows: int, inputs: int, columns: int) -> tuple[torch.Tensor, ...]:
    """x whose rows are not contiguous, weight and bias."""
    # The interpreter has no bfloat16 arithmetic of its own; float16 takes the same paths.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    x, weight = torch.randn(rows, 2 * inputs, device=device), torch.randn(columns, inputs, device=device)
    return x.to(dtype)[:, inputs:], (weight * inputs**-0.5).to(dtype), torch.randn(columns, device=device).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 128, 300])
def test_one_program_takes_tile_after_tile(
    device: torch.device, kind: Kind, rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wide_gemm, "num_sms", lambda: 2)
    x, weight, offset = operands(device, rows, 128, 512)
    given = (x, weight, offset) if bias else (x, weight)
    out = replayed(device, lambda: wide_gemm.wide_gemm(kind, *given))
    x, weight, *rest = wide_in_place(*given)
    assert relative_error(out, reference.reference(x, weight, *rest, epilogue=kind)) < LIMIT


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "rows", "inputs", "columns"),
    [("silu_mul", 1024, 1536, 17920), ("silu_mul", 1000, 1280, 6912), ("quick_gelu", 8190, 1280, 5120)],
)
def test_at_size(kind: Kind, rows: int, inputs: int, columns: int) -> None:
    x, weight, bias = operands(torch.device("cuda"), rows, inputs, columns)
    assert gemm.way_of(kind, x, weight).kernel == "wide"
    out = replayed(x.device, lambda: gemm.gemm(x, weight, bias, kind))
    assert relative_error(out, reference.reference(*wide_in_place(x, weight, bias), epilogue=kind)) < LIMIT


def kernel_of(kind: Kind, rows: int, inputs: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> str:
    x, weight = (torch.empty(n, inputs, dtype=dtype, device="meta") for n in (rows, columns))
    with gemm_configs.using({}):
        return gemm.way_of(kind, x, weight).kernel


def test_where_tiles_leave_multiprocessors_idle_cublas_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.layers.kernels.gpu.probe", lambda: INTERPRETER)
    assert kernel_of("silu_mul", 384, 2048, 12288) == "cublas"  # 144 tiles for 132 multiprocessors
    assert kernel_of("silu_mul", 1024, 2048, 12288) == "wide"
    assert kernel_of("silu_mul", 384, 1536, 17920) == "wide"  # 210 tiles, of a short product
    assert kernel_of("silu_mul", 384, 4096, 24576) == "cublas"  # 288 tiles, of a long one
    assert kernel_of("quick_gelu", 8192, 1280, 5120) == "wide"
    assert kernel_of("quick_gelu", 1024, 1280, 5120) == "cublas"
    assert kernel_of("silu_mul", 64, 1536, 17920) == "tiled"
    assert kernel_of("silu_mul", 1024, 1536, 17920, torch.float32) == "cublas"
    assert kernel_of("silu_mul", 1024, 1536, 17920 + 64) == "cublas"


def test_what_the_table_was_measured_for_is_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local layers of 704 rows have no choice, since cuBLAS was faster."""
    monkeypatch.setattr("models.layers.kernels.gpu.probe", lambda: INTERPRETER)
    x, weight = (torch.empty(n, 1024, dtype=torch.bfloat16, device="meta") for n in (704, 8192))
    assert gemm.way_of("silu_mul", x, weight).kernel == "cublas"
    with gemm_configs.using({}):
        assert gemm.way_of("silu_mul", x, weight).kernel == "wide"
    assert gemm.way_of("silu_mul", x.repeat(3, 1), weight).kernel == "wide"


@pytest.mark.parametrize("gpu", [A100, B200], ids=lambda gpu: gpu.name)
def test_where_it_was_not_measured_cublas_multiplies(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.layers.kernels.gpu.probe", lambda: gpu)
    assert kernel_of("silu_mul", 1024, 1536, 17920) == "cublas"
