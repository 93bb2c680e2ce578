"""Element-wise chains over packed rows. References: models.layers.packed,
models.layers.dense_segments.lengthen and models.layers.rotary.rotary_cos_sin."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.dense_segments import FEATURES, far
from models.layers.kernels.launch import launch, release_next, wait_for_previous
from models.layers.packed import WINDOW

_WINDOW: tl.constexpr = tl.constexpr(WINDOW)
_WINDOW_ROWS = 32


@triton.jit
def _layer_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    stride_x,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row. ADD: residual += x, then its norm."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    here = columns < WIDTH
    kind = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + columns, mask=here, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=here, other=0.0).to(tl.float32)
    release_next(PDL)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * stride_x + columns, mask=here, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row * WIDTH + columns, mask=here, other=0.0).to(tl.float32)
        x = x.to(kind).to(tl.float32)
        tl.store(residual_ptr + row * WIDTH + columns, x.to(kind), mask=here)
    mean = tl.sum(x, 0) / WIDTH
    centred = tl.where(here, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    tl.store(out_ptr + row * WIDTH + columns, (centred * rstd * weight + bias).to(kind), mask=here)


def residual_layer_norm(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x [n, width], rows contiguous; residual [n, width] contiguous, updated in place, None for the norm of x alone."""
    rows, width = x.shape
    out = torch.empty((rows, width), device=x.device, dtype=x.dtype)
    if x.stride(1) != 1 or (residual is not None and not residual.is_contiguous()):
        raise ValueError("layer norm: rows of x and the whole residual must be contiguous")
    block = triton.next_power_of_2(width)
    launch(
        _layer_norm_kernel,
        (rows,),
        x,
        residual if residual is not None else x,
        weight,
        bias,
        out,
        x.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        ADD=residual is not None,
        num_warps=min(8, max(1, block // 512)),
    )
    return out


@triton.jit
def _window_attention_kernel(
    qkv_ptr,
    out_ptr,
    num_rows,
    scale,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one head of ROWS rows, each of which reads the keys of its window."""
    release_next(PDL)
    wait_for_previous(PDL)
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    here = (rows < num_rows)[:, None] & (columns < D)[None, :]
    head = tl.program_id(1) * D + columns[None, :]
    width: tl.constexpr = HEADS * D
    q = tl.load(qkv_ptr + rows.to(tl.int64)[:, None] * (3 * width) + head, mask=here, other=0.0).to(tl.float32)
    first = qkv_ptr + (rows // _WINDOW * _WINDOW).to(tl.int64)[:, None] * (3 * width) + width + head
    most, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for row in tl.static_range(_WINDOW):
        k = tl.load(first + row * 3 * width, mask=here, other=0.0).to(tl.float32)
        v = tl.load(first + row * 3 * width + width, mask=here, other=0.0).to(tl.float32)
        score = tl.sum(q * k, 1) * scale
        higher = tl.maximum(most, score)
        kept, weight = tl.exp(most - higher), tl.exp(score - higher)
        out = out * kept[:, None] + weight[:, None] * v
        total, most = total * kept + weight, higher
    out = out / total[:, None]
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * width + head, out.to(out_ptr.dtype.element_ty), mask=here)


def window_attention(qkv: Tensor, num_heads: int) -> Tensor:
    """qkv [n, 3 * heads * D], contiguous."""
    rows, width = qkv.shape[0], qkv.shape[1] // 3
    out = torch.empty((rows, width), device=qkv.device, dtype=qkv.dtype)
    head_dim = width // num_heads
    grid = triton.cdiv(rows, _WINDOW_ROWS), num_heads
    sizes = {"HEADS": num_heads, "D": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "ROWS": _WINDOW_ROWS}
    launch(_window_attention_kernel, grid, qkv, out, rows, head_dim**-0.5, **sizes, num_warps=4)
    return out


@triton.jit
def _rotate_packed_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    stride,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_H heads of one row."""
    release_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    wide = d < HALF
    cos = tl.load(cos_ptr + row * HALF + d, mask=wide, other=0.0)[None, :]
    sin = tl.load(sin_ptr + row * HALF + d, mask=wide, other=0.0)[None, :]
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    here = (head < HEADS) & wide[None, :]
    x = x_ptr + row * stride + head * HEAD + d[None, :]
    first = tl.load(x, mask=here, other=0.0).to(tl.float32)
    second = tl.load(x + HALF, mask=here, other=0.0).to(tl.float32)
    kind = x_ptr.dtype.element_ty
    tl.store(x, (first * cos - second * sin).to(kind), mask=here)
    tl.store(x + HALF, (second * cos + first * sin).to(kind), mask=here)


def rotate_packed(qkv: Tensor, num_heads: int, cos: Tensor, sin: Tensor) -> None:
    """qkv [n, heads, D], contiguous along D; cos and sin float32 [n, D / 2], contiguous."""
    rows, _, width = qkv.shape
    if qkv.stride(2) != 1 or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError("rotary: heads, cosines and sines must be contiguous")
    block_h = min(32, triton.next_power_of_2(num_heads))
    launch(
        _rotate_packed_kernel,
        (rows, triton.cdiv(num_heads, block_h)),
        qkv,
        cos,
        sin,
        qkv.stride(0),
        HEADS=num_heads,
        HEAD=qkv.stride(1),
        HALF=width // 2,
        BLOCK_D=triton.next_power_of_2(width // 2),
        BLOCK_H=block_h,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["rows"])
def _lengthen_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    ends_ptr,
    out_ptr,
    rows,
    stride,
    far,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_H of the 3 * HEADS heads of one row."""
    release_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(ends_ptr + 1)
    present = row < length
    d = tl.arange(0, BLOCK_D)[None, :]
    wide = d < HALF
    cos = tl.load(cos_ptr + row * HALF + d, mask=wide & present, other=0.0)
    sin = tl.load(sin_ptr + row * HALF + d, mask=wide & present, other=0.0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    turned = head < 2 * HEADS
    here = (head < 3 * HEADS) & wide
    read = here & present & turned
    x = x_ptr + row * stride + head * HEAD + d
    first = tl.load(x, mask=read, other=0.0).to(tl.float32)
    second = tl.load(x + HALF, mask=read, other=0.0).to(tl.float32)
    kind = x_ptr.dtype.element_ty
    padding = here & (head >= 2 * HEADS) & (row >= length)
    tl.store(x, tl.zeros_like(first).to(kind), mask=padding)
    tl.store(x + HALF, tl.zeros_like(second).to(kind), mask=padding)
    written = here & turned
    place = (head // HEADS * rows + row) * HEADS + head % HEADS
    out = out_ptr + place * (2 * HALF + FEATURES) + d
    tl.store(out, (first * cos - second * sin).to(kind), mask=written)
    tl.store(out + HALF, (second * cos + first * sin).to(kind), mask=written)
    feature = tl.arange(0, FEATURES)[None, :]
    of_query = tl.where(present, 1.0, -1.0)
    of_key = tl.where(present, 0.0, -far)
    apart = tl.where(head < HEADS, of_query, of_key)
    apart = tl.where(feature == 0, apart, 0.0)
    behind = out_ptr + place * (2 * HALF + FEATURES) + 2 * HALF + feature
    tl.store(behind, apart.to(kind), mask=turned & (feature >= 0))


def lengthen(qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor) -> Tensor:
    """qkv [n, 3 * heads, D], contiguous along D; cos and sin float32 [n, D / 2], contiguous; cu_seqlens int32 [2]."""
    rows, heads, width = qkv.shape[0], qkv.shape[1] // 3, qkv.shape[2]
    if qkv.stride(2) != 1 or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError("lengthened heads: heads, cosines and sines must be contiguous")
    out = torch.empty((2, rows, heads, width + FEATURES), device=qkv.device, dtype=qkv.dtype)
    block_h = min(32, triton.next_power_of_2(3 * heads))
    launch(
        _lengthen_kernel,
        (rows, triton.cdiv(3 * heads, block_h)),
        qkv,
        cos,
        sin,
        cu_seqlens,
        out,
        rows,
        qkv.stride(0),
        far(qkv.dtype),
        HEADS=heads,
        HEAD=qkv.stride(1),
        HALF=width // 2,
        FEATURES=FEATURES,
        BLOCK_D=triton.next_power_of_2(width // 2),
        BLOCK_H=block_h,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _add_quick_gelu_kernel(x_ptr, bias_ptr, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = index < rows.to(tl.int64) * WIDTH
    bias = tl.load(bias_ptr + index % WIDTH, mask=here, other=0.0).to(tl.float32)
    release_next(PDL)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + index, mask=here, other=0.0).to(tl.float32) + bias
    tl.store(x_ptr + index, (x * tl.sigmoid(1.702 * x)).to(x_ptr.dtype.element_ty), mask=here)


def add_quick_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """quick GELU of x [n, width] + bias, in place; rounded once, where op by op PyTorch rounds three times."""
    if not x.is_contiguous():
        raise ValueError(f"quick GELU: x must be contiguous, strides {x.stride()}")
    total = x.numel()
    launch(
        _add_quick_gelu_kernel,
        (triton.cdiv(total, 2048),),
        x,
        bias,
        x.shape[0],
        WIDTH=bias.shape[0],
        BLOCK=2048,
        num_warps=4,
    )
    return x


@triton.jit(do_not_specialize=["rows"])
def _byte_lookup_kernel(
    pixels_ptr,
    table_ptr,
    out_ptr,
    rows,
    VALUES: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = index < rows.to(tl.int64) * WIDTH
    row, column = index // WIDTH, (index % WIDTH).to(tl.int32)
    read = here & (column < VALUES * CHANNELS)
    byte = tl.load(pixels_ptr + row * (VALUES * CHANNELS) + column, mask=read, other=0).to(tl.int32)
    value = tl.load(table_ptr + column // VALUES * 256 + byte, mask=read, other=0.0)
    tl.store(out_ptr + index, value, mask=here)


def byte_lookup(pixels: Tensor, table: Tensor, width: int | None = None) -> Tensor:
    """pixels uint8 [n, channels * values] contiguous, table [channels, 256] -> [n, width or channels * values]."""
    out = torch.empty((pixels.shape[0], width or pixels.shape[1]), device=pixels.device, dtype=table.dtype)
    total = out.numel()
    channels = table.shape[0]
    sizes = {"VALUES": pixels.shape[1] // channels, "CHANNELS": channels, "WIDTH": out.shape[1], "BLOCK": 1024}
    launch(_byte_lookup_kernel, (triton.cdiv(total, 1024),), pixels, table, out, pixels.shape[0], **sizes, num_warps=4)
    return out


@triton.jit
def _add_table_rows_kernel(
    x_ptr, table_ptr, rows_ptr, weights_ptr, COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    here = columns < WIDTH
    kind = x_ptr.dtype.element_ty
    total = tl.zeros((BLOCK,), tl.float32)
    for entry in tl.static_range(COUNT):
        place = tl.load(rows_ptr + row * COUNT + entry).to(tl.int64) * WIDTH
        weight = tl.load(weights_ptr + row * COUNT + entry)
        total += tl.load(table_ptr + place + columns, mask=here, other=0.0).to(tl.float32) * weight
    x = tl.load(x_ptr + row * WIDTH + columns, mask=here, other=0.0).to(tl.float32)
    tl.store(x_ptr + row * WIDTH + columns, (x + total.to(kind).to(tl.float32)).to(kind), mask=here)


def add_table_rows(x: Tensor, table: Tensor, rows: Tensor, weights: Tensor) -> None:
    """x [n, width] and table [entries, width], contiguous and of one dtype; rows int32 and weights float32 [n, k],
    contiguous."""
    if not all(part.is_contiguous() for part in (x, table, rows, weights)) or x.dtype != table.dtype:
        raise ValueError(f"table rows: all must be contiguous, and x {x.dtype} of the table's {table.dtype}")
    launch(
        _add_table_rows_kernel,
        (x.shape[0],),
        x,
        table,
        rows,
        weights,
        COUNT=rows.shape[1],
        WIDTH=x.shape[1],
        BLOCK=triton.next_power_of_2(x.shape[1]),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["stride_axis", "stride_row"])
def _rotary_cos_sin_kernel(
    positions_ptr,
    frequencies_ptr,
    axes_ptr,
    cos_ptr,
    sin_ptr,
    scale,
    stride_axis,
    stride_row,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    AXES: tl.constexpr,
):
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    here = j < HALF
    frequency = tl.load(frequencies_ptr + j, mask=here, other=0.0)
    place = positions_ptr + row * stride_row + tl.zeros((BLOCK,), tl.int64)
    if AXES:
        place += tl.load(axes_ptr + j, mask=here, other=0) * stride_axis
    angle = tl.load(place, mask=here, other=0).to(tl.float32) * frequency
    tl.store(cos_ptr + row * HALF + j, tl.cos(angle) * scale, mask=here)
    tl.store(sin_ptr + row * HALF + j, tl.sin(angle) * scale, mask=here)


def rotary_cos_sin(
    positions: Tensor, frequencies: Tensor, axes: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """positions [n] or [axes, n] of any strides -> cosines and sines float32 [n, head_dim / 2]."""
    rows, half = positions.shape[-1], frequencies.shape[0]
    cos, sin = (torch.empty((rows, half), device=positions.device) for _ in range(2))
    given = positions, frequencies, axes if axes is not None else positions
    strides = positions.stride(0) if axes is not None else 0, positions.stride(-1)
    sizes = {"HALF": half, "BLOCK": triton.next_power_of_2(half), "AXES": axes is not None}
    launch(_rotary_cos_sin_kernel, (rows,), *given, cos, sin, scale, *strides, **sizes, num_warps=1)
    return cos, sin
