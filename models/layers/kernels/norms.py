"""RMSNorm with what stands before it: a residual, or a residual and the partial sums of a split-K GEMM. RMSNorm of the
heads of queries and keys.

References: models.layers.fused.rms_norm, add_rms_norm and qk_norm, models.layers.gemm.gemm_add_norm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.launch import launch, release_next, wait_for_previous


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
    normalised = (x * rstd).to(kind)
    tl.store(out_ptr + row * WIDTH + columns, normalised * weight, mask=here)


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
    if rows == 0:
        return
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


@triton.jit
def _store_normed_heads(
    x_ptr, out_ptr, weight, d, eps, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Heads of one row, which lie together."""
    head = tl.arange(0, BLOCK_H)[:, None]
    here = (head < HEADS) & (d < WIDTH)
    x = tl.load(x_ptr + head * WIDTH + d, mask=here, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
    tl.store(out_ptr + head * WIDTH + d, (x * rstd).to(out_ptr.dtype.element_ty) * weight, mask=here)


@triton.jit
def _qk_norm_kernel(
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_out_ptr,
    k_out_ptr,
    stride_q,
    stride_k,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: all heads of one row."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)[None, :]
    q_weight = tl.load(q_weight_ptr + d, mask=d < WIDTH, other=0.0)
    k_weight = tl.load(k_weight_ptr + d, mask=d < WIDTH, other=0.0)
    release_next(PDL)
    wait_for_previous(PDL)
    q_out, k_out = q_out_ptr + row * (HEADS * WIDTH), k_out_ptr + row * (KV_HEADS * WIDTH)
    _store_normed_heads(q_ptr + row * stride_q, q_out, q_weight, d, eps, HEADS, WIDTH, BLOCK_H)
    _store_normed_heads(k_ptr + row * stride_k, k_out, k_weight, d, eps, KV_HEADS, WIDTH, BLOCK_KV)


def qk_norm(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """q [..., n, Hq, D] and k [..., n, Hkv, D], heads together in their rows -> both contiguous."""
    q_rows, k_rows = q.flatten(0, -3), k.flatten(0, -3)
    rows, heads, width = q_rows.shape
    kv_heads = k_rows.shape[1]
    for name, tensor in (("q", q_rows), ("k", k_rows)):
        if tensor.stride(2) != 1 or tensor.stride(1) != width:
            raise ValueError(f"qk_norm: heads of {name} must lie together, strides {tensor.stride()}")
    q_out, k_out = (torch.empty(part.shape, device=q.device, dtype=q.dtype) for part in (q, k))
    if rows == 0:
        return q_out, k_out
    block, block_h = triton.next_power_of_2(width), triton.next_power_of_2(heads)
    launch(
        _qk_norm_kernel,
        (rows,),
        q_rows,
        k_rows,
        q_weight,
        k_weight,
        q_out,
        k_out,
        q_rows.stride(0),
        k_rows.stride(0),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        WIDTH=width,
        BLOCK_H=block_h,
        BLOCK_KV=triton.next_power_of_2(kv_heads),
        BLOCK=block,
        num_warps=min(8, max(1, block_h * block // 512)),
    )
    return q_out, k_out
