"""Causal convolution units of the AudioVAE decoder, each one kernel and one that moves the memory on.

Twins: models.voxcpm2.vae_layers.residual_unit and snake_upsample. The 1x1 and transposed convolutions run on tensor
cores in TF32, as cuDNN runs them by default. A tile's columns are samples of all rows, one row after the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.launch import dependent_launch, num_processors, release_next, wait_for_previous


@triton.jit
def _snake(x, alpha):
    """x + sin^2(alpha x) / (alpha + 1e-9): the angle in half turns, reduced to [-1/2, 1/2], then a polynomial of its
    square whose error stays below 3e-7."""
    turns = x * (alpha * 0.3183098861837907)
    rest = turns - ((turns + 12582912.0) - 12582912.0)
    z = rest * rest
    series = 13.050100326538086 + z * -3.356592893600464
    series = -30.10146713256836 + z * series
    series = 42.727195739746094 + z * series
    series = -32.469669342041016 + z * series
    series = 9.869604110717773 + z * series
    return x + z * series / (alpha + 1e-9)


@triton.jit
def _residual_unit_kernel(
    x_ptr,
    alpha_in_ptr,
    depthwise_ptr,
    depthwise_bias_ptr,
    alpha_out_ptr,
    pointwise_ptr,
    pointwise_bias_ptr,
    memory_ptr,
    slots_ptr,
    out_ptr,
    columns,
    stride_slot,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    KERNEL: tl.constexpr,
    DILATION: tl.constexpr,
    MEMORY: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_C output channels of BLOCK_T columns."""
    PAD: tl.constexpr = (KERNEL - 1) * DILATION
    column = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    here = column < columns
    row, t = (column // LENGTH).to(tl.int64), column % LENGTH
    first_t = tl.min(t, 0)
    out_channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    release_next(PDL)
    wait_for_previous(PDL)
    if MEMORY:
        slot = tl.load(slots_ptr + row, mask=here, other=0).to(tl.int64)
    base = x_ptr + row * (WIDTH * LENGTH) + t
    acc = tl.zeros((BLOCK_C, BLOCK_T), tl.float32)
    for first in range(0, WIDTH, BLOCK_K):
        channel = first + tl.arange(0, BLOCK_K)
        alpha = tl.load(alpha_in_ptr + channel)[:, None]
        hidden = tl.zeros((BLOCK_K, BLOCK_T), tl.float32) + tl.load(depthwise_bias_ptr + channel)[:, None]
        for tap in tl.static_range(KERNEL):
            back = (KERNEL - 1 - tap) * DILATION
            now = here & (t >= back)
            x = tl.load(base[None, :] + (channel * LENGTH)[:, None] - back, mask=now[None, :], other=0.0)
            x = _snake(x, alpha)
            if MEMORY and back > 0:  # noqa: SIM102 (constants first: Triton drops the branch)
                if first_t < back:
                    before = memory_ptr + slot[None, :] * stride_slot + (channel * PAD)[:, None]
                    before += (t + PAD - back)[None, :]
                    x += tl.load(before, mask=(here & (t < back))[None, :], other=0.0)
            hidden += x * tl.load(depthwise_ptr + channel * KERNEL + tap)[:, None]
        hidden = _snake(hidden, tl.load(alpha_out_ptr + channel)[:, None])
        weight = tl.load(pointwise_ptr + out_channel[:, None] * WIDTH + channel[None, :])
        acc = tl.dot(weight, hidden, acc=acc, input_precision=PRECISION)
    acc += tl.load(pointwise_bias_ptr + out_channel)[:, None]
    place = row * (WIDTH * LENGTH) + t
    place = place[None, :] + (out_channel * LENGTH)[:, None]
    acc += tl.load(x_ptr + place, mask=here[None, :], other=0.0)
    tl.store(out_ptr + place, acc, mask=here[None, :])


@triton.jit
def _move_memory_kernel(
    x_ptr,
    alpha_ptr,
    scale_ptr,
    shift_ptr,
    memory_ptr,
    slots_ptr,
    stride_slot,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    PAD: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: the memory of BLOCK_C channels of one row becomes the last PAD of (memory, snake(x))."""
    row = tl.program_id(0).to(tl.int64)
    channel = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C))[:, None]
    index = tl.arange(0, BLOCK_P)[None, :]
    here = (channel < WIDTH) & (index < PAD)
    release_next(PDL)
    wait_for_previous(PDL)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    t = index + LENGTH - PAD
    x = tl.load(x_ptr + row * (WIDTH * LENGTH) + channel * LENGTH + t, mask=here & (t >= 0), other=0.0)
    alpha = tl.load(alpha_ptr + channel, mask=channel < WIDTH, other=1.0)
    if SCALED:
        x = x * tl.load(scale_ptr + channel, mask=channel < WIDTH, other=0.0)
        x += tl.load(shift_ptr + channel, mask=channel < WIDTH, other=0.0)
    value = _snake(x, alpha)
    memory = memory_ptr + slot * stride_slot + channel * PAD + index
    if LENGTH < PAD:
        old = tl.load(memory + LENGTH, mask=here & (t < 0), other=0.0)
        value = tl.where(t < 0, old, value)
        # The shift is in place: all reads come before the first write.
        tl.debug_barrier()
    tl.store(memory, value, mask=here)


@triton.jit
def _upsample_kernel(
    x_ptr,
    scale_ptr,
    shift_ptr,
    alpha_ptr,
    weight_ptr,
    bias_ptr,
    memory_ptr,
    slots_ptr,
    out_ptr,
    columns,
    stride_slot,
    WIDTH: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    STRIDE: tl.constexpr,
    MEMORY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_N pairs of an output channel and a phase (output sample modulo STRIDE) of BLOCK_T inputs."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    real = n < OUT_WIDTH * STRIDE
    here = column < columns
    row, t = (column // LENGTH).to(tl.int64), column % LENGTH
    out_channel, phase = n // STRIDE, n % STRIDE
    release_next(PDL)
    wait_for_previous(PDL)
    if MEMORY:
        slot = tl.load(slots_ptr + row, mask=here, other=0).to(tl.int64)
    base = x_ptr + row * (WIDTH * LENGTH) + t
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for first in range(0, WIDTH, BLOCK_K):
        channel = first + tl.arange(0, BLOCK_K)
        alpha = tl.load(alpha_ptr + channel)[:, None]
        scale = tl.load(scale_ptr + channel)[:, None]
        shift = tl.load(shift_ptr + channel)[:, None]
        taps = weight_ptr + channel[None, :] * (OUT_WIDTH * 2 * STRIDE)
        taps += (out_channel * (2 * STRIDE) + phase)[:, None]
        now_weight = tl.load(taps, mask=real[:, None], other=0.0)
        past_weight = tl.load(taps + STRIDE, mask=real[:, None], other=0.0)
        source = base[None, :] + (channel * LENGTH)[:, None]
        now = tl.load(source, mask=here[None, :], other=0.0)
        now = _snake(now * scale + shift, alpha)
        has_past = here & (t > 0)
        past = tl.load(source - 1, mask=has_past[None, :], other=0.0)
        past = tl.where(has_past[None, :], _snake(past * scale + shift, alpha), 0.0)
        if MEMORY:
            kept = memory_ptr + slot[None, :] * stride_slot + channel[:, None]
            past += tl.load(kept, mask=(here & (t == 0))[None, :], other=0.0)
        acc = tl.dot(now_weight, now, acc=acc, input_precision=PRECISION)
        acc = tl.dot(past_weight, past, acc=acc, input_precision=PRECISION)
    acc += tl.load(bias_ptr + out_channel, mask=real, other=0.0)[:, None]
    place = (row * OUT_WIDTH * LENGTH + t)[None, :] * STRIDE
    place += (out_channel * (LENGTH * STRIDE) + phase)[:, None]
    tl.store(out_ptr + place, acc, mask=real[:, None] & here[None, :])


def residual_unit_cuda(
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
    *,
    tile: tuple[int, int, int] | None = None,
    num_warps: int = 4,
    precision: str = "tf32",
) -> Tensor:
    """models.voxcpm2.vae_layers.residual_unit on a GPU; tile: output channels, columns, input channels of a step."""
    x = x.contiguous()
    rows, width, length = x.shape
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    kernel = depthwise_weight.shape[-1]
    block_c, block_t, block_k = tile or _residual_tile(width, rows * length)
    pdl = dependent_launch()
    launch = {"launch_pdl": True} if pdl else {}
    stateful = memory is not None and slots is not None
    _residual_unit_kernel[(triton.cdiv(rows * length, block_t), width // block_c)](
        x,
        alpha_in,
        depthwise_weight,
        depthwise_bias,
        alpha_out,
        pointwise_weight,
        pointwise_bias,
        memory if stateful else x,
        slots if stateful else x,
        out,
        rows * length,
        memory.stride(0) if stateful else 0,
        WIDTH=width,
        LENGTH=length,
        KERNEL=kernel,
        DILATION=dilation,
        MEMORY=stateful,
        BLOCK_C=block_c,
        BLOCK_T=block_t,
        BLOCK_K=block_k,
        PRECISION=precision,
        PDL=pdl,
        num_warps=num_warps,
        num_stages=2,
        **launch,
    )
    if stateful:
        _move_memory(x, alpha_in, None, None, memory, slots, (kernel - 1) * dilation)
    return out


def snake_upsample_cuda(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    alpha: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: int,
    memory: Tensor | None = None,
    slots: Tensor | None = None,
    *,
    tile: tuple[int, int, int] | None = None,
    num_warps: int = 4,
    num_stages: int = 3,
    precision: str = "tf32",
) -> Tensor:
    """causal_upsample(snake(x * scale + shift)) on a GPU; memory [slots, C, 1] holds the snake's last output."""
    x = x.contiguous()
    rows, width, length = x.shape
    out_width = weight.shape[1]
    out = torch.empty((rows, out_width, length * stride), device=x.device, dtype=x.dtype)
    if x.numel() == 0:
        return out
    block_n, block_t, block_k = tile or _upsample_tile(out_width * stride, rows * length)
    pdl = dependent_launch()
    stateful = memory is not None and slots is not None
    _upsample_kernel[(triton.cdiv(out_width * stride, block_n), triton.cdiv(rows * length, block_t))](
        x,
        scale,
        shift,
        alpha,
        weight,
        bias,
        memory if stateful else x,
        slots if stateful else x,
        out,
        rows * length,
        memory.stride(0) if stateful else 0,
        WIDTH=width,
        OUT_WIDTH=out_width,
        LENGTH=length,
        STRIDE=stride,
        MEMORY=stateful,
        BLOCK_N=block_n,
        BLOCK_T=block_t,
        BLOCK_K=min(block_k, width),
        PRECISION=precision,
        PDL=pdl,
        num_warps=num_warps,
        num_stages=num_stages,
        **({"launch_pdl": True} if pdl else {}),
    )
    if stateful:
        _move_memory(x, alpha, scale, shift, memory, slots, 1)
    return out


def _move_memory(
    x: Tensor, alpha: Tensor, scale: Tensor | None, shift: Tensor | None, memory: Tensor, slots: Tensor, pad: int
) -> None:
    rows, width, length = x.shape
    block_p = triton.next_power_of_2(pad)
    block_c = min(max(1, 2048 // block_p), triton.next_power_of_2(width))
    pdl = dependent_launch()
    _move_memory_kernel[(rows, triton.cdiv(width, block_c))](
        x,
        alpha,
        scale if scale is not None else x,
        shift if shift is not None else x,
        memory,
        slots,
        memory.stride(0),
        WIDTH=width,
        LENGTH=length,
        PAD=pad,
        SCALED=scale is not None,
        BLOCK_C=block_c,
        BLOCK_P=block_p,
        PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )


def _residual_tile(width: int, columns: int) -> tuple[int, int, int]:
    """The largest tile that still gives every multiprocessor a program."""
    block_c, block_t = min(width, 128), 64
    while triton.cdiv(columns, block_t) * (width // block_c) < num_processors() and block_c * block_t > 1024:
        if block_t > 32:
            block_t //= 2
        elif block_c > 32:
            block_c //= 2
        else:
            break
    return block_c, block_t, 32 if width % 32 == 0 else 16


def _upsample_tile(outputs: int, columns: int) -> tuple[int, int, int]:
    block_n, block_t = 128, min(64, max(16, triton.next_power_of_2(columns)))
    while triton.cdiv(columns, block_t) * triton.cdiv(outputs, block_n) < num_processors():
        if block_n > 64:
            block_n //= 2
        elif block_t > 16:
            block_t //= 2
        elif block_n > 32:
            block_n //= 2
        else:
            break
    return block_n, block_t, 32
