"""Weights in e4m3 inside kernels, and rows of activations that are quantised to it. References: models.layers.e4m3."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.deferred_norm import DeferredNorm, Normed
from models.layers.e4m3 import E4M3, GROUP, E4M3Weight, Weight
from models.layers.kernels.gpu import Capability, current_gpu, interpreted
from models.layers.kernels.launch import launch, release_next, wait_for_previous

_NATIVE: Capability = (8, 9)
"""From here on a GPU converts e4m3 by itself, and multiplies it on tensor cores."""


def has_e4m3() -> bool:
    """Whether this GPU's tensor cores multiply e4m3."""
    return current_gpu().capability >= _NATIVE and not interpreted()


Form = Literal["", "portable", "sm_80", "sm_89"]
"""How a kernel widens e4m3: not at all, in Triton's own operations, or by instructions of this capability."""


def form() -> Form:
    """How kernels widen e4m3 on this GPU."""
    return "portable" if interpreted() else "sm_89" if has_e4m3() else "sm_80"


def parts(weight: Weight) -> tuple[Tensor, Tensor | None, Form]:
    """A weight as kernels read it, e4m3 in units of 16 bits [..., N, K / 2]; its factors, and how it is widened."""
    if not isinstance(weight, E4M3Weight):
        return weight, None, ""
    return weight.values.view(torch.int16), weight.scale, form()


