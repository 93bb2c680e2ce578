"""Weights that are held as codes inside kernels, and rows of activations that are quantised to e4m3.

References: models.layers.quantized."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.gpu import Capability, current_gpu, interpreted
from models.layers.kernels.launch import launch, release_next, wait_for_previous
from models.layers.norms import DeferredNorm, TileRows
from models.layers.quantized import COLUMNS, E4M3, GROUP, PARTS, QuantizedWeight, Weight

_NATIVE: Capability = (8, 9)
"""From here on a GPU converts e4m3 by itself, and multiplies it on tensor cores."""


def has_e4m3() -> bool:
    """Whether this GPU's tensor cores multiply e4m3."""
    return current_gpu().capability >= _NATIVE and not interpreted()


Form = Literal["", "portable", "sm_80", "sm_89", "u8", "u4", "u4_portable"]
"""How a kernel widens codes: not at all; e4m3 in Triton's own operations, or by instructions of this capability; 8 or 4
bits."""


class Parts(NamedTuple):
    """A weight as kernels read it. values: its codes in units of 16 bits [..., N, K / 2 or K / 4]. group: inputs that
    share a scale; 0: codes without zeros and one scale for each output, which is applied to the sums. parts: codes in
    a unit."""

    values: Tensor
    scale: Tensor | None = None
    zeros: Tensor | None = None
    form: Form = ""
    group: int = 0
    parts: int = 1

    @property
    def constants(self) -> dict[str, Any]:
        """Of a kernel."""
        return {"FORM": self.form, "SCALE_GROUP": self.group, "PARTS": self.parts, "ZEROS": self.zeros is not None}


def parts(weight: Weight) -> Parts:
    if not isinstance(weight, QuantizedWeight):
        return Parts(weight)
    scheme, form = weight.scheme, cast("Form", weight.scheme.codes)
    if form == "e4m3":
        form = "portable" if interpreted() else "sm_89" if has_e4m3() else "sm_80"
    elif form == "u4" and interpreted():
        form = "u4_portable"
    group = 0 if weight.per_output else weight.shape[-1] // weight.scale.shape[-1]
    return Parts(weight.values.view(torch.int16), weight.scale, weight.zeros, form, group, PARTS[scheme.codes])


def in_order(x: Tensor, weight: Weight) -> Tensor:
    """x with its inputs in the order in which the weight's lie."""
    if not isinstance(weight, QuantizedWeight) or weight.order is None:
        return x
    return x.index_select(-1, weight.order)


