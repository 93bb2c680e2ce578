"""Every operation's kernel against its reference, at sizes that are data: one in `make test`, others in `make test-all`
and on a GPU. Where a kernel cannot be launched, the reference runs and is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from models.interfaces.resizing import bicubic_weights
from models.layers.attention import paged_decode_attention, rotary_paged_decode_attention, varlen_attention
from models.layers.dense_segments import lengthen
from models.layers.fused import quantize, rotary_dense_attention, sigmoid_mul, silu_mul
from models.layers.gated_delta import causal_conv, delta_chunks, delta_step, gated_norm, pending_conv
from models.layers.gemm import gemm, gemm_add_norm, gemv, narrow_gemm
from models.layers.kernels import (
    elementwise,
    gated_delta,
    latent,
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
from models.layers.kernels import resample as resample_kernels
from models.layers.kernels.gemm_configs import using
from models.layers.kernels.gemm_types import Choice, Kind, Shape, Tile, Variant
from models.layers.kv_cache import StateRows
from models.layers.mla import head_keys, rotate_and_cache_latent
from models.layers.moe import combine, expert_places, route, router_logits, spread_rows
from models.layers.norms import QKNorm, add_rms_norm, rms_norm
from models.layers.op import FALLBACKS, CannotLaunch
from models.layers.packed import add_table_rows, byte_lookup, residual_layer_norm, rotate_packed, window_attention
from models.layers.random import philox_normal
from models.layers.resample import resample
from models.layers.rotary import rotary_cos_sin, rotate_and_cache
from models.voxcpm2.kernels import step, vae
from models.voxcpm2.vae_layers import channel_gemm, residual_unit, snake_samples, snake_upsample
from service.engine.chat import step_kernels
from tests.models.kernels.checking import poisoned_allocations, relative_error, replayed
from tests.support.slow import slow

TILE = Tile(16, 32, 32, warps=4, stages=2)
EPS = 1e-5
MODULES = (
    elementwise, gated_delta, gemv_kernels, latent, moe, norms, packed, paged_decode,
    random, rotary, step, step_kernels, tiled_gemm, vae, varlen, persistent_gemm, resample_kernels,
)  # fmt: skip


class Draw:
    """Where operands lie, and how many times as wide they are."""

    device = torch.device("cpu")
    scale = 1
    generator = torch.Generator()


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, generator=Draw.generator).to(Draw.device)


def faint(*shape: int) -> Tensor:
    """So small that the epsilon of a norm shows."""
    return 0.01 * rand(*shape)


def half(*shape: int) -> Tensor:
    """The interpreter has no bfloat16 arithmetic of its own; float16 takes the same paths."""
    return rand(*shape).to(torch.bfloat16 if Draw.device.type == "cuda" else torch.float16)


def w(width: int) -> int:
    return width * Draw.scale


def ints(values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=Draw.device)


def rotary(half: int = 8, rows: int = 4) -> tuple[Tensor, Tensor]:
    angles = rand(rows, half)
    return angles.cos(), angles.sin()


SLOTS = [3, 5, 9, 17]
TABLES = [[1, 2], [3, 4], [5, 6], [7, 8]]
LENGTHS = [20, 3, 0, 32]
PLACES = [[3, 0], [1, 4], [5, 2]]


def decoded(current_kv: bool, norm: bool = False, half: int = 8) -> tuple[Tensor, Tensor]:
    cache, values, q = rand(144, 2, 16), rand(144, 2, 16), rand(4, 4, 16)
    if not current_kv:
        return paged_decode_attention.launch(
            q, cache, values, ints(TABLES, torch.int32), ints(LENGTHS, torch.int32), 16, 0.25
        ), cache[1:]
    new = (rand(4, 2, 16), rand(4, 2, 16), rotary(half))
    slots = ints([35, 50, 0, 143])
    qk_norm = QKNorm(rand(16), rand(16), EPS) if norm else None
    tables, lengths = ints(TABLES, torch.int32), ints(LENGTHS, torch.int32)
    out = rotary_paged_decode_attention.launch(q, *new, cache, values, slots, tables, lengths, 16, qk_norm)
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
    rows, total = tabled("add_norm", 64, lambda: gemm_add_norm.launch(*given, deferrable=True), deferred=True)
    return tabled("plain", 64, lambda: gemm.launch(rows, half(64, 64))), total


def rotated_in_place() -> Tensor:
    qkv = rand(4, 6, 16)
    rotate_packed.launch(qkv, 4, *rotary())
    return qkv


def cached(norm: bool = False) -> tuple[Tensor, ...]:
    keys, values = rand(20, 2, 16), rand(20, 2, 16)
    new = (faint(4, 4, 16), faint(4, 2, 16), rand(4, 2, 16))
    qk_norm = QKNorm(rand(16), rand(16), EPS) if norm else None
    made = rotate_and_cache.launch(*new, rotary(), keys, values, ints(SLOTS), qk_norm)
    return *made, keys, values


def cached_in_part() -> tuple[Tensor, ...]:
    """Queries with gates between them, of which the first 4 values rotate, and weights in float32."""
    kind = half(1).dtype
    keys, values = (rand(20, 2, 16).to(kind) for _ in range(2))
    new = (half(4, 4, 2, 16)[:, :, 0], half(4, 2, 16), half(4, 2, 16))
    qk_norm = QKNorm(rand(16), rand(16), EPS)
    made = rotate_and_cache.launch(*new, rotary(2), keys, values, ints(SLOTS), qk_norm)
    return *made, keys, values


def cached_latent() -> tuple[Tensor, Tensor]:
    query, cache = torch.zeros(4, 3, 40, device=Draw.device), rand(20, 1, 40)
    q, kv = rand(4, 3, 32), faint(4, 40)
    rotate_and_cache_latent.launch(q, kv, rand(24), EPS, rotary(), query, cache, ints(SLOTS))
    return query, cache


def kept_latent() -> tuple[Tensor, Tensor, Tensor]:
    """Queries rotated and latents stored in place."""
    q, kv, cache = rand(4, 3, 32), faint(4, 40), rand(20, 1, 40)
    rotate_and_cache_latent.launch(q, kv, rand(24), EPS, rotary(), q, cache, ints(SLOTS), keep=True)
    return q, kv, cache


def residual_norm() -> tuple[Tensor, Tensor]:
    residual = faint(3, w(96))
    return residual_layer_norm.launch(faint(3, w(96)), residual, rand(w(96)), rand(w(96)), EPS), residual


def with_table_rows() -> Tensor:
    x = rand(3, w(96))
    add_table_rows.launch(x, rand(5, w(96)), ints([[0, 4], [2, 2], [3, 1]], torch.int32), rand(3, 2))
    return x


def resampled() -> Tensor:
    """With sums beyond both ends of a byte."""
    pixels = (100 * rand(3, w(30), 3)).clamp(-1, 1).mul(127).add(128).to(torch.uint8)
    first, weights = (torch.from_numpy(array).to(Draw.device) for array in bicubic_weights(w(30), w(37)))
    return resample.launch(pixels, first, weights)


def chosen_experts() -> Tensor:
    """Weights of the experts by number: their order is free."""
    weights, experts = route.launch(rand(2, 5, 12), rand(12), 3, 2.5, True)
    return torch.zeros(5, 12, device=Draw.device).scatter(1, experts, weights)


def chosen_by_softmax() -> Tensor:
    weights, experts = route.launch(rand(2, 5, 12), None, 3)
    return torch.zeros(5, 12, device=Draw.device).scatter(1, experts, weights)


def channels(taps: int) -> Tensor:
    weight, out = rand(*((2,) if taps == 2 else ()), 64, 32), torch.empty(2, 6, 64, device=Draw.device)
    x = rand(2, 6, 64) if taps == 1 else None
    channel_gemm.launch(rand(2, 6 + taps - 1, 32), weight, rand(32 * (3 - taps)), x, out, 64, "ieee")
    return out


def unit() -> tuple[Tensor, Tensor]:
    """A residual unit, and where it leaves its stream's memory."""
    memory, x = rand(3, 32, 6), rand(2, 32, 5)
    alpha, depthwise, pointwise = rand(32).abs() + 0.5, rand(32, 1, 7), rand(32, 32, 1)
    rest = (depthwise, rand(32), 1, alpha, pointwise, rand(32), (memory, ints([2, 1])))
    return residual_unit.launch(x, alpha, *rest, "ieee"), memory


