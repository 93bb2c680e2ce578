"""RMSNorm with what stands before it: a residual, or a residual and the partial sums of a split-K GEMM.

References: models.layers.norms.rms_norm and add_rms_norm, models.layers.gemm.gemm_add_norm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.launch import launch, release_next, wait_for_previous


@triton.jit
def weighted(x, rstd, weight, kind: tl.constexpr):
    """x * rstd in float32, rounded to `kind` before it is multiplied, after it where the weight is in float32."""
    normalised = x * rstd
    if weight.dtype != tl.float32:
        normalised = normalised.to(kind)
    return (normalised * weight).to(kind)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    bias_ptr,
    weight_ptr,
    total_ptr,
    out_ptr,
    stride_x,
    stride_split,
    stride_group,
    stride_residual,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row. SPLITS > 0: x is float32 partial sums [SPLITS, rows, WIDTH], else one row of the dtype. The
    residual's rows lie in groups of GROUP."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    here = columns < WIDTH
    kind = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + columns, mask=here, other=0.0)
    release_next(PDL)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * stride_x + columns, mask=here, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(x_ptr + row * stride_x + split * stride_split + columns, mask=here, other=0.0)
    if BIAS:
        x += tl.load(bias_ptr + columns, mask=here, other=0.0).to(tl.float32)
    if ADD:
        # Rounded like the linear layer's output, then like the sum.
        x = x.to(kind).to(tl.float32)
        residual_row = residual_ptr + row // GROUP * stride_group + row % GROUP * stride_residual
        x += tl.load(residual_row + columns, mask=here, other=0.0).to(tl.float32)
        x = x.to(kind).to(tl.float32)
        tl.store(total_ptr + row * WIDTH + columns, x.to(kind), mask=here)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    tl.store(out_ptr + row * WIDTH + columns, weighted(x, rstd, weight, kind), mask=here)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., width], any row stride when two-dimensional."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    out = torch.empty(rows.shape, device=x.device, dtype=x.dtype)
    _launch(rows, None, None, weight, None, out, eps, splits=0)
    return out.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, total), both like x. residual: any strides between rows."""
    rows = x.reshape(-1, x.shape[-1])
    out, total = torch.empty_like(rows), torch.empty_like(rows)
    _launch(rows, residual, None, weight, total, out, eps, splits=0)
    return out.view(x.shape), total.view(x.shape)


def sum_add_rms_norm(
    partial: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """partial float32 [splits, rows, width], residual [..., width] of as many rows, any strides between them ->
    (normed, total) [rows, width]."""
    out, total = (torch.empty(partial.shape[1:], device=residual.device, dtype=residual.dtype) for _ in range(2))
    _launch(
        partial[0], residual, bias, weight, total, out, eps, splits=partial.shape[0], stride_split=partial.stride(0)
    )
    return out, total


def _grouped(residual: Tensor) -> tuple[Tensor, int, int, int]:
    """A tensor, and the size, stride and row stride of the groups that its rows lie in; a copy where they do not."""
    if residual.dim() == 3 and residual.stride(2) == 1 and not residual.is_contiguous():
        return residual, residual.shape[1], residual.stride(0), residual.stride(1)
    rows = residual.reshape(-1, residual.shape[-1]).contiguous()
    return rows, 1, rows.shape[1], 0


def _launch(
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    weight: Tensor,
    total: Tensor | None,
    out: Tensor,
    eps: float,
    *,
    splits: int,
    stride_split: int = 0,
) -> None:
    rows, width = x.shape
    if x.stride(1) != 1:
        raise ValueError(f"RMSNorm: rows must be contiguous, strides {x.stride()}")
    block = triton.next_power_of_2(width)
    added, group, stride_group, stride_residual = (x, 1, 0, 0) if residual is None else _grouped(residual)
    launch(
        _rms_norm_kernel,
        (rows,),
        x,
        added,
        bias if bias is not None else x,
        weight,
        total if total is not None else out,
        out,
        x.stride(0),
        stride_split,
        stride_group,
        stride_residual,
        eps,
        WIDTH=width,
        BLOCK=block,
        SPLITS=splits,
        GROUP=group,
        ADD=residual is not None,
        BIAS=bias is not None,
        num_warps=min(8, max(1, block // 256)),
    )
