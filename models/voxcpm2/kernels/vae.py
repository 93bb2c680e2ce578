"""The AudioVAE decoder's convolutions over a channels-last signal [rows, T, C]: residual units, transposed
convolutions and the last convolution, each with its memory.

References: the functions of models.voxcpm2.vae_layers. They take and give [rows, C, T]; what these kernels give lies
channels-last in memory, so that the next kernel takes it as it is: every load and store is then a row of channels,
whatever the tap, the dilation or the stride.

The 1x1 and transposed convolutions run on tensor cores, with operands of 10 mantissa bits (TF32 or float16) or in full
float32; all else is float32. Both kinds of operands are rounded here, their weights where they are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.launch import launch, release_next, wait_for_previous
from models.layers.precision import Precision
from models.voxcpm2.host_vae import Memory
from models.voxcpm2.vae_layers import channel_gemm as channel_gemm_op

TAPS = 7
"""Taps of a depthwise convolution and of the last one."""


@triton.jit
def _snake(x, turn, inverse):
    """x + sin^2(alpha x) / (alpha + 1e-9), of turn = alpha / pi and inverse = 1 / (alpha + 1e-9): the angle in half
    turns, reduced to [-1/2, 1/2], then a polynomial of its square whose error stays below 3e-7."""
    turns = x * turn
    rest = turns - ((turns + 12582912.0) - 12582912.0)
    z = rest * rest
    series = 13.050100326538086 + z * -3.356592893600464
    series = -30.10146713256836 + z * series
    series = 42.727195739746094 + z * series
    series = -32.469669342041016 + z * series
    series = 9.869604110717773 + z * series
    return x + z * series * inverse


@triton.jit
def _half_turns(alpha):
    return alpha * 0.3183098861837907


@triton.jit
def _inverse_of(alpha):
    return 1.0 / (alpha + 1e-9)


@triton.jit
def _operand(x, PRECISION: tl.constexpr):
    """x as it enters a product. Tensor cores cut TF32 operands off: unrounded, every layer would lose 0.05 % of the
    signal's strength."""
    if PRECISION == "tf32":
        x = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    if PRECISION == "float16":
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)
    return x


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    return tl.dot(a, b, acc=acc, input_precision="ieee" if PRECISION == "ieee" else "tf32")


class _Signal(NamedTuple):
    """Some channels of a row inside a kernel: x, the snake's parameters (_half_turns, _inverse_of), and the memory."""

    x: Any
    turn: Any
    inverse: Any
    memory: Any
    channel: Any


@triton.jit
def _snake_of_past(signal, t, alive, WIDTH: tl.constexpr, PAD: tl.constexpr, MEMORY: tl.constexpr):
    """snake(x) at times t, or the memory's value where they lie before the row's first."""
    x = tl.load(signal.x + t[:, None] * WIDTH + signal.channel[None, :], mask=(alive & (t >= 0))[:, None], other=0.0)
    x = _snake(x, signal.turn, signal.inverse)
    if MEMORY:  # noqa: SIM102 (constants first: Triton drops the branch)
        if tl.program_id(1) == 0:
            before = signal.memory + signal.channel[None, :] * PAD + (t + PAD)[:, None]
            x += tl.load(before, mask=(alive & (t < 0))[:, None], other=0.0)
    return x


@triton.jit
def _move_memory(signal, WIDTH: tl.constexpr, LENGTH: tl.constexpr, PAD: tl.constexpr, BLOCK_P: tl.constexpr):
    """The memory of one row's channels becomes the last PAD of (memory, _snake(x)); only this program reads it."""
    # In place: all reads come before the first write.
    tl.debug_barrier()
    index = tl.arange(0, BLOCK_P)
    kept = (index < PAD)[:, None]
    origin = (index + LENGTH - PAD)[:, None]
    x = tl.load(signal.x + origin * WIDTH + signal.channel[None, :], mask=kept & (origin >= 0), other=0.0)
    x = _snake(x, signal.turn, signal.inverse)
    place = signal.memory + signal.channel[None, :] * PAD + index[:, None]
    if LENGTH < PAD:
        x = tl.where(origin < 0, tl.load(place + LENGTH, mask=kept & (origin < 0), other=0.0), x)
        tl.debug_barrier()
    tl.store(place, x, mask=kept)


def _default_precision() -> Precision:
    """The precision in which the reference runs its convolutions."""
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


