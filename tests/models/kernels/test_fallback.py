"""A kernel that the GPU does not take: its reference runs, is counted, and is named once."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from models.layers import op as ops
from models.layers.attention import attend_pages, attend_segments, rotary_paged_decode_attention
from models.layers.fused import concatenate, quantize, rotary_dense_attention, silu_mul
from models.layers.gemm import gemm, gemm_add_deferrable_norm, gemm_add_norm, gemv, narrow_gemm
from models.layers.kernels import (
    elementwise,
    latent,
    launch,
    moe,
    norms,
    packed,
    paged_decode,
    persistent_gemm,
    random,
    rotary,
    tiled_gemm,
    varlen,
)
from models.layers.kernels import gemv as gemv_kernels
from models.layers.kernels.gemm_configs import using
from models.layers.kernels.gemm_types import Choice, Kind, Shape, Tile, Variant
from models.layers.mla import head_keys, rotate_and_cache_latent
from models.layers.moe import combine, expert_places, route, route_softmax, router_logits, spread_rows
from models.layers.norms import QKNorm, add_rms_norm, rms_norm
from models.layers.one_segment import lengthen
from models.layers.op import FALLBACKS, CannotLaunch, Fallbacks
from models.layers.packed import add_table_rows, byte_lookup, residual_layer_norm, rotate_packed
from models.layers.random import philox_normal
from models.layers.rotary import rotary_cos_sin, rotate_and_cache
from models.voxcpm2.kernels import flow_solver, step_inputs, vae, vae_gemm
from models.voxcpm2.vae_layers import channel_gemm, residual_unit, snake_samples, snake_upsample
from service.engine.chat import filter_kernels, step_kernels
from service.engine.startup.compilations import Compilations
from service.graphs.observations import Observations
from tests.models.kernels.checking import relative_error

TILE = Tile(16, 32, 32, warps=4, stages=2)
EPS = 1e-5
MODULES = (
    elementwise, filter_kernels, flow_solver, gemv_kernels, latent, moe, norms, packed, paged_decode, random, rotary,
    step_inputs, step_kernels, tiled_gemm, vae, vae_gemm, varlen, persistent_gemm,
)  # fmt: skip


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR)


def half(*shape: int) -> Tensor:
    return rand(*shape).to(torch.float16)


GENERATOR = torch.Generator()
ROTARY = (torch.randn(4, 8).cos(), torch.randn(4, 8).sin())
SLOTS = torch.tensor([3, 5, 9, 17])
ENDS = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
TABLES = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]], dtype=torch.int32)
LENGTHS = torch.tensor([20, 3, 0, 32], dtype=torch.int32)
PLACES = torch.tensor([[3, 0], [1, 4], [5, 2]])


def decoded(current_kv: bool, norm: bool = False) -> tuple[Tensor, Tensor]:
    cache, values, q = rand(144, 2, 16), rand(144, 2, 16), rand(4, 4, 16)
    if not current_kv:
        return attend_pages.launch(q, cache, values, TABLES, LENGTHS, 16, 0.25), cache[1:]
    new = (rand(4, 2, 16), rand(4, 2, 16), ROTARY)
    slots = torch.tensor([35, 50, 0, 143])
    qk_norm = QKNorm(rand(16), rand(16), EPS) if norm else None
    out = rotary_paged_decode_attention.launch(q, *new, cache, values, slots, TABLES, LENGTHS, 16, qk_norm)
    return out, cache[1:]


def tabled(kind: Kind, outputs: int, run: Callable[[], Any], **how: Any) -> Any:
    """With a table that gives TILE to 64 inputs and as many outputs."""
    with using({Shape(kind, 64, outputs): (Choice(1, 99, Variant(TILE, **how)),)}):
        return run()


def persistent() -> Tensor:
    """Many rows with a gate behind them."""
    with patch.dict(persistent_gemm.SM_90_PERSISTENT, {(64, 128): ((129, 256),)}):
        return gemm.launch(half(130, 64), half(256, 64), half(256), "silu_mul")


def add_norm(**how: Any) -> Any:
    given = (half(5, 64), half(64, 64), half(64), half(5, 64), half(64), EPS)
    return tabled("add_norm", 64, lambda: gemm_add_norm.launch(*given), **how)


def deferred() -> tuple[Tensor, Tensor]:
    """A norm that waits, and the GEMM that makes up for it."""
    given = (half(5, 64), half(64, 64), None, half(5, 64), half(64), EPS)
    rows, total = tabled("add_norm", 64, lambda: gemm_add_deferrable_norm.launch(*given), deferred=True)
    return tabled("plain", 64, lambda: gemm.launch(rows, half(64, 64))), total


def rotated_in_place() -> Tensor:
    qkv = rand(4, 6, 16)
    rotate_packed.launch(qkv, 4, *ROTARY)
    return qkv


def cached(norm: bool = False) -> tuple[Tensor, ...]:
    keys, values = rand(20, 2, 16), rand(20, 2, 16)
    new = (rand(4, 4, 16), rand(4, 2, 16), rand(4, 2, 16))
    qk_norm = QKNorm(rand(16), rand(16), EPS) if norm else None
    made = rotate_and_cache.launch(*new, ROTARY, keys, values, SLOTS, qk_norm)
    return *made, keys, values


def cached_latent() -> tuple[Tensor, Tensor]:
    query, cache = torch.zeros(4, 3, 40), rand(20, 1, 40)
    q, kv = rand(4, 3, 32), rand(4, 40)
    rotate_and_cache_latent.launch(q, kv, rand(24), EPS, ROTARY, query, cache, SLOTS)
    return query, cache


def kept_latent() -> tuple[Tensor, Tensor, Tensor]:
    """Queries rotated and latents stored in place."""
    q, kv, cache = rand(4, 3, 32), rand(4, 40), rand(20, 1, 40)
    rotate_and_cache_latent.launch(q, kv, rand(24), EPS, ROTARY, q, cache, SLOTS, keep=True)
    return q, kv, cache


def residual_norm() -> tuple[Tensor, Tensor]:
    residual = rand(3, 96)
    return residual_layer_norm.launch(rand(3, 96), residual, rand(96), rand(96), EPS), residual


def with_table_rows() -> Tensor:
    x = rand(3, 96)
    add_table_rows.launch(x, rand(5, 96), torch.tensor([[0, 4], [2, 2], [3, 1]], dtype=torch.int32), rand(3, 2))
    return x


def chosen_experts() -> Tensor:
    """Weights of the experts by number: their order is free."""
    weights, experts = route.launch(rand(2, 5, 12), rand(12), 3, 2.5, True)
    return torch.zeros(5, 12).scatter(1, experts, weights)


def chosen_by_softmax() -> Tensor:
    weights, experts = route_softmax.launch(rand(2, 5, 12), 3)
    return torch.zeros(5, 12).scatter(1, experts, weights)


def channels(taps: int) -> Tensor:
    weight, out = rand(*((2,) if taps == 2 else ()), 64, 32), torch.empty(2, 6, 64)
    x = rand(2, 6, 64) if taps == 1 else None
    channel_gemm.launch(rand(2, 6 + taps - 1, 32), weight, rand(32 * (3 - taps)), x, out, 64, "ieee")
    return out


def unit() -> tuple[Tensor, Tensor]:
    """A residual unit, and where it leaves its stream's memory."""
    memory, x = rand(3, 32, 6), rand(2, 32, 5)
    alpha, depthwise, pointwise = rand(32).abs() + 0.5, rand(32, 1, 7), rand(32, 32, 1)
    rest = (depthwise, rand(32), 1, alpha, pointwise, rand(32), memory, torch.tensor([2, 1]))
    return residual_unit.launch(x, alpha, *rest, "ieee"), memory


