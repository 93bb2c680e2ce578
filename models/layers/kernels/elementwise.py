"""Gated activation and the guided Euler step. Twins: models.layers.fused.silu_mul and
models.voxcpm2.solver.guided_euler_step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.launch import dependent_launch, release_next, wait_for_previous


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


def silu_mul_cuda(gate_up: Tensor) -> Tensor:
    """[..., 2 * inner] -> [..., inner]."""
    gate_up = gate_up.contiguous()
    inner = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], inner), device=gate_up.device, dtype=gate_up.dtype)
    total = out.numel()
    if total == 0:
        return out
    pdl = dependent_launch()
    # Whole blocks inside a row keep the loads wide.
    block = 1024 if inner % 1024 == 0 else 512
    _silu_mul_kernel[(triton.cdiv(total, block),)](
        gate_up,
        out,
        total // inner,
        INNER=inner,
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _guided_euler_kernel(
    x_ptr, velocity_ptr, cfg_ptr, out_ptr, rows, width, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One program: one row. Every operation is rounded to the dtype, as the reference does it op by op."""
    release_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    here = columns < SIZE
    kind = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * SIZE + columns, mask=here, other=0.0).to(tl.float32)
    a = tl.load(velocity_ptr + row * SIZE + columns, mask=here, other=0.0).to(tl.float32)
    b = tl.load(velocity_ptr + (row + rows) * SIZE + columns, mask=here, other=0.0).to(tl.float32)
    cfg = tl.load(cfg_ptr + row).to(tl.float32)
    dot = tl.sum((a * b).to(kind).to(tl.float32), 0).to(kind).to(tl.float32)
    square = tl.sum((b * b).to(kind).to(tl.float32), 0).to(kind).to(tl.float32)
    scale = tl.div_rn(dot, (square + 1e-8).to(kind).to(tl.float32)).to(kind).to(tl.float32)
    scaled = (b * scale).to(kind).to(tl.float32)
    guided = (cfg * (a - scaled).to(kind).to(tl.float32)).to(kind).to(tl.float32)
    step = (width * (scaled + guided).to(kind).to(tl.float32)).to(kind).to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, (x - step).to(kind), mask=here)


def guided_euler_step_cuda(x: Tensor, velocity: Tensor, cfg: Tensor, width: float) -> Tensor:
    """x [rows, ...], velocity [2 * rows, ...], cfg [rows] -> like x."""
    x, velocity = x.contiguous(), velocity.contiguous()
    out = torch.empty_like(x)
    rows = x.shape[0]
    if rows == 0:
        return out
    size = x[0].numel()
    pdl = dependent_launch()
    _guided_euler_kernel[(rows,)](
        x,
        velocity,
        cfg,
        out,
        rows,
        width,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        PDL=pdl,
        num_warps=2,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