DELTA = (2, 4, 16, 32)
"""Key heads, value heads, and the sizes of both."""


def state_rows(chunks: bool) -> tuple[StateRows, list[Tensor]]:
    """Rows of states whose scratch row holds NaN: a sequence that begins, one that goes on in place, an empty one and
    padding; with snapshots of chunks."""
    key_heads, heads, dk, dv = DELTA
    states = [rand(8, 3, 2 * key_heads * dk + heads * dv), rand(8, heads, dk, dv)]
    for state in states:
        state[0] = torch.nan
    read, write = (ints(rows) for rows in ([0, 2, 3, 0], [1, 2, 4, 0]))
    snapshots = (ints([5, 6, 0, 0]), ints([64, 64, 0, 0])) if chunks else (None, None)
    return StateRows([], read, write, *snapshots), states


def convolved(chunks: bool) -> tuple[Tensor, Tensor]:
    """By chunks with rows behind the last sequence."""
    rows, (state, _) = state_rows(chunks)
    bounds = ints([0, 66, 131, 131, 131], torch.int32) if chunks else None
    x = rand(133 if chunks else 4, state.shape[2] + 3)[:, :-3]
    return causal_conv.launch(x, rand(state.shape[2], 4), state, rows, bounds), state[1:]


def recurred(chunks: bool) -> tuple[Tensor, Tensor]:
    rows, (conv, state) = state_rows(chunks)
    tokens = 133 if chunks else 4
    heads, value_dim = state.shape[1], state.shape[3]
    given = (rand(tokens, conv.shape[2]), rand(tokens, 2 * heads), ints([-6.0, -2.0, 0.0, 2.7], torch.float32))
    if chunks:
        bounds = ints([0, 66, 131, 131, 131], torch.int32)
        return delta_chunks.launch(*given, rand(heads), state, rows, bounds), state[1:]
    norm = rand(tokens, heads * value_dim + 3)[:, :-3], rand(value_dim), EPS
    return delta_step.launch(*given, rand(heads), state, rows, *norm), state[1:]