CASES: dict[str, Callable[[], Any]] = {
    "gemm": lambda: tabled("plain", 64, lambda: gemm.launch(half(5, 64), half(64, 64), half(64))),
    "gemm and silu": lambda: tabled("silu_mul", 64, lambda: gemm.launch(half(5, 64), half(128, 64), None, "silu_mul")),
    "gemm and quick GELU": lambda: tabled(
        "quick_gelu", 64, lambda: gemm.launch(half(5, 64), half(64, 64), half(64), "quick_gelu")
    ),
    "gemm and silu of many rows": persistent,
    "gemm and quick GELU behind cuBLAS": lambda: gemm.launch(rand(5, 64), rand(64, 64), rand(64), "quick_gelu"),
    "gemm of one vector": lambda: gemm.launch(rand(1, 96), rand(16, 96), rand(16)),
    "narrow gemm": lambda: narrow_gemm.launch(rand(5, 96), rand(16, 96), rand(16)),
    "split-K and norm": lambda: add_norm(split=2),
    "deferred norm": deferred,
    "gemv": lambda: gemv.launch(rand(1, 96), rand(16, 96), rand(16), norm=(rand(96), EPS), residual=rand(1, 16)),
    "gemv of experts": lambda: gemv.launch(
        rand(2, 96), rand(5, 32, 96), index=torch.tensor([4, 0, 1, 1]), fan_out=2, silu_mul=True
    ),
    "rms_norm": lambda: rms_norm.launch(rand(3, 96), rand(96), EPS),
    "add_rms_norm": lambda: add_rms_norm.launch(rand(3, 96), rand(3, 96), rand(96), EPS),
    "silu_mul": lambda: silu_mul.launch(rand(3, 64)),
    "quantize": lambda: quantize.launch(rand(3, 64), 9),
    "concatenate": lambda: concatenate.launch(rand(3, 64), rand(3, 64)),
    "layer_norm": residual_norm,
    "rotate_packed": rotated_in_place,
    "lengthened heads": lambda: lengthen.launch(rand(4, 6, 16), *ROTARY, torch.tensor([0, 3], dtype=torch.int32), True),
    "byte_lookup": lambda: byte_lookup.launch(torch.arange(48, dtype=torch.uint8).view(2, 24), rand(3, 256)),
    "table rows": with_table_rows,
    "rotary_cos_sin": lambda: rotary_cos_sin.launch(
        torch.arange(12).view(3, 4), rand(8), torch.tensor([0, 1, 1, 2, 2, 0, 0, 0]), 1.5
    ),
    "route": chosen_experts,
    "softmax route": chosen_by_softmax,
    "combine": lambda: combine.launch(rand(6, 40), rand(2, 3), rand(2, 40)),
    "places of experts": lambda: expert_places.launch(torch.tensor([[3, 0], [1, 3], [3, 1]]), 5),
    "rows at places": lambda: spread_rows.launch(rand(3, 40), PLACES),
    "combine at places": lambda: combine.launch(rand(6, 40), rand(3, 2), rand(3, 40), PLACES),
    "latent": cached_latent,
    "latent in place": kept_latent,
    "keys of heads": lambda: head_keys.launch(rand(4, 3, 40), rand(4, 16), 24),
    "logits of a router": lambda: router_logits.launch(half(40, 64), rand(12, 64)).sum(0),
    "rotate_and_cache": cached,
    "rotate_and_cache with QK norm": lambda: cached(norm=True),
    "dense attention": lambda: rotary_dense_attention.launch(
        rand(2, 4, 4, 16), rand(2, 4, 2, 16), rand(2, 4, 2, 16), *ROTARY
    ),
    "ragged attention": lambda: attend_segments.launch(
        rand(7, 4, 16), rand(7, 2, 16), rand(7, 2, 16), ENDS, ENDS, 0.25, True
    ),
    "decode attention": lambda: decoded(current_kv=False),
    "decode attention with the current step's keys": lambda: decoded(current_kv=True),
    "decode attention with QK norm": lambda: decoded(current_kv=True, norm=True),
    "philox": lambda: philox_normal.launch(SLOTS, torch.arange(4, dtype=torch.int32), 16),
    "channels": lambda: channels(1),
    "transposed channels": lambda: channels(2),
    "residual unit": unit,
    "upsampling": lambda: snake_upsample.launch(
        rand(2, 32, 5), rand(32), rand(32), rand(32).abs() + 0.5, rand(32, 32, 4), rand(32), 2, precision="ieee"
    ),
    "samples": lambda: snake_samples.launch(rand(2, 32, 5), rand(32).abs() + 0.5, rand(1, 32, 7), rand(1)),
}


