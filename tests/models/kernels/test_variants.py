"""Which compiled variants of the kernels a number of rows can ask for: those that octaves of rows have asked for.

Launches are recorded, not run: on the meta device, with what Triton would compile a kernel by. The shapes are those of
the published models.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models.layers.kernels
from benchmarks.kernels import products
from models.layers.fused import Unscaled
from models.layers.kernels import (
    elementwise,
    gemv,
    latent,
    linear,
    moe,
    norms,
    packed,
    paged_decode,
    random,
    rotary,
    routes,
    speech_inputs,
    speech_solve,
    vae,
    varlen,
)
from models.layers.kernels.routes import Choice, Shape
from models.layers.norms import RMSNorm
from models.layers.precision import Precision
from service.engine import filter_kernels, step_kernels
from service.engine.slot_state import SlotState
from service.engine.worker import WARM_SEQUENCES, WARM_TOKENS
from service.graphs.buckets import octaves

MOST_ROWS = 160
"""Decode rows, and prefill tokens, that are tried one by one."""
META = torch.device("meta")
KERNEL_MODULES = [
    importlib.import_module(f"models.layers.kernels.{found.name}")
    for found in pkgutil.iter_modules(models.layers.kernels.__path__)
] + [step_kernels, filter_kernels]


class Launches:
    """Stands for a kernel; keeps the variants that launches ask for."""

    def __init__(self, kernel: Any, variants: set[tuple[Any, ...]]) -> None:
        self._name = kernel.fn.__name__
        self._parameters = inspect.signature(kernel.fn).parameters
        options = kernel.kwargs if hasattr(kernel, "kwargs") else vars(kernel)
        self._plain = options.get("do_not_specialize") or ()
        self._anywhere = options.get("do_not_specialize_on_alignment") or ()
        self._variants = variants

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, **kwargs: Any) -> None:
        values = dict(zip(self._parameters, args, strict=False)) | kwargs
        kinds = tuple((name, self._kind(name, value)) for name, value in sorted(values.items()))
        self._variants.add((self._name, *kinds))

    def _kind(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, name in self._anywhere or value.data_ptr() % 16 == 0
        constant = name not in self._parameters or "constexpr" in str(self._parameters[name].annotation)
        if constant or not isinstance(value, int):
            return value if constant else type(value)
        size = 32 if abs(value) < 1 << 31 else 64
        return size if name in self._plain else (size, value == 1, value % 16 == 0)


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[Any, ...]]]:
    found: set[tuple[Any, ...]] = set()
    for module in KERNEL_MODULES:
        for name, value in list(vars(module).items()):
            if name.endswith("_kernel") and hasattr(value, "fn"):
                monkeypatch.setattr(module, name, Launches(value, found))
    # An H100, whether this is one or not.
    for module in (linear, paged_decode, rotary):
        monkeypatch.setattr(module, "num_processors", lambda: 132)
    yield found


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def rows_of_int64(rows: int) -> Tensor:
    return empty(rows, dtype=torch.int64)


def stack(rows: int, width: int, inner: int, heads: int, kv_heads: int = 2) -> None:
    """The products and norms of a block: models.layers.fused chooses between these."""
    x, residual = empty(rows, width), empty(rows, width)
    qkv, gate_up, down = empty(heads * 128, width), empty(2 * inner, width), empty(width, inner)
    norm = empty(width)
    norms.rms_norm_cuda(x, norm, 1e-6)
    if rows == 1:
        gemv.gemv_cuda(x, qkv, norm=(norm, 1e-6))
        gemv.gemv_cuda(gemv.gemv_cuda(x, gate_up, silu_mul=True), down, residual=residual)
        return
    out = empty(width, (heads - 2 * kv_heads) * 128)
    project(x, qkv)
    hidden = gate(add_norm(empty(rows, out.shape[1]), out, residual, norm), x, gate_up)
    project(add_norm(hidden, down, residual, norm), qkv)


def project(x: Tensor | Unscaled, weight: Tensor) -> None:
    rows = x.rows if isinstance(x, Unscaled) else x
    chosen = routes.route("plain", rows, weight)
    if chosen or isinstance(x, Unscaled) or linear.streams_alone(rows, weight):
        linear.linear_cuda(x, weight, None, chosen.tile if chosen else None)


def gate(x: Tensor | Unscaled, rows: Tensor, weight: Tensor) -> Tensor:
    chosen = routes.route("silu_mul", rows, weight)
    if chosen or isinstance(x, Unscaled) or linear.streams(rows, weight):
        return linear.linear_silu_mul_cuda(x, weight, chosen.tile if chosen else None)
    return elementwise.silu_mul_cuda(empty(rows.shape[0], weight.shape[0]))


def add_norm(x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor) -> Tensor | Unscaled:
    chosen, after = routes.route("add_norm", x, weight), (residual, norm, 1e-6)
    if chosen and chosen.deferred:
        return linear.linear_add_unscaled_cuda(x, weight, None, *after, chosen.tile)[0]
    if chosen:
        return linear.linear_add_rms_norm_cuda(x, weight, None, *after, split=chosen.split, tile=chosen.tile)[0]
    if linear.streams(x, weight):
        return linear.linear_add_rms_norm_cuda(x, weight, None, *after)[0]
    return norms.add_rms_norm_cuda(empty(*residual.shape), *after)[0]


def decode_attention(rows: int, heads: int, kv_heads: int, pages: int) -> None:
    cache = empty(64, kv_heads, 128)
    tables, lengths = empty(rows, pages, dtype=torch.int32), empty(rows, dtype=torch.int32)
    paged_decode.paged_decode_attention_cuda(empty(rows, heads, 128), cache, cache, tables, lengths, 16, 0.1)
    q, k, v = empty(rows, heads + 2 * kv_heads, 128).split((heads, kv_heads, kv_heads), dim=1)
    angles = empty(rows, 64, dtype=torch.float32)
    values = empty(64, 2 * kv_heads, 128)[:, :kv_heads]  # on the meta device everything lies at 0
    for angle_pair in ((angles, angles), None):
        newest = paged_decode.Newest(k, v, angle_pair, rows_of_int64(rows))
        paged_decode.paged_decode_attention_cuda(q, cache, values, tables, lengths, 16, 0.1, newest=newest)


def ragged_attention(rows: int, segments: int) -> None:
    ends = empty(segments + 1, dtype=torch.int32)
    q, k, v = empty(rows, 16, 128), empty(rows, 2, 128), empty(rows, 20, 128)[:, 18:]
    varlen.varlen_attention_cuda(q, k, v, ends, ends, 0.1, True)


def rotations(rows: int) -> None:
    positions = empty(3, rows, dtype=torch.int64)
    half = empty(64, dtype=torch.float32)
    cos, sin = packed.rotary_cos_sin_cuda(positions, half, empty(64, dtype=torch.int64), 1.0)
    packed.rotary_cos_sin_cuda(positions[:1].expand(3, -1), half, empty(64, dtype=torch.int64), 1.0)
    packed.rotary_cos_sin_cuda(positions[0], half, None, 1.0)
    qkv, cache = empty(rows, 20, 128), empty(64, 2, 128)
    q, k, v = qkv.split((16, 2, 2), dim=1)
    rotary.rotate_and_cache_cuda(q, k, v, (cos, sin), cache, cache, rows_of_int64(rows))
    after = [x[1:] for x in (q, k, v, cos, sin, rows_of_int64(rows))]  # behind the decode rows of a mixed batch
    rotary.rotate_and_cache_cuda(*after[:3], (after[3], after[4]), cache, cache, after[5])


def local_attention(sequences: int, length: int, first: int) -> None:
    qkv = empty(sequences, length, 20, 128)
    q, k, v = qkv.split((16, 2, 2), dim=2)
    cos = empty(length, 64, dtype=torch.float32)
    rotary.rotary_dense_attention_cuda(q[:, first:], k, v, cos, cos, first)


def vision(rows: int) -> None:
    x, residual, norm = empty(rows, 1152), empty(rows, 1152), empty(1152)
    packed.add_layer_norm_cuda(x, residual, norm, norm, 1e-6)
    packed.rotate_packed_cuda(empty(rows, 48, 72), 32, *(empty(rows, 36, dtype=torch.float32) for _ in range(2)))
    packed.add_quick_gelu_cuda(empty(rows, 5120), empty(5120))
    packed.byte_lookup_cuda(empty(rows, 588, dtype=torch.uint8), empty(1, 256))
    packed.byte_lookup_cuda(empty(rows, 1176, dtype=torch.uint8), empty(3, 256))


def experts(rows: int) -> None:
    logits = empty(rows, 64, dtype=torch.float32)
    weights, chosen = moe.route_cuda(logits, empty(64, dtype=torch.float32), 6, 2.446, True)
    if rows <= 4:
        hidden = gemv.gemv_cuda(
            empty(rows, 2048), empty(64, 2816, 2048), index=chosen.flatten(), fan_out=6, silu_mul=True
        )
        moe.combine_cuda(hidden, weights, empty(rows, 2048))
    q, query, cache = empty(rows, 16, 192), empty(rows, 16, 576), empty(64, 1, 576)
    half = empty(rows, 32, dtype=torch.float32)
    latent.rotate_and_cache_latent_cuda(
        q, empty(rows, 576), empty(512), 1e-6, (half, half), query, cache, rows_of_int64(rows)
    )


def codec(rows: int, precision: Precision) -> None:
    """Blocks of the published decoder, its first three and its last, with one unit each; what follows the last."""
    dtype = torch.float16 if precision == "float16" else torch.float32
    slots = rows_of_int64(rows)
    for width, length, stride in ((2048, 4, 8), (1024, 32, 6), (512, 192, 5), (64, 3840, 2)):
        x, channel = empty(rows, width, length, dtype=torch.float32), empty(width, dtype=torch.float32)
        table = empty(65, 7 * width * 54, dtype=torch.float32)
        up = empty(2 * stride, width // 2, width, dtype=dtype).permute(2, 1, 0)
        rest = (channel[: width // 2], stride, table[:, :width, None], slots)
        x = vae.snake_upsample_cuda(x, channel, channel, channel, up, *rest, precision=precision)
        width, channel = width // 2, channel[: width // 2]
        memory = table[:, : width * 18].unflatten(1, (width, 18))
        depthwise, pointwise = empty(width, 1, 7, dtype=torch.float32), empty(width, width, 1, dtype=dtype)
        rest = (depthwise, channel, 3, channel, pointwise, channel, memory, slots)
        x = vae.residual_unit_cuda(x, channel, *rest, precision=precision)
    memory = table[:, : width * 6].unflatten(1, (width, 6))
    vae.snake_samples_cuda(x, channel, empty(1, width, 7, dtype=torch.float32), channel[:1], memory, slots)


def around_speech(rows: int) -> None:
    state = {
        "last_patch": empty(65, 4, 64),
        "block_table": empty(65, 512, dtype=torch.int32),
        "active": empty(65, dtype=torch.bool),
        "seed": empty(65, dtype=torch.int64),
        **{name: empty(65, dtype=torch.int32) for name in ("length", "step", "min_patches", "max_patches")},
        **{name: empty(65, dtype=torch.float32) for name in ("cfg", "temperature")},
    }
    with META:
        frames_to_tokens, norm = nn.Linear(64, 1024, dtype=torch.bfloat16), RMSNorm(1024, 1e-5).to(torch.bfloat16)
    slots, angles = rows_of_int64(rows), empty(8192, 64, dtype=torch.float32)
    speech_inputs.step_inputs_cuda(state, slots, 16, (angles, angles), empty(1024), frames_to_tokens, norm)
    noise = random.philox_normal_cuda(slots, empty(rows, dtype=torch.int32), 256).view(rows, 64, 4)
    elementwise.concatenate_cuda(elementwise.quantize_cuda(empty(rows, 2048), 9), empty(rows, 2048))
    flow = speech_solve.FlowTokens(state, slots, frames_to_tokens, frames_to_tokens, norm)
    flow.start(noise, empty(rows, 1024), empty(rows, 1024), empty(1024))
    velocity, out = empty(2 * rows, 4, 64), empty(64, 1024)
    for width in (0.1, 1.0):
        product = gemv.gemv_cuda if 8 * rows <= 64 else linear.narrow_linear_cuda
        product(empty(8 * rows, 1024), out, empty(64))
        flow.advance(velocity, width, empty(1024))
    speech_solve.settle_cuda(state, slots, flow.x, velocity, 0.1, empty(rows, 2048), empty(2, 2048))


def sampling(rows: int) -> None:
    state = SlotState(64, 2048, 1000, META)
    slots = rows_of_int64(rows)
    step_kernels.decode_rows_cuda(slots, state, 2048, 16)
    logits = empty(rows, 1024)[:, :1000]
    step_kernels.advance_cuda(logits, slots, state)
    column = empty(rows, dtype=torch.float32)
    step_kernels.advance_cuda(filter_kernels.filtered_cuda(logits.float(), column, column, slots, column), slots, state)


CASES: dict[str, Callable[[int], object]] = {
    "Qwen2-VL-2B": lambda rows: stack(rows, 1536, 8960, 16),
    "Qwen2-VL-7B": lambda rows: stack(rows, 3584, 18944, 36, 4),
    "VoxCPM2 language model": lambda rows: stack(rows, 2048, 6144, 20),
    "VoxCPM2 local encoder": lambda rows: stack(5 * rows, 1024, 4096, 20),
    "VoxCPM2 local decoder": lambda rows: stack(22 * rows, 1024, 4096, 20),
    "decode attention, 2 key heads": lambda rows: decode_attention(rows, 16, 2, 512),
    "decode attention, 4 key heads": lambda rows: decode_attention(rows, 28, 4, 2048),
    "decode attention, 8 key heads": lambda rows: decode_attention(rows, 32, 8, 2048),
    "decode attention, 1 key head": lambda rows: decode_attention(rows, 16, 1, 2048),
    "decode attention, short": lambda rows: decode_attention(rows, 16, 2, 16),
    "rotations": rotations,
    "local encoder's attention": lambda rows: local_attention(rows, 5, 0),
    "local decoder's attention": lambda rows: local_attention(2 * rows, 11, 7),
    "prompt": lambda rows: ragged_attention(rows, 1),
    "vision": vision,
    "experts": experts,
    "codec in tf32": lambda rows: codec(rows, "tf32"),
    "codec in float16": lambda rows: codec(rows, "float16"),
    "speech step": around_speech,
    "sampling": sampling,
}


@pytest.mark.parametrize("case", CASES)
def test_octaves_of_rows_meet_every_variant(case: str, variants: set[tuple[Any, ...]]) -> None:
    for rows in octaves(MOST_ROWS):
        CASES[case](rows)
    warmed = set(variants)
    for rows in range(1, MOST_ROWS):
        CASES[case](rows)
        assert variants == warmed, f"{rows} rows: {variants - warmed}"
    assert len(warmed) <= 32, f"{len(warmed)} variants to compile"


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(
    "case", ["Qwen2-VL-2B", "VoxCPM2 language model", "VoxCPM2 local encoder", "VoxCPM2 local decoder"]
)
def test_octaves_of_rows_meet_every_choice_of_a_table(
    case: str, deferred: bool, variants: set[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table that predictions alone would give."""
    table: dict[Shape, tuple[Choice, ...]] = {}
    for measured in products.STACKS:
        for part in measured.parts:
            choices = []
            for rows in measured.rows:
                found = [one for one in products.variants(part, rows) if one.deferred <= deferred]
                best = min(found, key=lambda one: products.predicted_us(part, rows, one))
                choices.append(Choice(*measured.span(rows), best))
            table[Shape(part.kind, part.inputs, part.outputs)] = tuple(choices)
    monkeypatch.setattr(routes, "ROUTES", table)
    for rows in octaves(MOST_ROWS):
        CASES[case](rows)
    warmed = set(variants)
    for rows in range(1, MOST_ROWS):
        CASES[case](rows)
        assert variants == warmed, f"{rows} rows: {variants - warmed}"


def test_warm_tokens_and_sequences_meet_every_variant_of_a_prefill(variants: set[tuple[Any, ...]]) -> None:
    def prefill(tokens: int, sequences: int) -> None:
        stack(tokens, 2048, 6144, 20)
        stack(5 * tokens, 1024, 4096, 20)
        local_attention(tokens, 5, 0)
        rotations(tokens)
        experts(tokens)
        ragged_attention(tokens, sequences)

    for tokens in octaves(WARM_TOKENS):
        prefill(tokens, 1)
    prefill(WARM_SEQUENCES, WARM_SEQUENCES)
    warmed = set(variants)
    for tokens in (*range(1, 200), 1000, 1024, 2047, 2048, 8192):
        prefill(tokens, 1 + tokens % 64)
        assert variants == warmed, f"{tokens} tokens: {variants - warmed}"
