"""What the kernels of the AudioVAE decoder share: the snake, the streaming conv cache, operands of matrix products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from models.layers.precision import Precision

TAPS = 7
"""Taps of a depthwise convolution and of the last one."""


@triton.jit
def snake(x, turn, inverse):
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
def half_turns(alpha):
    return alpha * 0.3183098861837907


@triton.jit
def inverse_of(alpha):
    return 1.0 / (alpha + 1e-9)


@triton.jit
def operand(x, PRECISION: tl.constexpr):
    """x as it enters a product. Tensor cores cut TF32 operands off: unrounded, every layer would lose 0.05 % of the
    signal's strength."""
    if PRECISION == "tf32":
        x = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    if PRECISION == "float16":
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)
    return x


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    return tl.dot(a, b, acc=acc, input_precision="ieee" if PRECISION == "ieee" else "tf32")


@triton.jit
def snake_of_past(
    x_row, turn, inverse, memory, channel, t, alive, WIDTH: tl.constexpr, PAD: tl.constexpr, MEMORY: tl.constexpr
):
    """snake(x) at times t, or the memory's value where they lie before the row's first."""
    x = tl.load(x_row + t[:, None] * WIDTH + channel[None, :], mask=(alive & (t >= 0))[:, None], other=0.0)
    x = snake(x, turn, inverse)
    if MEMORY:  # noqa: SIM102 (constants first: Triton drops the branch)
        if tl.program_id(1) == 0:
            before = memory + channel[None, :] * PAD + (t + PAD)[:, None]
            x += tl.load(before, mask=(alive & (t < 0))[:, None], other=0.0)
    return x


@triton.jit
def move_memory(
    x_row,
    turn,
    inverse,
    memory,
    channel,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The memory of one row's channels becomes the last PAD of (memory, snake(x)); only this program reads it."""
    # In place: all reads come before the first write.
    tl.debug_barrier()
    index = tl.arange(0, BLOCK_P)
    kept = (index < PAD)[:, None]
    origin = (index + LENGTH - PAD)[:, None]
    x = tl.load(x_row + origin * WIDTH + channel[None, :], mask=kept & (origin >= 0), other=0.0)
    x = snake(x, turn, inverse)
    place = memory + channel[None, :] * PAD + index[:, None]
    if LENGTH < PAD:
        x = tl.where(origin < 0, tl.load(place + LENGTH, mask=kept & (origin < 0), other=0.0), x)
        tl.debug_barrier()
    tl.store(place, x, mask=kept)


def default_precision() -> Precision:
    """The precision in which the reference runs its convolutions."""
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


def operand_dtype(precision: Precision) -> torch.dtype:
    return torch.float16 if precision == "float16" else torch.float32
