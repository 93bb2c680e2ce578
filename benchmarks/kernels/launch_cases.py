"""Launches of every kernel, at the sizes of the published models, on the meta device: nothing is computed.

Code that compiles or counts kernels replaces them first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from models.layers.kernels import (
    e4m3,
    elementwise,
    gated_delta,
    gemm,
    gemv,
    latent,
    lora,
    moe,
    norms,
    packed,
    paged_decode,
    paged_prefill,
    random,
    resample,
    rotary,
    tiled_gemm,
    varlen,
)
from models.layers.kernels.gemm_types import Kind, Tile
from models.layers.kernels.paged_decode import CurrentKV
from models.layers.kv_cache import StateRows
from models.layers.lora import GemmLora, LoraPair, LoraRows, num_tiles
from models.layers.norms import DeferredNorm, QKNorm, RMSNorm
from models.layers.precision import Precision
from models.layers.quantized import QuantizedWeight, Scheme
from models.voxcpm2.kernels import step as speech_step
from models.voxcpm2.kernels import vae
from service.engine.chat import step_kernels
from service.engine.chat.slot_state import SlotState

META = torch.device("meta")
EPS = 1e-6


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


int32, int64, float32, uint8 = (
    partial(empty, dtype=dtype) for dtype in (torch.int32, torch.int64, torch.float32, torch.uint8)
)


def stack(rows: int, width: int, inner: int, heads: int, kv_heads: int = 2) -> None:
    """The GEMMs and norms of a block."""
    x, residual = empty(rows, width), empty(rows, width)
    qkv, gate_up, down = empty(heads * 128, width), empty(2 * inner, width), empty(width, inner)
    norm = empty(width)
    norms.rms_norm(x, norm, EPS)
    if rows == 1:
        gemv.gemv(x, qkv, norm=(norm, EPS))
        gemv.gemv(gemv.gemv(x, gate_up, silu_mul=True), down, residual=residual)
        return
    attended = empty(rows, (heads - 2 * kv_heads) * 128)
    after = residual, norm, EPS
    gemm.gemm(x, qkv, None)
    normed, _ = gemm.gemm_add_norm(attended, empty(width, attended.shape[1]), None, *after, deferrable=True)
    hidden = gemm.gemm(normed, gate_up, None, "silu_mul")
    gemm.gemm(gemm.gemm_add_norm(hidden, down, None, *after, deferrable=True)[0], qkv, None)


def e4m3_weight(*shape: int) -> QuantizedWeight:
    with META:
        return QuantizedWeight(*shape)


def codes(rows: int, scheme: Scheme) -> None:
    """The GEMMs of Qwen2-VL-7B's block, and those of the experts of Qwen3-VL-30B-A3B, with weights that are published
    as codes."""

    def weight(*shape: int) -> QuantizedWeight:
        with META:
            return QuantizedWeight(*shape, scheme=scheme)

    x, residual, norm, inner = empty(rows, 3584), empty(rows, 3584), empty(3584), 18944
    gate_up, down = weight(2 * inner, 3584), weight(3584, inner)
    experts, chosen = (weight(128, 1536, 2048), weight(128, 2048, 768)), int64(8 * rows)
    if rows == 1:
        hidden = gemv.gemv(x, gate_up, norm=(norm, EPS), silu_mul=True)
        gemv.gemv(hidden, down, residual=residual)
    else:
        gemm.gemm(x, weight(4608, 3584), empty(4608))
        hidden = gemm.gemm(x, gate_up, None, "silu_mul")
        gemm.gemm_add_norm(hidden, down, None, residual, norm, EPS, deferrable=True)
    if rows <= 16 and scheme.codes != "u8":
        tile = Tile(8 if rows <= 8 else 16, 64, 128, warps=2, swap=True)
        tiled_gemm.tiled_gemm(x, gate_up, None, tile, "silu_mul", split=2)
    if rows <= 4:
        hidden = gemv.gemv(empty(rows, 2048), experts[0], index=chosen, fan_out=8, silu_mul=True)
        gemv.gemv(hidden, experts[1], index=chosen)
    else:
        for stack in experts:
            moe.grouped_codes(empty(8 * rows, stack.shape[2]), stack, int32(128))
    e4m3.dequantise(down, torch.bfloat16)


CODES = {
    "4 bits, groups of 128 with zeros": Scheme("u4", 128, torch.float16, zeros=True),
    "4 bits, groups of 32 with zeros": Scheme("u4", 32, torch.bfloat16, zeros=True),
    "4 bits, groups of 128": Scheme("u4", 128, torch.float16),
    "8 bits, groups of 128": Scheme("u8", 128, torch.float16),
    "e4m3 in blocks": Scheme("e4m3", 128, torch.bfloat16),
}


def e4m3_stack(rows: int, width: int, inner: int, heads: int, kv_heads: int, vocabulary: int) -> None:
    """The GEMMs of a block and the head with weights in e4m3; what cuBLAS multiplies is quantised alone."""
    x, residual, norm = empty(rows, width), empty(rows, width), empty(width)
    qkv, out = e4m3_weight(heads * 128, width), e4m3_weight(width, (heads - 2 * kv_heads) * 128)
    gate_up, down = e4m3_weight(2 * inner, width), e4m3_weight(width, inner)
    if rows == 1:
        gemv.gemv(x, qkv, empty(heads * 128), norm=(norm, EPS))
        hidden = gemv.gemv(x, gate_up, norm=(norm, EPS), silu_mul=True)
        gemv.gemv(hidden, down, residual=residual)
        gemv.gemv(empty(rows, out.shape[1]), out, residual=residual)
        gemv.gemv(x, e4m3_weight(vocabulary, width))
        return
    _e4m3_gemm("plain", x, qkv)
    _e4m3_gemm("add_norm", empty(rows, out.shape[1]), out, residual)
    _e4m3_gemm("silu_mul", x, gate_up)
    _e4m3_gemm("add_norm", empty(rows, inner), down, residual)
    if rows <= 64:
        _e4m3_gemm("plain", x, e4m3_weight(vocabulary, width))


def _e4m3_gemm(kind: Kind, x: Tensor, weight: QuantizedWeight, residual: Tensor | None = None) -> None:
    if gemm.way_of(kind, x, weight).kernel == "eight_bit":
        e4m3.quantise_rows(x)
    elif residual is not None:
        gemm.gemm_add_norm(x, weight, None, residual, empty(weight.shape[0]), EPS, deferrable=True)
    else:
        gemm.gemm(x, weight, None, "silu_mul" if kind == "silu_mul" else "")


def decode_attention(rows: int, heads: int, kv_heads: int, pages: int) -> None:
    cache = empty(64, kv_heads, 128)
    tables, lengths = int32(rows, pages), int32(rows)
    paged_decode.paged_decode_attention(empty(rows, heads, 128), cache, cache, tables, lengths, 16, 0.1)
    q, k, v = empty(rows, heads + 2 * kv_heads, 128).split((heads, kv_heads, kv_heads), dim=1)
    angles = float32(rows, 64)
    values = empty(64, 2 * kv_heads, 128)[:, :kv_heads]  # on the meta device everything lies at 0
    of_heads = QKNorm(empty(128), empty(128), EPS)
    for angle_pair, qk_norm in (((angles, angles), None), (None, None), ((angles, angles), of_heads)):
        current_kv = CurrentKV(k, v, angle_pair, int64(rows), qk_norm)
        paged_decode.paged_decode_attention(q, cache, values, tables, lengths, 16, 0.1, current_kv=current_kv)


def ragged_attention(rows: int, segments: int) -> None:
    ends = int32(segments + 1)
    q, k, v = empty(rows, 16, 128), empty(rows, 2, 128), empty(rows, 20, 128)[:, 18:]
    varlen.varlen_attention(q, k, v, ends, ends, True)


def paged_prefill_attention(rows: int, pages: int) -> None:
    cache = empty(64, 2, 128)
    tables, ends = int32(64, pages), int32(65)
    q = empty(rows, 12, 128)
    paged_prefill.paged_prefill_attention(q, cache, empty(64, 2, 128), tables, ends, ends[1:], 16, 0.1)


def rotations(rows: int) -> None:
    positions = int64(3, rows)
    half = float32(64)
    cos, sin = packed.rotary_cos_sin(positions, half, int64(64), 1.0)
    packed.rotary_cos_sin(positions[:1].expand(3, -1), half, int64(64), 1.0)
    packed.rotary_cos_sin(positions[0], half, None, 1.0)
    qkv, cache = empty(rows, 20, 128), empty(64, 2, 128)
    q, k, v = qkv.split((16, 2, 2), dim=1)
    rotary.rotate_and_cache(q, k, v, (cos, sin), cache, cache, int64(rows))


def rotations_of_normed_heads(rows: int) -> None:
    """Of the queries and keys of Qwen3: 2B, 4B and 8B, 32B, 30B-A3B."""
    angles = float32(rows, 64)
    qk_norm = QKNorm(empty(128), empty(128), EPS)
    for heads, kv_heads in ((16, 8), (32, 8), (64, 8), (32, 4)):
        q, k, v = empty(rows, heads + 2 * kv_heads, 128).split((heads, kv_heads, kv_heads), dim=1)
        cache = empty(64, kv_heads, 128)
        rotary.rotate_and_cache(q, k, v, (angles, angles), cache, cache, int64(rows), qk_norm)


def gated_delta_net(rows: int) -> None:
    """Steps and chunks of Qwen3.5-4B, and what a layer with full attention has of its own."""
    key_heads, heads, width, sequences = 16, 32, 128, 4
    inner, channels = heads * width, (2 * key_heads + heads) * width
    conv, delta = empty(9, 3, channels), float32(9, heads, width, width)
    qkv, z = empty(rows, channels + inner).split((channels, inner), dim=1)
    gates, of_heads = empty(rows, 2 * heads), float32(heads)
    norm = float32(width), EPS
    ends = int32(sequences + 1)
    of_steps = StateRows([], int64(rows), int64(rows))
    mixed = gated_delta.causal_conv(qkv, empty(channels, 4), conv, of_steps)
    gated_delta.delta_step(mixed, gates, of_heads, of_heads, delta, of_steps, z, *norm)
    if rows % 4 == 0:  # steps with three drafts
        read, write, slots, pending = (int64(rows // 4) for _ in range(4))
        drafted = StateRows([], read, write, slots=slots, pending=pending)
        mixed = gated_delta.pending_conv(qkv, empty(channels, 4), conv, drafted, empty(9, 4, channels))
        held = empty(9, 4, 2 * heads)
        gated_delta.delta_step(mixed, gates, of_heads, of_heads, delta, drafted, z, *norm, held)
    read, write, kept, kept_ends = (int64(sequences) for _ in range(4))
    of_chunks = StateRows([], read, write, kept, kept_ends)
    mixed = gated_delta.causal_conv(qkv, empty(channels, 4), conv, of_chunks, ends)
    out = gated_delta.delta_chunks(mixed, gates, of_heads, of_heads, delta, of_chunks, ends)
    gated_delta.gated_norm(out, z, *norm)
    gated, k, v = empty(rows, 40, 256).split((32, 4, 4), dim=1)
    q, gate = gated.unflatten(1, (16, 2)).unbind(2)
    gated_delta.sigmoid_mul(empty(rows, 16, 256), gate)
    gated_delta.sigmoid_mul(empty(rows, inner), gates[:, :1])
    cache, angles = empty(64, 4, 256), float32(rows, 32)
    values, qk_norm = (empty(64, 8, 256)[:, :4], QKNorm(float32(256), float32(256), EPS))
    rotary.rotate_and_cache(q, k, v, (angles, angles), cache, cache, int64(rows), qk_norm)
    current_kv = CurrentKV(k, v, (angles, angles), int64(rows), qk_norm)
    tables = int32(rows, 64)
    paged_decode.paged_decode_attention(q, cache, values, tables, tables[:, 0], 16, 0.1, current_kv=current_kv)
    x, weight = empty(rows, 2560), float32(2560)
    norms.rms_norm(x, weight, EPS)
    norms.add_rms_norm(x, x, weight, EPS)
    gemv.gemv(x[:1], empty(2560, 2560), norm=(weight, EPS))


def local_attention(sequences: int, length: int, first: int, dtype: torch.dtype = torch.bfloat16) -> None:
    q, k, v = empty(sequences, length, 20, 128, dtype=dtype).split((16, 2, 2), dim=2)
    cos = float32(length, 64)
    rotary.rotary_dense_attention(q[:, first:], k, v, cos, cos, first)


def one_segment(rows: int, width: int) -> None:
    """Heads of a single picture, lengthened for dense attention."""
    half, ends = float32(rows, width // 2), int32(2)
    packed.lengthen(empty(rows, 48, width), half, half, ends)


def vision(rows: int) -> None:
    x, residual, norm = empty(rows, 1152), empty(rows, 1152), empty(1152)
    packed.residual_layer_norm(x, residual, norm, norm, EPS)
    packed.rotate_packed(empty(rows, 48, 72), 32, *(float32(rows, 36) for _ in range(2)))
    packed.window_attention(empty(rows, 3 * 1152), 16)
    one_segment(rows, 72)
    packed.add_quick_gelu(empty(rows, 5120), empty(5120))
    packed.byte_lookup(uint8(rows, 588), empty(1, 256), 640)
    packed.byte_lookup(uint8(rows, 588), empty(3, 256), 640)
    packed.byte_lookup(uint8(rows, 1176), empty(3, 256))
    lines, weights = uint8(4, rows, 3), int32(28, 5)
    resample.resample(lines, int32(28), weights)


def deepstack_tower(rows: int) -> None:
    """Further launches of Qwen3-VL's towers: norms of 1,024 columns and of four patches side by side, heads of 64."""
    for width in (1024, 4096, 4608):
        x, norm = empty(rows, width), empty(width)
        packed.residual_layer_norm(x, None, norm, norm, EPS)
    packed.residual_layer_norm(empty(rows, 1024), empty(rows, 1024), empty(1024), empty(1024), EPS)
    packed.rotate_packed(empty(rows, 48, 64), 32, *(float32(rows, 32) for _ in range(2)))
    packed.byte_lookup(uint8(rows, 1536), empty(3, 256))
    for width in (1024, 1152):
        places, weights = int32(rows, 4), float32(rows, 4)
        packed.add_table_rows(empty(rows, width), empty(2304, width), places, weights)


