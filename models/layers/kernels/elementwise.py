"""Gated activation and finite scalar quantization. References: silu_mul and quantize of models.layers.fused."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.launch import launch, release_next, wait_for_previous


@triton.jit(do_not_specialize=["rows"])
def _silu_mul_kernel(x_ptr, out_ptr, rows, INNER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    release_next(PDL)
    wait_for_previous(PDL)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = index < rows.to(tl.int64) * INNER
    source = x_ptr + index // INNER * (2 * INNER) + index % INNER
    gate = tl.load(source, mask=here, other=0.0).to(tl.float32)
    up = tl.load(source + INNER, mask=here, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    gated = (gate * tl.sigmoid(gate)).to(kind).to(tl.float32)
    tl.store(out_ptr + index, (gated * up).to(kind), mask=here)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[..., 2 * inner] -> [..., inner]."""
    gate_up = gate_up.contiguous()
    inner = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], inner), device=gate_up.device, dtype=gate_up.dtype)
    total = out.numel()
    # Whole blocks inside a row keep the loads wide.
    block = 1024 if inner % 1024 == 0 else 512
    launch(
        _silu_mul_kernel,
        (triton.cdiv(total, block),),
        gate_up,
        out,
        total // inner,
        INNER=inner,
        BLOCK=block,
        num_warps=4,
    )
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