HALF_GROUP = tl.constexpr(GROUP // 2)


@triton.jit
def low_inputs(units):
    """Numbers of units of 16 bits -> those of the inputs in their low bytes; HALF_GROUP later follow the high ones."""
    return units // HALF_GROUP * (2 * HALF_GROUP) + units % HALF_GROUP


@triton.jit
def wide_halves(units, FORM: tl.constexpr):
    """int16 units -> float32 of their low and of their high bytes."""
    if FORM == "sm_89":
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 pair;
            .reg .b16 low, high;
            cvt.rn.f16x2.e4m3x2 pair, $2;
            mov.b32 {low, high}, pair;
            cvt.f32.f16 $0, low;
            cvt.f32.f16 $1, high;
            }""",
            "=f,=f,h",
            [units],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    # Exponents of e4m3 are biased by 7 and those of float32 by 127.
    bits = units.to(tl.int32)
    low = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)
    high = ((bits & 0x7F00) << 12) | ((bits & 0x8000) << 16)
    factor: tl.constexpr = 2.0**120
    return low.to(tl.float32, bitcast=True) * factor, high.to(tl.float32, bitcast=True) * factor


@triton.jit
def narrow_halves(units, kind: tl.constexpr, FORM: tl.constexpr):
    """int16 units -> bfloat16 or float16 (kind) of their low and of their high bytes."""
    if FORM == "portable":
        wide_low, wide_high = wide_halves(units, FORM)
        low, high = wide_low.to(kind), wide_high.to(kind)
    # Two units at a time: the bits in their places, then the exponents' biases made equal (by 2^120 and by 2^8).
    elif kind == tl.bfloat16:
        low = tl.inline_asm_elementwise(
            """{
            .reg .b32 bits, sign, factor, zero;
            shl.b32 bits, $1, 4;
            shl.b32 sign, $1, 8;
            and.b32 bits, bits, 0x07f007f0;
            lop3.b32 bits, sign, 0x80008000, bits, 0xea;
            mov.b32 factor, 0x7b807b80;
            mov.b32 zero, 0x80008000;
            fma.rn.bf16x2 $0, bits, factor, zero;
            }""",
            "=r,r",
            [units],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
        high = tl.inline_asm_elementwise(
            """{
            .reg .b32 bits, factor, zero;
            shr.b32 bits, $1, 4;
            and.b32 bits, bits, 0x07f007f0;
            lop3.b32 bits, $1, 0x80008000, bits, 0xea;
            mov.b32 factor, 0x7b807b80;
            mov.b32 zero, 0x80008000;
            fma.rn.bf16x2 $0, bits, factor, zero;
            }""",
            "=r,r",
            [units],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        low = tl.inline_asm_elementwise(
            """{
            .reg .b32 bits, sign, factor;
            shl.b32 bits, $1, 7;
            shl.b32 sign, $1, 8;
            and.b32 bits, bits, 0x3f803f80;
            lop3.b32 bits, sign, 0x80008000, bits, 0xea;
            mov.b32 factor, 0x5c005c00;
            mul.rn.f16x2 $0, bits, factor;
            }""",
            "=r,r",
            [units],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
        high = tl.inline_asm_elementwise(
            """{
            .reg .b32 bits, factor;
            shr.b32 bits, $1, 1;
            and.b32 bits, bits, 0x3f803f80;
            lop3.b32 bits, $1, 0x80008000, bits, 0xea;
            mov.b32 factor, 0x5c005c00;
            mul.rn.f16x2 $0, bits, factor;
            }""",
            "=r,r",
            [units],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    return low, high


@triton.jit
def _quantise_rows_kernel(
    x_ptr,
    squares_ptr,
    values_ptr,
    scale_ptr,
    stride_x,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SQUARES: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row. SQUARES > 0: of a norm whose scale joins the row's factor."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    # In the order in which weights lie: the inputs of the two bytes of a unit are HALF_GROUP apart.
    column = low_inputs(place // 2) + place % 2 * HALF_GROUP
    here = column < WIDTH
    release_next(PDL)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * stride_x + column, mask=here, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), 0)
    scale = tl.where(largest < 1e-30, 0.0, largest / 448.0)
    inverse = tl.where(largest < 1e-30, 0.0, 448.0 / largest)
    values = tl.minimum(tl.maximum(x * inverse, -448.0), 448.0)
    tl.store(values_ptr + row * WIDTH + place, values.to(values_ptr.dtype.element_ty), mask=here)
    if SQUARES > 0:
        tile = tl.arange(0, PADDED)
        squares = tl.load(squares_ptr + row * SQUARES + tile, mask=tile < SQUARES, other=0.0)
        scale *= tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
    tl.store(scale_ptr + row, scale)


def quantise_rows(x: Normed) -> tuple[Tensor, Tensor]:
    """models.layers.e4m3.quantise_rows of [..., K] as rows: e4m3 [rows, K] and float32 [rows, 1]. A deferred norm's
    scale goes into the factors."""
    before, x = (x, x.rows) if isinstance(x, DeferredNorm) else (None, x)
    rows = x.reshape(-1, x.shape[-1])
    count, width = rows.shape
    values = torch.empty((count, width), device=x.device, dtype=E4M3)
    scale = torch.empty((count, 1), device=x.device, dtype=torch.float32)
    parts_of_squares = before.squares.shape[1] if before is not None else 0
    if count:
        launch(
            _quantise_rows_kernel,
            (count,),
            rows,
            before.squares if before is not None else scale,
            values,
            scale,
            rows.stride(0),
            before.eps if before is not None else 0.0,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            SQUARES=parts_of_squares,
            PADDED=triton.next_power_of_2(max(1, parts_of_squares)),
            num_warps=4 if width <= 4096 else 8,
        )
    return values, scale


def eight_bit_gemm(x: Normed, weight: E4M3Weight, bias: Tensor | None = None) -> Tensor:
    """F.linear by cuBLAS of x quantised row by row: bfloat16 [..., K] -> [..., N]."""
    plain = x.rows if isinstance(x, DeferredNorm) else x
    values, scale = quantise_rows(x)
    y = torch._scaled_mm(
        values,
        weight.values.t(),
        scale_a=scale,
        scale_b=weight.scale[None, :],
        bias=bias,
        out_dtype=plain.dtype,
        use_fast_accum=True,
    )
    return y.view(*plain.shape[:-1], -1)