def tensors(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else list(made)


@pytest.fixture
def heard() -> Iterator[list[str]]:
    names: list[str] = []
    FALLBACKS.listener = names.append
    yield names
    FALLBACKS.listener = None


@pytest.mark.skipif(torch.cuda.is_available(), reason="operands lie on the CPU, for the interpreter")
@pytest.mark.parametrize("case", CASES)
def test_references_compute_what_kernels_do(case: str, heard: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    GENERATOR.manual_seed(5)
    expected = tensors(CASES[case]())
    assert not heard

    def refuse(kernel: Any, *args: Any, **options: Any) -> None:
        raise CannotLaunch(kernel.__name__, "too large")

    for module in MODULES:
        monkeypatch.setattr(module, "launch", refuse)
    GENERATOR.manual_seed(5)
    for out, reference in zip(tensors(CASES[case]()), expected, strict=True):
        assert out.dtype == reference.dtype
        assert out.shape == reference.shape
        assert relative_error(out, reference) < (4e-3 if out.dtype == torch.float16 else 1e-5)
    assert heard


class Kernel:
    """Stands for a kernel that takes some sizes."""

    arg_names = ("x", "BLOCK")
    __name__ = "_some_kernel"

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.asked: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._run

    def _run(self, x: Tensor, BLOCK: int) -> None:
        self.asked.append(BLOCK)
        if BLOCK > 64:
            raise self._error


UNFIT = (
    OutOfResources(102_400, 101_376, "shared memory"),
    CompilationError(None, None, "no such instruction"),
    RuntimeError("PassManager::run failed"),
)


@pytest.mark.parametrize("error", UNFIT, ids=lambda error: type(error).__name__)
def test_a_configuration_that_does_not_fit_is_asked_for_once(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_refused", {})
    kernel, x = Kernel(error), torch.zeros(3)
    for _ in range(2):
        with pytest.raises(CannotLaunch, match="_some_kernel cannot be launched on this GPU"):
            launch.launch(kernel, (1,), x, BLOCK=128)
        launch.launch(kernel, (1,), x, BLOCK=64)
    assert kernel.asked == [128, 64, 64]


def test_a_fault_of_the_device_is_no_reason_to_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_refused", {})
    kernel = Kernel(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            launch.launch(kernel, (1,), torch.zeros(3), BLOCK=128)
    assert kernel.asked == [128, 128]


def test_fallbacks_are_logged_once_for_each_kernel(caplog: pytest.LogCaptureFixture) -> None:
    fallbacks = Fallbacks()
    with caplog.at_level(logging.WARNING):
        for name in ("_a_kernel", "_b_kernel", "_a_kernel"):
            fallbacks.report(CannotLaunch(name, "Required: 102400, Hardware limit: 101376"))
    assert [message.split()[1] for message in caplog.messages] == ["_a_kernel", "_b_kernel"]
    assert "101376" in caplog.messages[0]


def test_the_engine_counts_fallbacks() -> None:
    observations = Observations()

    def run() -> str:
        raise CannotLaunch("_a_kernel", "too large")

    operation = ops.op(cuda="nowhere:kernel")(lambda: "reference")
    vars(operation)["kernel"] = run
    with Compilations(observations).counted(torch.device("cuda")):
        assert [operation.launch() for _ in range(2)] == ["reference"] * 2
    (event,) = observations.drain()
    assert (event.name, event.value, event.labels) == ("kernel_fallbacks_total", 2, {"kernel": "_a_kernel"})
    assert FALLBACKS.listener is None


def test_every_module_of_kernels_launches_through_the_door() -> None:
    """Nothing launches a kernel that could not be refused."""
    for module in MODULES:
        assert vars(importlib.import_module(module.__name__))["launch"] is launch.launch