def grouped_experts(weights: Tensor, chosen: Tensor, num_experts: int, inner: int) -> None:
    """Grouped GEMMs, and what stands around them."""
    x = empty(chosen.shape[0], 2048)
    places, ends = moe.expert_places(chosen, num_experts)
    spread = moe.spread_rows(x, places)
    moe.grouped_gemm(spread, empty(num_experts, 2 * inner, 2048), ends)
    moe.grouped_gemm(empty(spread.shape[0], inner), empty(num_experts, 2048, inner), ends)
    moe.combine(spread, weights, x, places)
    moe.combine(spread, weights, x, places, (x, empty(1, 2048)))


def many_experts(rows: int) -> None:
    """The experts of Qwen3-VL-30B-A3B: 8 of 128 chosen by softmax, added to the residual."""
    weights, chosen = moe.route(router_logits(rows, 128), None, 8)
    grouped_experts(weights, chosen, 128, 768)
    if rows <= 4:
        gate_up, down = empty(128, 1536, 2048), empty(128, 2048, 768)
        hidden = gemv.gemv(empty(rows, 2048), gate_up, index=chosen.flatten(), fan_out=8, silu_mul=True)
        moe.combine(gemv.gemv(hidden, down, index=chosen.flatten()), weights, empty(rows, 2048))


