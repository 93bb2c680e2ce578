"""Sums of partial products, gated activation and finite scalar quantization. References: silu_mul and quantize of
models.layers.fused."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.launch import launch, release_next, wait_for_previous


@triton.jit(do_not_specialize=["rows"])
def _silu_mul_kernel(
    x_ptr,
    out_ptr,
    rows,
    INNER: tl.constexpr,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """x: PARTS times [rows, INNER], added in their order, with GATED [rows, 2 * INNER]."""
    WIDTH: tl.constexpr = 2 * INNER if GATED else INNER
    release_next(PDL)
    wait_for_previous(PDL)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = index < rows.to(tl.int64) * INNER
    source = x_ptr + index // INNER * WIDTH + index % INNER
    total = tl.zeros((BLOCK,), tl.float32)
    up = total
    for _ in tl.static_range(PARTS):
        total += tl.load(source, mask=here, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(source + INNER, mask=here, other=0.0).to(tl.float32)
        source += rows.to(tl.int64) * WIDTH
    kind = out_ptr.dtype.element_ty
    if GATED:
        gate = total.to(kind).to(tl.float32)
        total = (gate * tl.sigmoid(gate)).to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
    tl.store(out_ptr + index, total.to(kind), mask=here)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[..., 2 * inner] -> [..., inner]."""
    return sum_parts(gate_up[None], gate_up.dtype, gated=True)


def sum_parts(parts: Tensor, dtype: torch.dtype, *, gated: bool) -> Tensor:
    """parts [n, ..., width] -> their sum [..., width]; gated: silu_mul of it."""
    parts = parts.contiguous()
    inner = parts.shape[-1] // (2 if gated else 1)
    out = torch.empty((*parts.shape[1:-1], inner), device=parts.device, dtype=dtype)
    # Whole blocks inside a row keep the loads wide; the few rows of parts want more programs.
    block = 256 if parts.shape[0] > 1 else 1024 if inner % 1024 == 0 else 512
    grid, rows = (triton.cdiv(out.numel(), block),), out.numel() // inner
    sizes = {"INNER": inner, "PARTS": parts.shape[0], "GATED": gated, "BLOCK": block}
    launch(_silu_mul_kernel, grid, parts, out, rows, **sizes, num_warps=4 if block > 256 else 2)
    return out


@triton.jit(do_not_specialize=["count"])
def _quantize_kernel(x_ptr, out_ptr, count, SCALE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    release_next(PDL)
    wait_for_previous(PDL)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = index < count
    kind = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + index, mask=here, other=0.0).to(tl.float32)
    # tanh; its error near zero, of an absolute 1e-7, is lost in the rounding to whole steps.
    bounded = (1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)).to(kind).to(tl.float32)
    scaled = (bounded * SCALE).to(kind).to(tl.float32)
    # Half to even: float32 has no fractions from 2^23 on.
    magic: tl.constexpr = 12582912.0
    whole = (scaled + magic) - magic
    tl.store(out_ptr + index, tl.div_rn(whole, tl.full((BLOCK,), SCALE, tl.float32)).to(kind), mask=here)


def quantize(x: Tensor, scale: int) -> Tensor:
    """round(tanh(x) * scale) / scale, like x."""
    x = x.contiguous()
    out = torch.empty_like(x)
    count = x.numel()
    launch(_quantize_kernel, (triton.cdiv(count, 512),), x, out, count, SCALE=scale, BLOCK=512, num_warps=4)
    return out