def drafted(op: str) -> tuple[Tensor, ...]:
    """Two tokens of each sequence behind none, two or one of the three that are held."""
    rows, (conv, state) = state_rows(False)
    rows = replace(rows, slots=ints([2, 1, 3, 0]), pending=ints([0, 2, 1, 0]))
    heads, value_dim, channels = state.shape[1], state.shape[3], conv.shape[2]
    if op == "conv":
        x, inputs = rand(8, channels + 3)[:, :-3], rand(4, 3, channels)
        out = pending_conv.launch(x, rand(channels, 4), conv, rows, inputs).view(4, 5, channels)
        # Behind the pending ones, held rows are not defined.
        return out[:, 3:], out[1, :2], out[2, :1], conv[1:], inputs[1:]
    inputs = rand(4, 3, 2 * heads)
    given = (rand(20, channels), rand(8, 2 * heads), ints([-6.0, -2.0, 0.0, 2.7], torch.float32), rand(heads), state)
    norm = rand(8, heads * value_dim + 3)[:, :-3], rand(value_dim), EPS
    return delta_step.launch(*given, rows, *norm, inputs), state[1:], inputs[1:]


CASES: dict[str, Callable[[], Any]] = {
    "gemm": lambda: tabled("plain", 64, lambda: gemm.launch(half(5, 64), half(64, 64), half(64))),
    "gemm and silu": lambda: tabled("silu_mul", 64, lambda: gemm.launch(half(5, 64), half(128, 64), None, "silu_mul")),
    "gemm and quick GELU": lambda: tabled(
        "quick_gelu", 64, lambda: gemm.launch(half(5, 64), half(64, 64), half(64), "quick_gelu")
    ),
    "gemm and silu of many rows": persistent,
    "gemm and quick GELU behind cuBLAS": lambda: gemm.launch(rand(5, 64), rand(64, 64), rand(64), "quick_gelu"),
    "gemm of one vector": lambda: gemm.launch(rand(1, w(96)), rand(16, w(96)), rand(16)),
    "narrow gemm": lambda: narrow_gemm.launch(rand(5, w(96)), rand(16, w(96)), rand(16)),
    "split-K and norm": lambda: add_norm(split=2),
    "deferred norm": deferred,
    "gemv": lambda: gemv.launch(
        faint(1, w(96)), rand(16, w(96)), rand(16), norm=(rand(w(96)), EPS), residual=rand(1, 16)
    ),
    "gemv of experts": lambda: gemv.launch(
        rand(2, w(96)), rand(5, 32, w(96)), index=ints([4, 0, 1, 1]), fan_out=2, silu_mul=True
    ),
    "rms_norm": lambda: rms_norm.launch(faint(3, w(96)), rand(w(96)), EPS),
    "add_rms_norm": lambda: add_rms_norm.launch(faint(3, w(96)), faint(3, w(96)), rand(w(96)), EPS),
    # The kept rows of every sequence: a view with gaps.
    "add_rms_norm of rows with gaps": lambda: add_rms_norm.launch(
        rand(3, 4, 32), rand(3, 11, 32)[:, 7:11], rand(32), EPS
    ),
    "add_rms_norm of rows the other way round": lambda: add_rms_norm.launch(
        rand(11, 3, 32), rand(3, 11, 32).transpose(0, 1), rand(32), EPS
    ),
    "rms_norm rounded once": lambda: rms_norm.launch(half(3, w(96)), rand(w(96)), EPS),
    "gemv rounded once": lambda: gemv.launch(half(1, w(96)), half(16, w(96)), norm=(rand(w(96)), EPS)),
    "silu_mul": lambda: silu_mul.launch(rand(3, w(64))),
    "sigmoid_mul": lambda: sigmoid_mul.launch(rand(3, 4, 16), rand(3, 4, 2, 16)[:, :, 1]),
    "sigmoid_mul of a row's gate": lambda: sigmoid_mul.launch(rand(3, w(64)), rand(3, 1)),
    "convolution of chunks": lambda: convolved(chunks=True),
    "convolution of a step": lambda: convolved(chunks=False),
    "delta rule of chunks": lambda: recurred(chunks=True),
    "delta rule of a step": lambda: recurred(chunks=False),
    "delta rule and drafts": lambda: drafted("step"),
    "convolution and drafts": lambda: drafted("conv"),
    "gated norm": lambda: gated_norm.launch(rand(5, 4, 32), rand(5, 4 * 32 + 3)[:, :-3], rand(32), EPS),
    "quantize": lambda: quantize.launch(rand(3, w(64)), 9),
    "layer_norm": residual_norm,
    "rotate_packed": rotated_in_place,
    "window attention": lambda: window_attention.launch(rand(8, 3 * 2 * 20), 2),
    "lengthened heads": lambda: lengthen.launch(rand(4, 6, 16), *rotary(), ints([0, 3], torch.int32)),
    "byte_lookup": lambda: byte_lookup.launch(ints(range(48), torch.uint8).view(2, 24), rand(3, 256)),
    "byte_lookup of one channel into wider rows": lambda: byte_lookup.launch(
        ints(range(48), torch.uint8).view(2, 24), rand(1, 256), 32
    ),
    "resample": resampled,
    "table rows": with_table_rows,
    "rotary_cos_sin": lambda: rotary_cos_sin.launch(
        ints(range(12)).view(3, 4), rand(8), ints([0, 1, 1, 2, 2, 0, 0, 0]), 1.5
    ),
    "route": chosen_experts,
    "softmax route": chosen_by_softmax,
    "combine": lambda: combine.launch(rand(6, w(40)), rand(2, 3), rand(2, w(40))),
    "places of experts": lambda: expert_places.launch(ints([[3, 0], [1, 3], [3, 1]] * Draw.scale), 5),
    "rows at places": lambda: spread_rows.launch(rand(3, w(40)), ints(PLACES)),
    "combine at places": lambda: combine.launch(rand(6, w(40)), rand(3, 2), rand(3, w(40)), ints(PLACES)),
    "latent": cached_latent,
    "latent in place": kept_latent,
    "keys of heads": lambda: head_keys.launch(rand(4, 3, 40), rand(4, 16), 24),
    "logits of a router": lambda: router_logits.launch(half(40, w(208))[:, 8:], rand(12, w(208) - 8)).sum(0),
    "rotate_and_cache": cached,
    "rotate_and_cache with QK norm": lambda: cached(norm=True),
    "rotate_and_cache in part": cached_in_part,
    "dense attention": lambda: rotary_dense_attention.launch(
        rand(2, 4, 4, 16), rand(2, 4, 2, 16), rand(2, 4, 2, 16), *rotary()
    ),
    "dense attention of the last queries, in parts of a group": lambda: rotary_dense_attention.launch(
        rand(2, 11, 16, 16)[:, 2:], rand(2, 11, 2, 16), rand(2, 11, 2, 16), *rotary(rows=11), 2
    ),
    "dense attention of odd heads": lambda: rotary_dense_attention.launch(
        rand(2, 5, 4, 12), rand(2, 5, 2, 12), rand(2, 5, 2, 12), *rotary(6, 5)
    ),
    "ragged attention": lambda: varlen_attention.launch(
        rand(7, 4, 16), rand(7, 2, 16), rand(7, 2, 16), *[ints([0, 3, 3, 7], torch.int32)] * 2, True
    ),
    "decode attention": lambda: decoded(current_kv=False),
    "decode attention with the current step's keys": lambda: decoded(current_kv=True),
    "decode attention with QK norm": lambda: decoded(current_kv=True, norm=True),
    "decode attention, rotated in part": lambda: decoded(current_kv=True, norm=True, half=2),
    "philox": lambda: philox_normal.launch(
        ints([0, 3, -3, 2**62 + 1, 3 + 2**32]), ints([0, 5, 0, 9, 2**31 - 1], torch.int32), w(16)
    ),
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


@pytest.mark.parametrize("scale", [1, slow(11)])
@pytest.mark.parametrize("case", CASES)
def test_kernels_compute_what_their_references_do(
    case: str, scale: int, device: torch.device, heard: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With outputs that hold NaN before; then with every kernel refused."""
    monkeypatch.setattr(Draw, "device", device)
    monkeypatch.setattr(Draw, "scale", scale)

    def run() -> list[Tensor]:
        Draw.generator.manual_seed(5)
        with poisoned_allocations():
            return tensors(CASES[case]())

    found = run()
    assert not heard

    def refuse(kernel: Any, *args: Any, **options: Any) -> None:
        raise CannotLaunch(kernel.__name__, "too large")

    for module in MODULES:
        monkeypatch.setattr(module, "launch", refuse)
    for out, reference in zip(found, run(), strict=True):
        assert out.dtype == reference.dtype and out.shape == reference.shape
        exact = 2e-6 if out.dtype not in (torch.float16, torch.bfloat16) else 4e-3
        assert relative_error(out, reference) < (2e-2 if out.dtype == torch.bfloat16 else exact)
    assert heard or device.type == "cuda"  # A GPU may choose cuBLAS.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_table_rows_are_rounded_as_their_reference_rounds(device, dtype) -> None:
    """Products and sums of these numbers are exact in float32, in any order. The interpreter cuts bfloat16."""
    x = torch.randn(7, 1152, device=device).to(dtype)
    table = (torch.randint(-127, 128, (9, 1152), device=device) / 16).to(dtype)
    places = torch.randint(0, 9, (7, 4), dtype=torch.int32, device=device)
    weights = torch.randint(0, 65, (7, 4), device=device) / 64

    def add() -> torch.Tensor:
        total = x * 1
        add_table_rows.kernel(total, table, places, weights)
        return total

    expected = x.cpu().clone()
    add_table_rows.reference(expected, table.cpu(), places.cpu(), weights.cpu())
    out = replayed(device, add).cpu()
    if dtype == torch.float16 or device.type == "cuda":
        assert torch.equal(out, expected)
    else:
        assert relative_error(out, expected) < 8e-3
