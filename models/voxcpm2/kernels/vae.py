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

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.launch import launch, release_next, wait_for_previous
from models.layers.precision import Precision
from models.voxcpm2.kernels.snake import (
    TAPS,
    default_precision,
    dot,
    half_turns,
    inverse_of,
    move_memory,
    operand,
    operand_dtype,
    snake,
    snake_of_past,
)
from models.voxcpm2.kernels.vae_gemm import GemmTile
from models.voxcpm2.vae_layers import channel_gemm


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
    """snake(depthwise(snake(x))) of BLOCK_C channels; FUSED: the whole unit.

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
    turn, inverse = half_turns(alpha), inverse_of(alpha)
    alpha = tl.load(alpha_out_ptr + channel)[None, :]
    turn_out, inverse_out = half_turns(alpha), inverse_of(alpha)
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
    h0 = snake_of_past(x_row, turn, inverse, memory, channel, t - 6 * DILATION, alive, WIDTH, PAD, MEMORY)
    h1 = snake_of_past(x_row, turn, inverse, memory, channel, t - 5 * DILATION, alive, WIDTH, PAD, MEMORY)
    h2 = snake_of_past(x_row, turn, inverse, memory, channel, t - 4 * DILATION, alive, WIDTH, PAD, MEMORY)
    h3 = snake_of_past(x_row, turn, inverse, memory, channel, t - 3 * DILATION, alive, WIDTH, PAD, MEMORY)
    h4 = snake_of_past(x_row, turn, inverse, memory, channel, t - 2 * DILATION, alive, WIDTH, PAD, MEMORY)
    h5 = snake_of_past(x_row, turn, inverse, memory, channel, t - DILATION, alive, WIDTH, PAD, MEMORY)
    place = t[:, None] * WIDTH + channel[None, :]
    x = tl.load(x_row + place, mask=(alive & (t < LENGTH))[:, None], other=0.0)
    for step in range(steps):
        here = (alive & (t < LENGTH))[:, None]
        t += DILATION
        # Loaded a step ahead.
        following = tl.load(
            x_row + place + DILATION * WIDTH, mask=(alive & (t < LENGTH) & (step + 1 < steps))[:, None], other=0.0
        )
        h6 = snake(x, turn, inverse)
        hidden = bias + h0 * w0 + h1 * w1 + h2 * w2 + h3 * w3 + h4 * w4 + h5 * w5 + h6 * w6
        hidden = operand(snake(hidden, turn_out, inverse_out), PRECISION)
        if FUSED:
            acc = dot(hidden, product, tl.zeros((BLOCK_T, BLOCK_C), tl.float32), PRECISION)
            tl.store(out_row + place, x + (acc + product_bias), mask=here)
        else:
            tl.store(out_row + place, hidden, mask=here)
        h0, h1, h2, h3, h4, h5 = h1, h2, h3, h4, h5, h6
        x = following
        place += DILATION * WIDTH
    if MEMORY:  # noqa: SIM102 (constants first: Triton drops the branch)
        if tl.program_id(1) == 0:
            move_memory(x_row, turn, inverse, memory, channel, WIDTH, LENGTH, PAD, BLOCK_P)


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
    turn, inverse = half_turns(alpha), inverse_of(alpha)
    release_next(PDL)
    wait_for_previous(PDL)
    source = x_ptr + row * stride_row + channel * stride_c
    target = out_ptr + row * ((LENGTH + 1) * WIDTH) + channel
    here = (t < LENGTH)[:, None]
    x = tl.load(source[None, :] + (t * stride_t)[:, None], mask=here, other=0.0)
    x = snake(x * scale[None, :] + shift[None, :], turn[None, :], inverse[None, :])
    tl.store(target[None, :] + ((t + 1) * WIDTH)[:, None], operand(x, PRECISION), mask=here)
    if tl.program_id(1) == 0:
        if MEMORY:
            slot = tl.load(slots_ptr + row).to(tl.int64)
            memory = memory_ptr + slot * stride_slot + channel
            before = tl.load(memory)
            last = snake(tl.load(source + (LENGTH - 1) * stride_t) * scale + shift, turn, inverse)
            tl.store(memory, last)
        else:
            before = tl.zeros((BLOCK_C,), tl.float32)
        tl.store(target, operand(before, PRECISION))


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
    """tanh(convolution of seven taps to one channel(snake(x))), BLOCK_T samples."""
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
        turn, inverse = half_turns(alpha), inverse_of(alpha)
        for tap in tl.static_range(7):
            x = snake_of_past(x_row, turn, inverse, memory, channel, t - (6 - tap), here, WIDTH, 6, MEMORY)
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
                move_memory(x_row, half_turns(alpha), inverse_of(alpha), memory, channel, WIDTH, LENGTH, 6, 8)


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
    memory: Tensor | None = None,
    slots: Tensor | None = None,
    precision: Precision | None = None,
    *,
    unit_tile: UnitTile | None = None,
    tile: GemmTile | None = None,
) -> Tensor:
    """models.voxcpm2.vae_layers.residual_unit; precision "float16" takes pointwise_weight in float16.

    Widths must be multiples of 32, dilations at most 9; memory [slots, C, pad] may be a view into a table but is dense
    in its last two.
    """
    x = x.transpose(1, 2).contiguous()
    rows, length, width = x.shape
    out = torch.empty_like(x)
    precision = precision or default_precision()
    chosen = unit_tile or unit_tile_for(rows, width, precision)
    hidden = out if chosen.fused else torch.empty(x.shape, device=x.device, dtype=operand_dtype(precision))
    stateful = memory is not None and slots is not None
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
        memory if stateful else x,
        slots if stateful else x,
        hidden,
        memory.stride(0) if memory is not None else 0,
        steps,
        WIDTH=width,
        LENGTH=length,
        DILATION=dilation,
        MEMORY=stateful,
        BLOCK_T=chosen.lanes,
        BLOCK_C=chosen.channels,
        BLOCK_P=triton.next_power_of_2((TAPS - 1) * dilation),
        FUSED=chosen.fused,
        PRECISION=precision,
        num_warps=chosen.num_warps,
    )
    if not chosen.fused:
        channel_gemm.launch(hidden, pointwise_weight, pointwise_bias, x, out, width, precision, tile)
    return out.transpose(1, 2)


def snake_upsample(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    alpha: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: int,
    memory: Tensor | None = None,
    slots: Tensor | None = None,
    precision: Precision | None = None,
    *,
    tile: GemmTile | None = None,
) -> Tensor:
    """models.voxcpm2.vae_layers.snake_upsample; precision "float16" takes the weight in float16. A weight
    is copied unless its input channels lie innermost in memory and its taps outermost."""
    rows, width, length = x.shape
    out_features = weight.shape[1]
    out = torch.empty((rows, length * stride, out_features), device=x.device, dtype=x.dtype)
    if x.numel() == 0:
        return out.transpose(1, 2)
    precision = precision or default_precision()
    hidden = torch.empty((rows, length + 1, width), device=x.device, dtype=operand_dtype(precision))
    stateful = memory is not None and slots is not None
    block_t = min(64, triton.next_power_of_2(length))
    launch(
        _snake_kernel,
        (rows, ceil(length / block_t), width // 32),
        x,
        scale,
        shift,
        alpha,
        memory if stateful else x,
        slots if stateful else x,
        hidden,
        x.stride(0),
        x.stride(1),
        x.stride(2),
        memory.stride(0) if memory is not None else 0,
        WIDTH=width,
        LENGTH=length,
        MEMORY=stateful,
        BLOCK_C=32,
        BLOCK_T=block_t,
        PRECISION=precision,
        num_warps=4,
    )
    weight = weight.permute(2, 1, 0).contiguous().view(2, stride * out_features, width)
    channel_gemm.launch(hidden, weight, bias, None, out, stride * out_features, precision, tile)
    return out.transpose(1, 2)


def snake_samples(
    x: Tensor,
    alpha: Tensor,
    weight: Tensor,
    bias: Tensor,
    memory: Tensor | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """models.voxcpm2.vae_layers.snake_samples, for seven taps and widths that are multiples of 32."""
    x = x.transpose(1, 2).contiguous()
    rows, length, width = x.shape
    out = torch.empty((rows, 1, length), device=x.device, dtype=x.dtype)
    stateful = memory is not None and slots is not None
    launch(
        _samples_kernel,
        (rows, ceil(length / 64)),
        x,
        alpha,
        weight,
        bias,
        memory if stateful else x,
        slots if stateful else x,
        out,
        memory.stride(0) if memory is not None else 0,
        WIDTH=width,
        LENGTH=length,
        MEMORY=stateful,
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