def _operand_dtype(precision: Precision) -> torch.dtype:
    return torch.float16 if precision == "float16" else torch.float32


@triton.jit(do_not_specialize=["steps"])
def _unit_kernel(
    x_ptr,
    alpha_in_ptr,
    weight_ptr,
    bias_ptr,
    alpha_out_ptr,
    product_ptr,
    product_bias_ptr,
    memory_ptr,
    slots_ptr,
    out_ptr,
    stride_slot,
    steps,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    DILATION: tl.constexpr,
    MEMORY: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    FUSED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """snake(depthwise(_snake(x))) of BLOCK_C channels; FUSED: the whole unit.

    Each of BLOCK_T lanes walks `steps` samples that lie DILATION apart, so that the inputs of its taps are those of its
    steps before: one load and one snake a sample. DILATION lanes side by side cover consecutive times."""
    PAD: tl.constexpr = 6 * DILATION
    SPANS: tl.constexpr = BLOCK_T // DILATION
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_T)
    t = (tl.program_id(1) * SPANS + lane // DILATION) * (steps * DILATION) + lane % DILATION
    alive = (lane < SPANS * DILATION) & (t < LENGTH)
    channel = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    alpha = tl.load(alpha_in_ptr + channel)[None, :]
    turn, inverse = _half_turns(alpha), _inverse_of(alpha)
    alpha = tl.load(alpha_out_ptr + channel)[None, :]
    turn_out, inverse_out = _half_turns(alpha), _inverse_of(alpha)
    weights = weight_ptr + channel * 7
    w0 = tl.load(weights)[None, :]
    w1 = tl.load(weights + 1)[None, :]
    w2 = tl.load(weights + 2)[None, :]
    w3 = tl.load(weights + 3)[None, :]
    w4 = tl.load(weights + 4)[None, :]
    w5 = tl.load(weights + 5)[None, :]
    w6 = tl.load(weights + 6)[None, :]
    bias = tl.load(bias_ptr + channel)[None, :]
    if FUSED:
        # [inputs, outputs]: the inputs lie together in memory.
        product = tl.load(product_ptr + channel[None, :] * WIDTH + channel[:, None])
        product_bias = tl.load(product_bias_ptr + channel)[None, :]
    release_next(PDL)
    wait_for_previous(PDL)
    x_row = x_ptr + row * (LENGTH * WIDTH)
    out_row = out_ptr + row * (LENGTH * WIDTH)
    memory = memory_ptr
    if MEMORY:
        memory += tl.load(slots_ptr + row).to(tl.int64) * stride_slot
    signal = _Signal(x_row, turn, inverse, memory, channel)
    h0 = _snake_of_past(signal, t - 6 * DILATION, alive, WIDTH, PAD, MEMORY)
    h1 = _snake_of_past(signal, t - 5 * DILATION, alive, WIDTH, PAD, MEMORY)
    h2 = _snake_of_past(signal, t - 4 * DILATION, alive, WIDTH, PAD, MEMORY)
    h3 = _snake_of_past(signal, t - 3 * DILATION, alive, WIDTH, PAD, MEMORY)
    h4 = _snake_of_past(signal, t - 2 * DILATION, alive, WIDTH, PAD, MEMORY)
    h5 = _snake_of_past(signal, t - DILATION, alive, WIDTH, PAD, MEMORY)
    place = t[:, None] * WIDTH + channel[None, :]
    x = tl.load(x_row + place, mask=(alive & (t < LENGTH))[:, None], other=0.0)
    for step in range(steps):
        here = (alive & (t < LENGTH))[:, None]
        t += DILATION
        # Loaded a step ahead.
        following = tl.load(
            x_row + place + DILATION * WIDTH, mask=(alive & (t < LENGTH) & (step + 1 < steps))[:, None], other=0.0
        )
        h6 = _snake(x, turn, inverse)
        hidden = bias + h0 * w0 + h1 * w1 + h2 * w2 + h3 * w3 + h4 * w4 + h5 * w5 + h6 * w6
        hidden = _operand(_snake(hidden, turn_out, inverse_out), PRECISION)
        if FUSED:
            acc = _dot(hidden, product, tl.zeros((BLOCK_T, BLOCK_C), tl.float32), PRECISION)
            tl.store(out_row + place, x + (acc + product_bias), mask=here)
        else:
            tl.store(out_row + place, hidden, mask=here)
        h0, h1, h2, h3, h4, h5 = h1, h2, h3, h4, h5, h6
        x = following
        place += DILATION * WIDTH
    if MEMORY:  # noqa: SIM102 (constants first: Triton drops the branch)
        if tl.program_id(1) == 0:
            _move_memory(signal, WIDTH, LENGTH, PAD, BLOCK_P)


@triton.jit
def _snake_kernel(
    x_ptr,
    scale_ptr,
    shift_ptr,
    alpha_ptr,
    memory_ptr,
    slots_ptr,
    out_ptr,
    stride_row,
    stride_c,
    stride_t,
    stride_slot,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    MEMORY: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """snake(x * scale + shift) into out [rows, 1 + LENGTH, WIDTH], behind the memory (0 without). The first program
    along T also does the last sample, which becomes the memory."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    scale, shift = tl.load(scale_ptr + channel), tl.load(shift_ptr + channel)
    alpha = tl.load(alpha_ptr + channel)
    turn, inverse = _half_turns(alpha), _inverse_of(alpha)
    release_next(PDL)
    wait_for_previous(PDL)
    source = x_ptr + row * stride_row + channel * stride_c
    target = out_ptr + row * ((LENGTH + 1) * WIDTH) + channel
    here = (t < LENGTH)[:, None]
    x = tl.load(source[None, :] + (t * stride_t)[:, None], mask=here, other=0.0)
    x = _snake(x * scale[None, :] + shift[None, :], turn[None, :], inverse[None, :])
    tl.store(target[None, :] + ((t + 1) * WIDTH)[:, None], _operand(x, PRECISION), mask=here)
    if tl.program_id(1) == 0:
        if MEMORY:
            slot = tl.load(slots_ptr + row).to(tl.int64)
            memory = memory_ptr + slot * stride_slot + channel
            before = tl.load(memory)
            last = _snake(tl.load(source + (LENGTH - 1) * stride_t) * scale + shift, turn, inverse)
            tl.store(memory, last)
        else:
            before = tl.zeros((BLOCK_C,), tl.float32)
        tl.store(target, _operand(before, PRECISION))


@triton.jit
def _samples_kernel(
    x_ptr,
    alpha_ptr,
    weight_ptr,
    bias_ptr,
    memory_ptr,
    slots_ptr,
    out_ptr,
    stride_slot,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    MEMORY: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """tanh(convolution of seven taps to one channel(_snake(x))), BLOCK_T samples."""
    row = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    here = t < LENGTH
    release_next(PDL)
    wait_for_previous(PDL)
    x_row = x_ptr + row * (LENGTH * WIDTH)
    memory = memory_ptr
    if MEMORY:
        memory += tl.load(slots_ptr + row).to(tl.int64) * stride_slot
    sums = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for first in tl.static_range(0, WIDTH, BLOCK_C):
        channel = first + tl.arange(0, BLOCK_C)
        alpha = tl.load(alpha_ptr + channel)[None, :]
        signal = _Signal(x_row, _half_turns(alpha), _inverse_of(alpha), memory, channel)
        for tap in tl.static_range(7):
            x = _snake_of_past(signal, t - (6 - tap), here, WIDTH, 6, MEMORY)
            sums += x * tl.load(weight_ptr + channel * 7 + tap)[None, :]
    out = tl.sum(sums, 1) + tl.load(bias_ptr)
    # tanh by way of what cannot overflow.
    small = tl.exp(-2.0 * tl.abs(out))
    size = (1.0 - small) / (1.0 + small)
    tl.store(out_ptr + row * LENGTH + t, tl.where(out < 0, -size, size), mask=here)
    if MEMORY:  # noqa: SIM102
        if tl.program_id(1) == 0:
            for first in tl.static_range(0, WIDTH, BLOCK_C):
                channel = first + tl.arange(0, BLOCK_C)
                alpha = tl.load(alpha_ptr + channel)[None, :]
                signal = _Signal(x_row, _half_turns(alpha), _inverse_of(alpha), memory, channel)
                _move_memory(signal, WIDTH, LENGTH, 6, 8)


@dataclass(frozen=True)
class UnitTile:
    """lanes walk `steps` samples each, in programs of `channels`; fused: all channels, with the GEMM."""

    lanes: int
    channels: int
    steps: int
    num_warps: int
    fused: bool


def residual_unit(
    x: Tensor,
    alpha_in: Tensor,
    depthwise_weight: Tensor,
    depthwise_bias: Tensor,
    dilation: int,
    alpha_out: Tensor,
    pointwise_weight: Tensor,
    pointwise_bias: Tensor,
    memory: Memory | None = None,
    precision: Precision | None = None,
    *,
    unit_tile: UnitTile | None = None,
) -> Tensor:
    """models.voxcpm2.vae_layers.residual_unit; precision "float16" takes pointwise_weight in float16.

    Widths must be multiples of 32, dilations at most 9; memory [slots, C, pad] may be a view into a table but is dense
    in its last two.
    """
    x = x.transpose(1, 2).contiguous()
    rows, length, width = x.shape
    out = torch.empty_like(x)
    precision = precision or _default_precision()
    chosen = unit_tile or unit_tile_for(rows, width, precision)
    hidden = out if chosen.fused else torch.empty(x.shape, device=x.device, dtype=_operand_dtype(precision))
    table, slots = memory or (x, x)
    spans = chosen.lanes // dilation
    # The first program of a row must be the only one whose taps reach the memory.
    steps = max(chosen.steps, ceil((TAPS - 1) / spans))
    launch(
        _unit_kernel,
        (rows, ceil(length / (spans * dilation * steps)), width // chosen.channels),
        x,
        alpha_in,
        depthwise_weight,
        depthwise_bias,
        alpha_out,
        pointwise_weight,
        pointwise_bias,
        table,
        slots,
        hidden,
        table.stride(0) if memory is not None else 0,
        steps,
        WIDTH=width,
        LENGTH=length,
        DILATION=dilation,
        MEMORY=memory is not None,
        BLOCK_T=chosen.lanes,
        BLOCK_C=chosen.channels,
        BLOCK_P=triton.next_power_of_2((TAPS - 1) * dilation),
        FUSED=chosen.fused,
        PRECISION=precision,
        num_warps=chosen.num_warps,
    )
    if not chosen.fused:
        channel_gemm_op.launch(hidden, pointwise_weight, pointwise_bias, x, out, width, precision)
    return out.transpose(1, 2)


def snake_upsample(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    alpha: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: int,
    memory: Memory | None = None,
    precision: Precision | None = None,
) -> Tensor:
    """models.voxcpm2.vae_layers.snake_upsample; precision "float16" takes the weight in float16. A weight
    is copied unless its input channels lie innermost in memory and its taps outermost."""
    rows, width, length = x.shape
    out_features = weight.shape[1]
    out = torch.empty((rows, length * stride, out_features), device=x.device, dtype=x.dtype)
    if x.numel() == 0:
        return out.transpose(1, 2)
    precision = precision or _default_precision()
    hidden = torch.empty((rows, length + 1, width), device=x.device, dtype=_operand_dtype(precision))
    table, slots = memory or (x, x)
    block_t = min(64, triton.next_power_of_2(length))
    launch(
        _snake_kernel,
        (rows, ceil(length / block_t), width // 32),
        x,
        scale,
        shift,
        alpha,
        table,
        slots,
        hidden,
        *x.stride(),
        table.stride(0) if memory is not None else 0,
        WIDTH=width,
        LENGTH=length,
        MEMORY=memory is not None,
        BLOCK_C=32,
        BLOCK_T=block_t,
        PRECISION=precision,
        num_warps=4,
    )
    weight = weight.permute(2, 1, 0).contiguous().view(2, stride * out_features, width)
    channel_gemm_op.launch(hidden, weight, bias, None, out, stride * out_features, precision)
    return out.transpose(1, 2)


def snake_samples(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor, memory: Memory | None = None) -> Tensor:
    """models.voxcpm2.vae_layers.snake_samples, for seven taps and widths that are multiples of 32."""
    x = x.transpose(1, 2).contiguous()
    rows, length, width = x.shape
    out = torch.empty((rows, 1, length), device=x.device, dtype=x.dtype)
    table, slots = memory or (x, x)
    launch(
        _samples_kernel,
        (rows, ceil(length / 64)),
        x,
        alpha,
        weight,
        bias,
        table,
        slots,
        out,
        table.stride(0) if memory is not None else 0,
        WIDTH=width,
        LENGTH=length,
        MEMORY=memory is not None,
        BLOCK_T=64,
        BLOCK_C=32,
        num_warps=4,
    )
    return out


def unit_tile_for(rows: int, width: int, precision: Precision) -> UnitTile:
    """About 16 values a thread, of which a walk keeps nine sets in registers; few streams need short walks."""
    steps = 2 if rows < 8 else 16
    if width <= 128 and precision != "ieee" and width & (width - 1) == 0:
        lanes = 32 if width == 128 else 64
        return UnitTile(lanes, width, steps, num_warps=lanes * width // 512, fused=True)
    return UnitTile(64, 32, 1 if width >= 1024 else min(steps, 4), num_warps=4, fused=False)


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    x_ptr,
    out_ptr,
    rows,
    LENGTH: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TWO_TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [rows * LENGTH, OUTPUTS] = hidden @ weight^T + bias, weight [OUTPUTS, INPUTS], plus x like out.

    TWO_TAPS: a transposed convolution. hidden has one sample more in front of each row, weight [2, OUTPUTS, INPUTS] a
    part for this sample and one for the sample before; outputs are (phase, channel), which is time's order; no x."""
    TILES_N: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    # Tiles of the same samples lie together: the hidden values they share stay in L2.
    output = program % TILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
    sample = (program // TILES_N * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    here = (sample < rows * LENGTH)[:, None]
    real = ((OUTPUTS % BLOCK_N == 0) | (output < OUTPUTS))[None, :]
    k = tl.arange(0, BLOCK_K)
    weights = weight_ptr + output.to(tl.int64)[None, :] * INPUTS + k[:, None]
    bias = tl.load(bias_ptr + output % CHANNELS)[None, :]
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    release_next(PDL)
    wait_for_previous(PDL)
    if TWO_TAPS:
        source = hidden_ptr + (sample + sample // LENGTH)[:, None] * INPUTS + k[None, :]
        for first in range(0, 2 * INPUTS, BLOCK_K):
            # The sample before comes first in hidden and second in the weight.
            back = tl.where(first < INPUTS, OUTPUTS * INPUTS, -INPUTS)
            weight = tl.load(weights + (back + first), mask=real, other=0.0)
            acc = _dot(tl.load(source + first, mask=here, other=0.0), weight, acc, PRECISION)
    else:
        source = hidden_ptr + sample[:, None] * INPUTS + k[None, :]
        for first in range(0, INPUTS, BLOCK_K):
            weight = tl.load(weights + first, mask=real, other=0.0)
            acc = _dot(tl.load(source + first, mask=here, other=0.0), weight, acc, PRECISION)
    acc += bias
    place = sample[:, None] * OUTPUTS + output[None, :]
    if not TWO_TAPS:
        acc += tl.load(x_ptr + place, mask=here & real, other=0.0)
    tl.store(out_ptr + place, acc, mask=here & real)


@dataclass(frozen=True)
class GemmTile:
    """Samples and outputs of a thread block, inputs of a step."""

    samples: int
    outputs: int
    inputs: int
    num_warps: int = 4
    num_stages: int = 3


def channel_gemm(
    hidden: Tensor, weight: Tensor, bias: Tensor, x: Tensor | None, out: Tensor, outputs: int, precision: Precision
) -> None:
    """hidden [rows, T, inputs], or with T + 1 samples if there is no x, into out of rows * T * outputs values."""
    if weight.dtype != hidden.dtype:
        raise TypeError(f"weight is {weight.dtype}, expected {hidden.dtype} for a GEMM in {precision}")
    rows, inputs = hidden.shape[0], hidden.shape[-1]
    length = hidden.shape[1] - (x is None)
    tile = gemm_tile_for(rows * length, outputs, precision)
    launch(
        _product_kernel,
        (ceil(outputs / tile.outputs) * ceil(rows * length / tile.samples),),
        hidden,
        weight,
        bias,
        hidden if x is None else x,
        out,
        rows,
        LENGTH=length,
        INPUTS=inputs,
        OUTPUTS=outputs,
        CHANNELS=bias.shape[0],
        TWO_TAPS=x is None,
        BLOCK_T=tile.samples,
        BLOCK_N=tile.outputs,
        BLOCK_K=min(tile.inputs, inputs & -inputs),
        PRECISION=precision,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def gemm_tile_for(samples: int, outputs: int, precision: Precision) -> GemmTile:
    """Large where that keeps most SMs busy. Smaller ones than 64 are slower even where they do."""
    inputs = 64 if precision == "float16" else 32
    if outputs >= 128 and ceil(samples / 128) * ceil(outputs / 128) >= 96:
        return GemmTile(128, 128, inputs, num_warps=8)
    return GemmTile(64, 64, inputs, num_stages=4)