INPUTS = tl.constexpr(GROUP)
HALF_GROUP = tl.constexpr(GROUP // 2)


@triton.jit
def first_inputs(units, PARTS: tl.constexpr):
    """Numbers of units of 16 bits -> those of the inputs in their first part; INPUTS / PARTS later follows the next."""
    return units // (INPUTS // PARTS) * INPUTS + units % (INPUTS // PARTS)


@triton.jit
def zero_of(zeros, FORM: tl.constexpr):
    """The zero of codes as float32: a stored one, or the middle where `zeros` is None."""
    if zeros is None:
        zero = 0.0
        if FORM == "u8":
            zero = 128.0
        if FORM == "u4" or FORM == "u4_portable":
            zero = 8.0
    else:
        zero = zeros.to(tl.float32)
    return zero


@triton.jit
def wide_part(units, zero, PART: tl.constexpr, FORM: tl.constexpr):
    """int16 units -> code - zero of their part PART as float32."""
    if FORM == "u4" or FORM == "u4_portable":
        # The bits behind those of 2^23 are the code; both zeros go in one exact subtraction.
        code = (units.to(tl.int32) >> (4 * PART)) & 15 | 0x4B000000
        value = code.to(tl.float32, bitcast=True) - (8388608.0 + zero)
    elif FORM == "u8":
        code = (units.to(tl.int32) >> (8 * PART)) & 255 | 0x4B000000
        value = code.to(tl.float32, bitcast=True) - (8388608.0 + zero)
    else:
        low, high = wide_halves(units, FORM)
        if PART == 0:
            value = low
        else:
            value = high
    return value


def _narrow_u4(shift: int, magic: int, one: int = 0, kind: str = "") -> str:
    """Two codes of 4 bits in two values of 16: the bits behind those of a power of two, which stays without kind, else
    $2 is added."""
    without = f"fma.rn.{kind} $0, codes, one, $2;" if kind else "mov.b32 $0, codes;"
    return f"""{{
        .reg .b32 codes, magic, one;
        shr.b32 codes, $1, {shift};
        mov.b32 magic, {magic:#x};
        lop3.b32 codes, codes, 0x000f000f, magic, 0xea;
        mov.b32 one, {one:#x};
        {without}
        }}"""


# 128 and 1 in bfloat16; 1024 and 1 in float16.
_BF16_U4 = tl.constexpr(tuple(_narrow_u4(4 * part, 0x43004300, 0x3F803F80, "bf16x2") for part in range(4)))
_F16_U4 = tl.constexpr(tuple(_narrow_u4(4 * part, 0x64006400, 0x3C003C00, "f16x2") for part in range(4)))
_BF16_BASED = tl.constexpr(tuple(_narrow_u4(4 * part, 0x43004300) for part in range(4)))
_F16_BASED = tl.constexpr(tuple(_narrow_u4(4 * part, 0x64006400) for part in range(4)))


@triton.jit
def _base_of(kind: tl.constexpr):
    """The power of two that has codes of 4 bits behind it."""
    base: tl.constexpr = 128.0 if kind == tl.bfloat16 else 1024.0
    return base


def _narrow_e4m3(low: bool, shift: int, mask: int, factor: int, product: str) -> tl.constexpr:
    """The low or the high bytes of two units in two values of 16 bits: the bits in their places, then the exponents'
    biases made equal (by 2^120 and by 2^8)."""
    return tl.constexpr(
        f"""{{
        .reg .b32 bits, sign, factor, zero;
        {"shl" if low else "shr"}.b32 bits, $1, {shift};
        {"shl.b32 sign, $1, 8;" if low else ""}
        and.b32 bits, bits, {mask:#x};
        lop3.b32 bits, {"sign" if low else "$1"}, 0x80008000, bits, 0xea;
        mov.b32 factor, {factor:#x};
        mov.b32 zero, 0x80008000;
        {product};
        }}"""
    )


_BF16_LOW, _BF16_HIGH = (
    _narrow_e4m3(low, 4, 0x07F007F0, 0x7B807B80, "fma.rn.bf16x2 $0, bits, factor, zero") for low in (True, False)
)
_F16_LOW, _F16_HIGH = (
    _narrow_e4m3(low, shift, 0x3F803F80, 0x5C005C00, "mul.rn.f16x2 $0, bits, factor")
    for low, shift in ((True, 7), (False, 1))
)


@triton.jit
def narrow_part(units, zero, kind: tl.constexpr, PART: tl.constexpr, FORM: tl.constexpr):
    """wide_part as bfloat16 or float16 (kind), which hold it exactly. zero None: _base_of(kind) plus 4 bits."""
    if FORM == "u4":
        if zero is None:
            based: tl.constexpr = _BF16_BASED[PART] if kind == tl.bfloat16 else _F16_BASED[PART]
            bits = tl.inline_asm_elementwise(based, "=r,r", [units], tl.int16, is_pure=True, pack=2)
        else:
            minus = (tl.zeros(units.shape, tl.float32) - _base_of(kind) - zero).to(kind)
            exact: tl.constexpr = _BF16_U4[PART] if kind == tl.bfloat16 else _F16_U4[PART]
            bits = tl.inline_asm_elementwise(exact, "=r,r,r", [units, minus], tl.int16, is_pure=True, pack=2)
        value = bits.to(kind, bitcast=True)
    elif FORM == "u4_portable" and zero is None:
        value = wide_part(units, -_base_of(kind), PART, FORM).to(kind)
    elif FORM == "u4_portable" or FORM == "u8":
        value = wide_part(units, zero, PART, FORM).to(kind)
    else:
        low, high = narrow_halves(units, kind, FORM)
        if PART == 0:
            value = low
        else:
            value = high
    return value


@triton.jit
def accumulate(x, weight, acc, SWAP: tl.constexpr):
    """acc + x [rows, inputs] times weight [inputs, columns]; SWAP: acc is transposed."""
    if SWAP:
        acc = tl.dot(tl.trans(weight), tl.trans(x), acc=acc)
    else:
        acc = tl.dot(x, weight, acc=acc)
    return acc


def takes_ahead(read: Parts, columns: int, warps: int) -> bool:
    """Whether scales and zeros are loaded ahead: with groups of INPUTS or more, and 32 columns for each warp."""
    return read.group > 0 and read.group % GROUP == 0 and read.form != "u8" and columns == 32 * warps


class Coded(NamedTuple):
    """A weight that is held as codes, inside a kernel: pointers to its units, scales and zeros, and the stride between
    outputs."""

    units: Any
    scale: Any
    zeros: Any
    stride: Any


@triton.jit
def sums_of_codes(
    x_rows,
    x_here,
    weight,
    n,
    begin,
    end,
    N: tl.constexpr,
    K: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    FORM: tl.constexpr,
    ZEROS: tl.constexpr,
    GATED: tl.constexpr,
    SWAP: tl.constexpr,
    AHEAD: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Sums of gate and of up over inputs begin to end: of x, from pointers x_rows [rows, 1] on, times the outputs n
    [columns] of gate, and the outputs N + n. weight: Coded.

    Products of codes are exact, and times their scale in float32. AHEAD: scales and zeros are loaded one iteration
    before they are used, and no zero is subtracted from a code of 4 bits alone: a group's sum, less _base_of plus zero
    times the sum of x, is the product. Not with GATED, nor with unsigned codes of 8 bits."""
    RUN: tl.constexpr = INPUTS // PARTS
    GROUPS: tl.constexpr = K // SCALE_GROUP
    BASED: tl.constexpr = AHEAD and PARTS == 4
    kind: tl.constexpr = x_rows.dtype.element_ty
    lane = tl.arange(0, RUN)
    x_rows += lane[None, :]
    weight_rows = weight.units + n[None, :] * weight.stride + lane[:, None]
    factors = n * GROUPS
    acc = tl.zeros((n.shape[0], x_rows.shape[0]) if SWAP else (x_rows.shape[0], n.shape[0]), tl.float32)
    acc_up = acc
    if AHEAD:
        at = factors + tl.minimum(begin, K - 1) // SCALE_GROUP
        next_scale = tl.load(weight.scale + at)
        if ZEROS:
            next_zero = tl.load(weight.zeros + at)
    for first in range(begin, end, INPUTS):
        gate = tl.load(weight_rows + first // PARTS, eviction_policy=KEEP)
        up = gate
        if GATED:
            up = tl.load(weight_rows + first // PARTS + N * weight.stride, eviction_policy=KEEP)
        part_acc = tl.zeros_like(acc)
        part_up = part_acc
        sums = part_acc
        zero = zero_of(None, FORM)
        zero_up = zero
        if AHEAD:
            at = factors + tl.minimum(first + INPUTS, K - 1) // SCALE_GROUP
            scale = next_scale
            next_scale = tl.load(weight.scale + at)
            if ZEROS:
                zero = _along(next_zero, SWAP)
                next_zero = tl.load(weight.zeros + at)
        for part in tl.static_range(PARTS):
            if not AHEAD and part * RUN % SCALE_GROUP == 0:
                at = factors + (first + part * RUN) // SCALE_GROUP
                scale = tl.load(weight.scale + at)
                if ZEROS:
                    zero = zero_of(tl.load(weight.zeros + at), FORM)[None, :]
                if GATED:
                    scale_up = tl.load(weight.scale + at + N * GROUPS)
                    if ZEROS:
                        zero_up = zero_of(tl.load(weight.zeros + at + N * GROUPS), FORM)[None, :]
            x = tl.load(x_rows + first + part * RUN, mask=x_here, other=0.0)
            part_acc = accumulate(x, narrow_part(gate, None if BASED else zero, kind, part, FORM), part_acc, SWAP)
            if BASED:
                sums = accumulate(x, tl.full(gate.shape, 1.0, kind), sums, SWAP)
            if GATED:
                part_up = accumulate(x, narrow_part(up, zero_up, kind, part, FORM), part_up, SWAP)
            if part == PARTS - 1 or (part + 1) * RUN % SCALE_GROUP == 0:
                if BASED:
                    part_acc -= sums * (_base_of(kind) + zero)
                acc += part_acc * _along(scale, SWAP)
                part_acc = tl.zeros_like(acc)
                if GATED:
                    acc_up += part_up * _along(scale_up, SWAP)
                    part_up = part_acc
    return acc, acc_up


@triton.jit
def _along(scale, SWAP: tl.constexpr):
    scale = scale.to(tl.float32)
    return scale[:, None] if SWAP else scale[None, :]


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
    elif kind == tl.bfloat16:
        low = tl.inline_asm_elementwise(_BF16_LOW, "=r,r", [units], tl.bfloat16, is_pure=True, pack=2)
        high = tl.inline_asm_elementwise(_BF16_HIGH, "=r,r", [units], tl.bfloat16, is_pure=True, pack=2)
    else:
        low = tl.inline_asm_elementwise(_F16_LOW, "=r,r", [units], tl.float16, is_pure=True, pack=2)
        high = tl.inline_asm_elementwise(_F16_HIGH, "=r,r", [units], tl.float16, is_pure=True, pack=2)
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
    column = first_inputs(place // 2, 2) + place % 2 * HALF_GROUP
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


def quantise_rows(x: TileRows) -> tuple[Tensor, Tensor]:
    """models.layers.quantized.quantise_rows of [..., K] as rows: e4m3 [rows, K] and float32 [rows, 1]. A deferred
    norm's scale goes into the factors."""
    before, x = (x, x.rows) if isinstance(x, DeferredNorm) else (None, x)
    rows = x.reshape(-1, x.shape[-1])
    count, width = rows.shape
    values = torch.empty((count, width), device=x.device, dtype=E4M3)
    scale = torch.empty((count, 1), device=x.device, dtype=torch.float32)
    parts_of_squares = before.squares.shape[1] if before is not None else 0
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


@triton.jit
def _dequantise_kernel(
    values_ptr,
    scale_ptr,
    zeros_ptr,
    out_ptr,
    K: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    FORM: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: INPUTS inputs of BLOCK_N outputs."""
    RUN: tl.constexpr = INPUTS // PARTS
    release_next(PDL)
    wait_for_previous(PDL)
    n = (tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    chunk = tl.program_id(1)
    lane = tl.arange(0, RUN)[None, :]
    units = tl.load(values_ptr + n * (K // PARTS) + chunk * RUN + lane)
    for part in tl.static_range(PARTS):
        first = chunk * INPUTS + part * RUN
        group = n * (K // SCALE_GROUP) + first // SCALE_GROUP
        zero = zero_of(None, FORM)
        if ZEROS:
            zero = zero_of(tl.load(zeros_ptr + group), FORM)
        value = wide_part(units, zero, part, FORM) * tl.load(scale_ptr + group).to(tl.float32)
        tl.store(out_ptr + n * K + first + lane, value.to(out_ptr.dtype.element_ty))


def dequantise(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """[..., N, K] in 16 bits, rounded once, its inputs in the order in which they lie."""
    read, inputs = parts(weight), weight.shape[-1]
    made = torch.empty(weight.shape, device=read.values.device, dtype=dtype)
    assert read.scale is not None
    launch(
        _dequantise_kernel,
        (weight.numel() // inputs // COLUMNS, inputs // GROUP),
        read.values,
        read.scale,
        read.zeros if read.zeros is not None else read.values,
        made,
        K=inputs,
        **{**read.constants, "SCALE_GROUP": read.group or inputs},
        BLOCK_N=COLUMNS,
        num_warps=4,
    )
    return made


def eight_bit_gemm(x: TileRows, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """F.linear by cuBLAS of x quantised row by row: bfloat16 [..., K] -> [..., N]."""
    plain = x.rows if isinstance(x, DeferredNorm) else x
    values, scale = quantise_rows(x)
    y = torch._scaled_mm(
        values,
        weight.values.t(),
        scale_a=scale,
        scale_b=weight.scale.view(1, -1).float(),
        bias=bias,
        out_dtype=plain.dtype,
        use_fast_accum=True,
    )
    return y.view(*plain.shape[:-1], -1)
