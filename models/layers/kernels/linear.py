"""Linear layers of few rows, bound by reading their weights once.

Six stages of weights are in flight in every program. Prefetching them into L2 while the kernel before still runs was
slower: 1563 us without, 1731 us with for VoxCPM2's language model at one row. Twins: linear, linear_silu_mul and
linear_add_rms_norm of models.layers.fused.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.launch import dependent_launch, num_processors, release_next, wait_for_previous
from models.layers.kernels.norms import sum_add_rms_norm_cuda

BLOCK_K = 128
_SMALL_WEIGHT = 8192 * 1024
"""The largest of VoxCPM2's local stacks: up to here 128 rows were measured, beyond it 64."""


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows,
    stride_x,
    stride_weight,
    N: tl.constexpr,
    K_SHARE: tl.constexpr,
    PARTIAL: tl.constexpr,
    SILU_MUL: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: all rows of BLOCK_N columns over a share of K_SHARE inputs.

    SILU_MUL: weight holds the rows of gate, then those of up, 2 * N in all. PARTIAL: out is float32 [shares, rows, N].
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    share = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    weight_rows = weight_ptr + n.to(tl.int64) * stride_weight + share * K_SHARE
    release_next(PDL)
    wait_for_previous(PDL)
    x_rows = x_ptr + m[:, None] * stride_x + share * K_SHARE + k[None, :]
    x_here = m[:, None] < rows
    gate_rows = weight_rows[None, :] + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, K_SHARE, BLOCK_K):
        x = tl.load(x_rows + first, mask=x_here, other=0.0)
        gate = tl.load(gate_rows + first, eviction_policy="evict_first")
        acc = tl.dot(x, gate, acc=acc)
        if SILU_MUL:
            up = tl.load(gate_rows + first + N * stride_weight, eviction_policy="evict_first")
            acc_up = tl.dot(x, up, acc=acc_up)
    if PARTIAL:
        out = out_ptr + (share * rows + m[:, None]).to(tl.int64) * N + n[None, :]
        tl.store(out, acc, mask=x_here)
    else:
        kind = out_ptr.dtype.element_ty
        if BIAS:
            acc += tl.load(bias_ptr + n).to(tl.float32)[None, :]
        if SILU_MUL:
            gated = acc.to(kind).to(tl.float32)
            acc = (gated * tl.sigmoid(gated)).to(kind).to(tl.float32) * acc_up.to(kind).to(tl.float32)
        tl.store(out_ptr + m[:, None] * N + n[None, :], acc.to(kind), mask=x_here)


def streams(x: Tensor, weight: Tensor) -> bool:
    """Whether a stack of layers is faster with the kernels here than with cuBLAS (benchmarks/results/kernels)."""
    rows = x.numel() // x.shape[-1]
    return (
        0 < rows <= (128 if weight.numel() <= _SMALL_WEIGHT else 64)
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.dtype == x.dtype
        and weight.stride(1) == 1
        and weight.shape[1] % BLOCK_K == 0
        and weight.shape[0] % 64 == 0
    )


def streams_alone(x: Tensor, weight: Tensor) -> bool:
    """The same without an epilogue to gain from: cuBLAS is faster at the larger weights (Qwen2-VL-7B's qkv)."""
    return weight.numel() <= _SMALL_WEIGHT and streams(x, weight)


def linear_cuda(x: Tensor, weight: Tensor, bias: Tensor | None, **tiles: Any) -> Tensor:
    """x [..., K], weight [N, K] -> [..., N]."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty((rows.shape[0], weight.shape[0]), device=x.device, dtype=x.dtype)
    _launch(rows, weight, bias, out, weight.shape[0], split=1, silu_mul=False, **tiles)
    return out.view(*x.shape[:-1], -1)


def linear_silu_mul_cuda(x: Tensor, weight: Tensor, **tiles: Any) -> Tensor:
    """x [..., K], weight [2 * inner, K], gate first -> silu(gate) * up [..., inner]."""
    rows = x.reshape(-1, x.shape[-1])
    inner = weight.shape[0] // 2
    out = torch.empty((rows.shape[0], inner), device=x.device, dtype=x.dtype)
    _launch(rows, weight, None, out, inner, split=1, silu_mul=True, **tiles)
    return out.view(*x.shape[:-1], -1)


def linear_add_rms_norm_cuda(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    split: int | None = None,
    **tiles: Any,
) -> tuple[Tensor, Tensor]:
    """(normed, total) of residual + linear(x); the shares of a split product are added by the norm's kernel."""
    rows = x.reshape(-1, x.shape[-1])
    width = weight.shape[0]
    split = split or _split(width, weight.shape[1])
    partial = torch.empty((split, rows.shape[0], width), device=x.device, dtype=torch.float32)
    _launch(rows, weight, None, partial, width, split=split, silu_mul=False, **tiles)
    normed, total = sum_add_rms_norm_cuda(partial, bias, residual.reshape(-1, width).contiguous(), norm_weight, eps)
    return normed.view(residual.shape), total.view(residual.shape)


def _split(width: int, inputs: int) -> int:
    """Shares of the inputs so that tiles of 32 columns fill the GPU about once."""
    wanted = max(1, round(num_processors() / (width // 32)))
    shares = [share for share in range(1, 9) if inputs % (share * BLOCK_K) == 0]
    return min(shares, key=lambda share: (abs(share - wanted), share))


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    columns: int,
    *,
    split: int,
    silu_mul: bool,
    block_n: int = 32,
    block_k: int = BLOCK_K,
    num_warps: int = 4,
    num_stages: int | None = None,
) -> None:
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, inputs = x.shape
    # 64 rows even for one: the products then run as wgmma, which is faster than mma on a smaller tile.
    block_m = 64 if rows <= 64 else 128
    pdl = dependent_launch()
    _linear_kernel[(columns // block_n, split)](
        x,
        weight,
        bias if bias is not None else x,
        out,
        rows,
        x.stride(0),
        weight.stride(0),
        N=columns,
        K_SHARE=inputs // split,
        PARTIAL=out.dtype == torch.float32,
        SILU_MUL=silu_mul,
        BIAS=bias is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        PDL=pdl,
        num_warps=num_warps,
        num_stages=num_stages or (6 if block_m == 64 else 4),
        **({"launch_pdl": True} if pdl else {}),
    )