def windowed_vision(rows: int) -> None:
    """Further launches of Qwen2.5-VL's tower: RMSNorms of its width, SwiGLU of its intermediate size, heads of 80."""
    x, residual, norm = empty(rows, 1280), empty(rows, 1280), empty(1280)
    norms.rms_norm(x, norm, EPS)
    packed.rotate_packed(empty(rows, 48, 80), 32, *(float32(rows, 40) for _ in range(2)))
    one_segment(rows, 80)
    q, k, v = empty(rows, 48, 80).chunk(3, dim=1)
    ends = int32(33)
    varlen.varlen_attention(q, k, v, ends, ends, False, 64)
    after = residual, norm, EPS
    normed, _ = gemm.gemm_add_norm(x, empty(1280, 1280), norm, *after, deferrable=True)
    hidden = gemm.gemm(normed, empty(6912, 1280), empty(6912), "silu_mul")
    gemm.gemm_add_norm(hidden, empty(1280, 3456), norm, *after)


def router_logits(rows: int, experts: int) -> Tensor:
    if rows <= 4:
        return float32(1, rows, experts)
    return moe.router_logits(empty(rows, 2048), float32(experts, 2048))


def experts(rows: int) -> None:
    weights, chosen = moe.route(router_logits(rows, 64), float32(64), 6, 2.446, True)
    grouped_experts(weights, chosen, 64, 1408)
    if rows <= 4:
        hidden = gemv.gemv(empty(rows, 2048), empty(64, 2816, 2048), index=chosen.flatten(), fan_out=6, silu_mul=True)
        moe.combine(hidden, weights, empty(rows, 2048))
    q, query, cache = empty(rows, 16, 192), empty(rows, 16, 576), empty(64, 1, 576)
    half = float32(rows, 32)
    latent.rotate_and_cache_latent(q, empty(rows, 576), empty(512), EPS, (half, half), query, cache, int64(rows))
    latent.rotate_and_cache_latent(q, empty(rows, 576), empty(512), EPS, (half, half), q, cache, int64(rows), keep=True)
    latent.head_keys(empty(rows, 16, 256), empty(rows, 576)[:, 512:], 128)


