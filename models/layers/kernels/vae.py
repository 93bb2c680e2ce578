"""Causal convolution units of the AudioVAE decoder: element-wise work with the depthwise convolution in one kernel, the
product over channels with bias and residual in a second, and the memory moved on by spare programs of one of them.

Twins: models.voxcpm2.vae_layers.residual_unit and snake_upsample. The 1x1 and transposed convolutions run on tensor
cores in TF32, as cuDNN runs them by default; their inputs are rounded here, their weights where they are loaded. A
tile's columns are samples of all rows, one row after the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.launch import dependent_launch, release_next, wait_for_previous


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
def _operand(x, ROUND: tl.constexpr):
    """x as it enters a product. Tensor cores cut TF32 operands off: unrounded, every layer would lose 0.05 % of the
    signal's strength."""
    if ROUND:
        x = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _row_and_time(tile, LENGTH: tl.constexpr, BLOCK_T: tl.constexpr):
    """Row int64 and time of a tile's columns; a tile inside one row is seen to be contiguous, so its loads are wide."""
    first = tile * BLOCK_T
    offsets = tl.arange(0, BLOCK_T)
    if LENGTH % BLOCK_T == 0:
        row = (first // LENGTH).to(tl.int64) + tl.zeros((BLOCK_T,), tl.int64)
        t = tl.multiple_of(first % LENGTH, BLOCK_T) + offsets
    else:
        row = ((first + offsets) // LENGTH).to(tl.int64)
        t = (first + offsets) % LENGTH
    return row, t


@triton.jit(do_not_specialize=["rows"])
def _depthwise_kernel(
    x_ptr,
    alpha_in_ptr,
    weight_ptr,
    bias_ptr,
    alpha_out_ptr,
    memory_ptr,
    slots_ptr,
    out_ptr,
    rows,
    stride_slot,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    KERNEL: tl.constexpr,
    DILATION: tl.constexpr,
    MEMORY: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ROUND: tl.constexpr,
    PDL: tl.constexpr,
):
    """snake(depthwise(snake(x))) of BLOCK_C channels and BLOCK_T columns; the taps' snakes are cheaper than storing."""
    PAD: tl.constexpr = (KERNEL - 1) * DILATION
    tile = tl.program_id(0)
    row, t = _row_and_time(tile, LENGTH, BLOCK_T)
    here = tile * BLOCK_T + tl.arange(0, BLOCK_T) < rows * LENGTH
    first_t = tl.min(t, 0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    alpha = tl.load(alpha_in_ptr + channel)[:, None]
    alpha_out = tl.load(alpha_out_ptr + channel)[:, None]
    hidden = tl.zeros((BLOCK_C, BLOCK_T), tl.float32) + tl.load(bias_ptr + channel)[:, None]
    release_next(PDL)
    wait_for_previous(PDL)
    if MEMORY:
        slot = tl.load(slots_ptr + row, mask=here, other=0).to(tl.int64)
    place = (row * (WIDTH * LENGTH) + t)[None, :] + (channel * LENGTH)[:, None]
    for tap in tl.static_range(KERNEL):
        back = (KERNEL - 1 - tap) * DILATION
        x = tl.load(x_ptr + place - back, mask=(here & (t >= back))[None, :], other=0.0)
        x = _snake(x, alpha)
        if MEMORY and back > 0:  # noqa: SIM102 (constants first: Triton drops the branch)
            if first_t < back:
                before = memory_ptr + slot[None, :] * stride_slot + (channel * PAD)[:, None]
                before += (t + PAD - back)[None, :]
                x += tl.load(before, mask=(here & (t < back))[None, :], other=0.0)
        hidden += x * tl.load(weight_ptr + channel * KERNEL + tap)[:, None]
    # Channels innermost, as the product wants its inputs.
    target = out_ptr + ((row * LENGTH + t) * WIDTH)[None, :] + channel[:, None]
    tl.store(target, _operand(_snake(hidden, alpha_out), ROUND), mask=here[None, :])


@triton.jit(do_not_specialize=["rows"])
def _pointwise_kernel(
    hidden_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    alpha_in_ptr,
    memory_ptr,
    slots_ptr,
    out_ptr,
    rows,
    stride_slot,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MOVE_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """x + weight @ hidden + bias. Programs behind the last tile move the memory on: PAD is 0 without one."""
    TILES_C: tl.constexpr = WIDTH // BLOCK_C
    release_next(PDL)
    wait_for_previous(PDL)
    program = tl.program_id(0)
    columns = rows * LENGTH
    tiles = tl.cdiv(columns, BLOCK_T) * TILES_C
    if program < tiles:
        # Tiles of the same columns lie together: the hidden values they share stay in L2.
        out_channel = program % TILES_C * BLOCK_C + tl.arange(0, BLOCK_C)
        tile = program // TILES_C
        row, t = _row_and_time(tile, LENGTH, BLOCK_T)
        here = tile * BLOCK_T + tl.arange(0, BLOCK_T) < columns
        base = row * (WIDTH * LENGTH) + t
        k = tl.arange(0, BLOCK_K)
        source = hidden_ptr + ((row * LENGTH + t) * WIDTH)[:, None] + k[None, :]
        weights = weight_ptr + out_channel[:, None] * WIDTH + k[None, :]
        acc = tl.zeros((BLOCK_C, BLOCK_T), tl.float32)
        for first in range(0, WIDTH, BLOCK_K):
            weight = tl.load(weights + first)
            hidden = tl.load(source + first, mask=here[:, None], other=0.0)
            acc = tl.dot(weight, tl.trans(hidden), acc=acc, input_precision=PRECISION)
        acc += tl.load(bias_ptr + out_channel)[:, None]
        place = base[None, :] + (out_channel * LENGTH)[:, None]
        acc += tl.load(x_ptr + place, mask=here[None, :], other=0.0)
        tl.store(out_ptr + place, acc, mask=here[None, :])
    elif PAD > 0:
        # The memory of MOVE_C channels of one row becomes the last PAD of (memory, snake(x)).
        mover = program - tiles
        mover_row = (mover // (WIDTH // MOVE_C)).to(tl.int64)
        channel = (mover % (WIDTH // MOVE_C) * MOVE_C + tl.arange(0, MOVE_C))[:, None]
        index = tl.arange(0, BLOCK_P)[None, :]
        kept = (index < PAD) & (channel < WIDTH)
        slot = tl.load(slots_ptr + mover_row).to(tl.int64)
        origin = index + LENGTH - PAD
        samples = x_ptr + mover_row * (WIDTH * LENGTH) + channel * LENGTH + origin
        value = tl.load(samples, mask=kept & (origin >= 0), other=0.0)
        value = _snake(value, tl.load(alpha_in_ptr + channel))
        memory = memory_ptr + slot * stride_slot + channel * PAD + index
        if LENGTH < PAD:
            value = tl.where(origin < 0, tl.load(memory + LENGTH, mask=kept & (origin < 0), other=0.0), value)
            # The shift is in place: all reads come before the first write.
            tl.debug_barrier()
        tl.store(memory, value, mask=kept)


@triton.jit
def _snake_kernel(
    x_ptr,
    scale_ptr,
    shift_ptr,
    alpha_ptr,
    memory_ptr,
    slots_ptr,
    out_ptr,
    stride_slot,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    MEMORY: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ROUND: tl.constexpr,
    PDL: tl.constexpr,
):
    """snake(x * scale + shift) into out [rows, 1 + LENGTH, WIDTH], behind the memory (0 without). The first program
    along T also does the last sample, which becomes the memory."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    scale, shift = tl.load(scale_ptr + channel), tl.load(shift_ptr + channel)
    alpha = tl.load(alpha_ptr + channel)
    release_next(PDL)
    wait_for_previous(PDL)
    source = x_ptr + (row * WIDTH + channel) * LENGTH
    target = out_ptr + row * ((LENGTH + 1) * WIDTH) + channel
    here = (t < LENGTH)[None, :]
    x = tl.load(source[:, None] + t[None, :], mask=here, other=0.0)
    x = _snake(x * scale[:, None] + shift[:, None], alpha[:, None])
    tl.store(target[:, None] + ((t + 1) * WIDTH)[None, :], _operand(x, ROUND), mask=here)
    if tl.program_id(2) == 0:
        if MEMORY:
            slot = tl.load(slots_ptr + row).to(tl.int64)
            memory = memory_ptr + slot * stride_slot + channel
            before = tl.load(memory)
            last = _snake(tl.load(source + LENGTH - 1) * scale + shift, alpha)
            tl.store(memory, last)
        else:
            before = tl.zeros((BLOCK_C,), tl.float32)
        tl.store(target, _operand(before, ROUND))


@triton.jit(do_not_specialize=["rows"])
def _upsample_kernel(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows,
    stride_in,
    stride_out,
    stride_tap,
    WIDTH: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_N output channels of one phase (output sample modulo STRIDE), BLOCK_T inputs."""
    TILES_N: tl.constexpr = (OUT_WIDTH + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    phase = program // TILES_N % STRIDE
    channel = program % TILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
    real = channel < OUT_WIDTH
    tile = program // (TILES_N * STRIDE)
    row, t = _row_and_time(tile, LENGTH, BLOCK_T)
    here = tile * BLOCK_T + tl.arange(0, BLOCK_T) < rows * LENGTH
    k = tl.arange(0, BLOCK_K)
    weights = weight_ptr + (channel * stride_out + phase * stride_tap)[:, None] + (k * stride_in)[None, :]
    source = hidden_ptr + ((row * (LENGTH + 1) + t) * WIDTH)[:, None] + k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    release_next(PDL)
    wait_for_previous(PDL)
    for first in range(0, WIDTH, BLOCK_K):
        weight = tl.load(weights + first * stride_in, mask=real[:, None], other=0.0)
        now = tl.load(source + first + WIDTH, mask=here[:, None], other=0.0)
        acc = tl.dot(weight, tl.trans(now), acc=acc, input_precision=PRECISION)
        weight = tl.load(weights + first * stride_in + STRIDE * stride_tap, mask=real[:, None], other=0.0)
        past = tl.load(source + first, mask=here[:, None], other=0.0)
        acc = tl.dot(weight, tl.trans(past), acc=acc, input_precision=PRECISION)
    acc += tl.load(bias_ptr + channel, mask=real, other=0.0)[:, None]
    place = (row * OUT_WIDTH * LENGTH + t)[None, :] * STRIDE + phase
    place += (channel * (LENGTH * STRIDE))[:, None]
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
    num_stages: int = 3,
    precision: str | None = None,
) -> Tensor:
    """models.voxcpm2.vae_layers.residual_unit on a GPU; tile: output channels, columns, input channels of a step.

    Widths must be multiples of 32; memory [slots, C, pad] may be a view into a table but is dense in its last two.
    """
    x = x.contiguous()
    rows, width, length = x.shape
    out, hidden = torch.empty_like(x), torch.empty_like(x)
    if x.numel() == 0:
        return out
    kernel = depthwise_weight.shape[-1]
    pad = (kernel - 1) * dilation
    stateful = memory is not None and slots is not None
    stride_slot = memory.stride(0) if memory is not None else 0
    memory, slots = (memory, slots) if stateful else (x, x)
    pdl = dependent_launch()
    precision = precision or _default_precision()
    launch = {"launch_pdl": True} if pdl else {}
    columns = rows * length
    block_c, block_t = 32, 32 if columns * width > 1 << 20 else 16
    _depthwise_kernel[(triton.cdiv(columns, block_t), width // block_c)](
        x,
        alpha_in,
        depthwise_weight,
        depthwise_bias,
        alpha_out,
        memory,
        slots,
        hidden,
        rows,
        stride_slot,
        WIDTH=width,
        LENGTH=length,
        KERNEL=kernel,
        DILATION=dilation,
        MEMORY=stateful,
        BLOCK_C=block_c,
        BLOCK_T=block_t,
        ROUND=precision == "tf32",
        PDL=pdl,
        num_warps=4,
        **launch,
    )
    block_c, block_t, block_k = tile or _tile(width)
    tiles_t = triton.cdiv(columns, block_t)
    block_p = triton.next_power_of_2(pad)
    move_c = min(max(1, 2048 // block_p), width)
    movers = rows * (width // move_c) if stateful else 0
    _pointwise_kernel[(tiles_t * (width // block_c) + movers,)](
        hidden,
        x,
        pointwise_weight,
        pointwise_bias,
        alpha_in,
        memory,
        slots,
        out,
        rows,
        stride_slot,
        WIDTH=width,
        LENGTH=length,
        PAD=pad if stateful else 0,
        BLOCK_C=block_c,
        BLOCK_T=block_t,
        BLOCK_K=block_k,
        MOVE_C=move_c,
        BLOCK_P=block_p,
        PRECISION=precision,
        PDL=pdl,
        num_warps=num_warps,
        num_stages=num_stages,
        **launch,
    )
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
    precision: str | None = None,
) -> Tensor:
    """models.voxcpm2.vae_layers.snake_upsample on a GPU. The weight may lie in memory in any order: fastest with the
    input channels innermost."""
    x = x.contiguous()
    rows, width, length = x.shape
    out_width = weight.shape[1]
    out = torch.empty((rows, out_width, length * stride), device=x.device, dtype=x.dtype)
    if x.numel() == 0:
        return out
    hidden = torch.empty((rows, length + 1, width), device=x.device, dtype=x.dtype)
    stateful = memory is not None and slots is not None
    pdl = dependent_launch()
    precision = precision or _default_precision()
    launch = {"launch_pdl": True} if pdl else {}
    block_c, block_t = 32, min(32, triton.next_power_of_2(length))
    _snake_kernel[(rows, width // block_c, triton.cdiv(length, block_t))](
        x,
        scale,
        shift,
        alpha,
        memory if stateful else x,
        slots if stateful else x,
        hidden,
        memory.stride(0) if memory is not None else 0,
        WIDTH=width,
        LENGTH=length,
        MEMORY=stateful,
        BLOCK_C=block_c,
        BLOCK_T=block_t,
        ROUND=precision == "tf32",
        PDL=pdl,
        num_warps=4,
        **launch,
    )
    columns = rows * length
    block_n, block_t, block_k = tile or _tile(out_width)
    programs = triton.cdiv(out_width, block_n) * stride * triton.cdiv(columns, block_t)
    _upsample_kernel[(programs,)](
        hidden,
        weight,
        bias,
        out,
        rows,
        weight.stride(0),
        weight.stride(1),
        weight.stride(2),
        WIDTH=width,
        OUT_WIDTH=out_width,
        LENGTH=length,
        STRIDE=stride,
        BLOCK_N=block_n,
        BLOCK_T=block_t,
        BLOCK_K=min(block_k, width),
        PRECISION=precision,
        PDL=pdl,
        num_warps=num_warps,
        num_stages=num_stages,
        **launch,
    )
    return out


def _default_precision() -> str:
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


def _tile(width: int) -> tuple[int, int, int]:
    """Channels, columns and inputs of a step: the best or close to it from 1 to 64 streams, also where larger or
    smaller tiles would fill the GPU more evenly."""
    return min(64, triton.next_power_of_2(width)), 64, 32