def codec(rows: int, precision: Precision) -> None:
    """Blocks of the published decoder, its first three and its last, with one unit each; what follows the last."""
    dtype = torch.float16 if precision == "float16" else torch.float32
    slots = int64(rows)
    for width, length, stride in ((2048, 4, 8), (1024, 32, 6), (512, 192, 5), (64, 3840, 2)):
        x, channel = float32(rows, width, length), float32(width)
        table = float32(65, 7 * width * 54)
        up = empty(2 * stride, width // 2, width, dtype=dtype).permute(2, 1, 0)
        half, last = channel[: width // 2], table[:, :width, None]
        x = vae.snake_upsample(x, channel, channel, channel, up, half, stride, (last, slots), precision=precision)
        width, channel = width // 2, half
        memory = table[:, : width * 18].unflatten(1, (width, 18))
        depthwise, pointwise = float32(width, 1, 7), empty(width, width, 1, dtype=dtype)
        rest = (depthwise, channel, 3, channel, pointwise, channel, (memory, slots))
        x = vae.residual_unit(x, channel, *rest, precision=precision)
    memory = table[:, : width * 6].unflatten(1, (width, 6))
    vae.snake_samples(x, channel, float32(1, width, 7), channel[:1], (memory, slots))


def around_speech(rows: int) -> None:
    state = {
        "last_patch": empty(65, 4, 64),
        "block_table": int32(65, 512),
        "active": empty(65, dtype=torch.bool),
        "seed": int64(65),
        **{name: int32(65) for name in ("length", "step", "min_patches", "max_patches")},
        **{name: float32(65) for name in ("cfg", "temperature")},
    }
    with META:
        frames_to_tokens, norm = nn.Linear(64, 1024, dtype=torch.bfloat16), RMSNorm(1024, 1e-5).to(torch.bfloat16)
    slots, angles = int64(rows), float32(8192, 64)
    encoder = SimpleNamespace(
        special_token=empty(1024), in_proj=frames_to_tokens, encoder=SimpleNamespace(first_norm=norm)
    )
    network: Any = SimpleNamespace(feat_encoder=encoder, cos=angles, sin=angles)
    speech_step.step_inputs(slots, network, state, 16)
    noise = random.philox_normal(slots, int32(rows), 256).view(rows, 64, 4)
    elementwise.quantize(empty(rows, 2048), 9)
    flow = speech_step.FlowTokens(state, slots, frames_to_tokens, frames_to_tokens, norm)
    flow.start(noise, empty(rows, 1024), empty(rows, 1024), empty(1024))
    velocity, out = empty(2 * rows, 4, 64), empty(64, 1024)
    for width in (0.1, 1.0):
        gemm.narrow_gemm(empty(8 * rows, 1024), out, empty(64))
        flow.advance(velocity, width, empty(1024))
    speech_step.settle(state, slots, flow.x, velocity, 0.1, empty(rows, 2048), empty(2, 2048))


def adapters(rows: int, rank: int) -> None:
    """Adapters of VoxCPM2's language models and its local decoder, whose last layer keeps 4 of 11 tokens, in 32
    slots."""
    tiles = int32(num_tiles(rows, 32), 3)
    index = int32(rows)
    of_rows = LoraRows(index, index, tiles)
    for count, width in ((rows, 2048), (22 * rows, 1024)):
        x = empty(count, width)
        pair = LoraPair(empty(32, 3 * rank, width), empty(32, 2560, rank), (2048, 256, 256))
        lora.add_lora(empty(count, 2560), x, pair, of_rows)
        waiting = DeferredNorm(x, float32(count, width // 64), EPS)
        lora.add_lora(empty(count, 2560), waiting, pair, of_rows)
    out = LoraPair(empty(32, rank, 2048), empty(32, 1024, rank), (1024,))
    for count in (22 * rows, 8 * rows):
        lora.add_lora(empty(count, 1024), empty(count, 2048), out, of_rows)
    same = LoraPair(empty(32, rank, 2048), empty(32, 2048, rank), (2048,))
    lora.add_lora(empty(rows, 2048), empty(rows, 2048), same, of_rows)


def adapted_gemms(rows: int, rank: int) -> None:
    """The same in GEMMs, of steps whose rows are sorted by adapter: a language model's layer and one of LocDiT."""
    index = int32(rows)
    of_rows = LoraRows(index, index, int32(num_tiles(rows, 32), 3), in_order=True)
    for count, width, inner in ((rows, 2048, 6144), (22 * rows, 1024, 4096), (8 * rows, 1024, 4096)):
        residual, norm = empty(count, width), empty(width)
        out = GemmLora(LoraPair(empty(32, rank, 2048), empty(32, width, rank), (width,)), of_rows)
        weight = empty(width, 2048)
        normed, _ = gemm.gemm_add_norm(empty(count, 2048), weight, None, residual, norm, EPS, out, deferrable=True)
        hidden = gemm.gemm(normed, empty(2 * inner, width), None, "silu_mul")
        normed, _ = gemm.gemm_add_norm(hidden, empty(width, inner), None, residual, norm, EPS, deferrable=True)
        if count == 8 * rows:
            continue  # The last layer.
        pair = LoraPair(empty(32, 3 * rank, width), empty(32, 2560, rank), (2048, 256, 256))
        for read in (residual, normed):
            gemm.gemm(read, empty(2560, width), lora=GemmLora(pair, of_rows))


def sampling(rows: int) -> None:
    state = SlotState(64, 2048, 1000, META)
    slots = int64(rows)
    step_kernels.decode_rows(slots, state, 2048, 16)
    step_kernels.advance_states(slots, state)
    logits = empty(rows, 1024)[:, :1000]
    step_kernels.sample_tokens(logits, slots, state)
    step_kernels.sample_tokens(logits, slots, state, int64(rows))
    kept = step_kernels.filtered(logits.float(), state.ints[slots], state.floats[slots])
    step_kernels.sample_tokens(kept, slots, state)


CASES: dict[str, Callable[[int], object]] = {
    "Qwen2-VL-2B": lambda rows: stack(rows, 1536, 8960, 16),
    "Qwen2-VL-7B": lambda rows: stack(rows, 3584, 18944, 36, 4),
    "Qwen2.5-VL-3B": lambda rows: stack(rows, 2048, 11008, 20),
    "Qwen2-VL-2B in e4m3": lambda rows: e4m3_stack(rows, 1536, 8960, 16, 2, 151936),
    "Qwen2-VL-7B in e4m3": lambda rows: e4m3_stack(rows, 3584, 18944, 36, 4, 152064),
    "Qwen2.5-VL-3B in e4m3": lambda rows: e4m3_stack(rows, 2048, 11008, 20, 2, 151936),
    **{f"Qwen2-VL-7B in {name}": partial(codes, scheme=scheme) for name, scheme in CODES.items()},
    "VoxCPM2 language model": lambda rows: stack(rows, 2048, 6144, 20),
    "VoxCPM2 local encoder": lambda rows: stack(5 * rows, 1024, 4096, 20),
    "VoxCPM2 local decoder": lambda rows: stack(22 * rows, 1024, 4096, 20),
    "decode attention, 2 key heads": lambda rows: decode_attention(rows, 16, 2, 512),
    "decode attention, 4 key heads": lambda rows: decode_attention(rows, 28, 4, 2048),
    "decode attention, 8 key heads": lambda rows: decode_attention(rows, 32, 8, 2048),
    "decode attention, 1 key head": lambda rows: decode_attention(rows, 16, 1, 2048),
    "decode attention, short": lambda rows: decode_attention(rows, 16, 2, 16),
    "prefill attention over pages": lambda rows: paged_prefill_attention(rows, 2048),
    "prefill attention over few pages": lambda rows: paged_prefill_attention(rows, 64),
    "rotations": rotations,
    "rotations of normed heads": rotations_of_normed_heads,
    "Gated DeltaNet": gated_delta_net,
    "local encoder's attention": lambda rows: local_attention(rows, 5, 0),
    "local decoder's attention": lambda rows: local_attention(2 * rows, 11, 7),
    "prompt": lambda rows: ragged_attention(rows, 1),
    "vision": vision,
    "vision in windows": windowed_vision,
    "experts": experts,
    "DeepStack tower": deepstack_tower,
    "many experts": many_experts,
    "codec in tf32": lambda rows: codec(rows, "tf32"),
    "codec in float16": lambda rows: codec(rows, "float16"),
    "speech step": around_speech,
    **{f"adapters of rank {rank}": partial(adapters, rank=rank) for rank in (16, 32, 64, 128)},
    **{f"adapters of rank {rank} in GEMMs": partial(adapted_gemms, rank=rank) for rank in (16, 32)},
    "sampling": sampling,
}


def heads(rows: int) -> None:
    """Logits over a vocabulary, and of one row."""
    weight = empty(151936, 1536)
    gemm.gemm(empty(rows, 1536), weight, None)


def quick_gelu(rows: int) -> None:
    gemm.gemm(empty(rows, 1280), empty(5120, 1280), empty(5120), "quick_gelu")


def split_norms(rows: int) -> None:
    for splits in range(1, 9):
        partial = float32(splits, rows, 2048)
        norms.sum_add_rms_norm(partial, None, empty(rows, 2048), empty(2048), EPS)


def latent_decode(rows: int, dtype: torch.dtype) -> None:
    cache = empty(64, 1, 576, dtype=dtype)
    tables, lengths = int32(rows, 2048), int32(rows)
    query = empty(rows, 16, 576, dtype=dtype)
    paged_decode.paged_decode_attention(query, cache, cache[..., :512], tables, lengths, 16, 0.1)


def paged_decode_of(dtype: torch.dtype, width: int) -> None:
    rows, cache = 4, empty(64, 2, width, dtype=dtype)
    values = empty(64, 4, width, dtype=dtype)[:, :2]
    tables, lengths = int32(rows, 512), int32(rows)
    angles = float32(rows, width // 2)
    q, k, v = (empty(rows, heads, width, dtype=dtype) for heads in (16, 2, 2))
    current_kv = CurrentKV(k, v, (angles, angles), int64(rows))
    paged_decode.paged_decode_attention(q, cache, values, tables, lengths, 16, 0.1, current_kv=current_kv)


def varlen_of(dtype: torch.dtype, width: int, value_width: int, causal: bool) -> None:
    ends = int32(3)
    q, k = (empty(64, 16, width, dtype=dtype) for _ in range(2))
    varlen.varlen_attention(q, k, empty(64, 16, value_width, dtype=dtype), ends, ends, causal)


def paged_prefill_of(dtype: torch.dtype, heads: int, width: int, value_width: int) -> None:
    """value_width below width: the values are the first columns of the keys, as in latent attention."""
    kv_heads = 2 if width == value_width else 1
    q, cache = empty(64, heads, width, dtype=dtype), empty(64, kv_heads, width, dtype=dtype)
    values = cache[..., :value_width] if kv_heads == 1 else empty(64, 4, width, dtype=dtype)[:, :2]
    ends = int32(65)
    for pages in (64, 2048):  # in one share, and split along the keys
        paged_prefill.paged_prefill_attention(q, cache, values, int32(64, pages), ends, ends[1:], 16, 0.1)


def attention_of_every_kind() -> None:
    """Head dims of the encoders and decoders, in every dtype that can be served."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for width, value_width in ((64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)):
            for causal in (False, True):
                varlen_of(dtype, width, value_width, causal)
        for width in (64, 128, 256):
            paged_decode_of(dtype, width)
            paged_prefill_of(dtype, 12, width, width)
        latent_decode(4, dtype)
        paged_prefill_of(dtype, 16, 576, 512)
        for length, first in ((5, 0), (11, 7), (11, 0)):
            local_attention(4, length, first, dtype)


PREFILLS = (128, 256, 512, 1024)
"""Tokens; beyond them no other configuration is chosen, but for the encoder's and the local stacks' rows."""
ENCODER_ROWS = (256, 1024, 4096)


def launch_all(rows: tuple[int, ...]) -> None:
    """Every launch that `rows` decode rows, a prefill or a picture needs."""
    for case in CASES.values():
        for count in rows:
            case(count)
    for count in PREFILLS:
        for name in STACKS_OF_PREFILLS:
            CASES[name](count)
    for count in rows:
        heads(count)
    for count in ENCODER_ROWS:
        quick_gelu(count)
        windowed_vision(count)
    split_norms(4)
    codec(4, "ieee")
    attention_of_every_kind()


STACKS_OF_PREFILLS = (
    "Qwen2-VL-2B",
    "Qwen2-VL-7B",
    "Qwen2.5-VL-3B",
    "Qwen2-VL-2B in e4m3",
    "Qwen2-VL-7B in e4m3",
    "Qwen2.5-VL-3B in e4m3",
    "VoxCPM2 language model",
)
