"""Routing of a mixture of experts, and the sum over the chosen. References: models.layers.moe."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.launch import launch, release_next, wait_for_previous


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    scale,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    NORMALISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    here = expert < EXPERTS
    bias = tl.load(bias_ptr + expert, mask=here, other=0.0)
    release_next(PDL)
    wait_for_previous(PDL)
    scores = tl.sigmoid(tl.load(logits_ptr + row * EXPERTS + expert, mask=here, other=0.0))
    keys = tl.where(here, scores + bias, float("-inf"))
    place = tl.arange(0, PADDED_K)
    chosen = tl.zeros((PADDED_K,), tl.int64)
    weights = tl.zeros((PADDED_K,), tl.float32)
    for k in tl.static_range(TOP_K):
        # A NaN is no key: the row takes expert 0 and stays inside the stack.
        best = tl.min(tl.where(keys == tl.max(keys, 0), expert, BLOCK), 0)
        best = tl.where(best < EXPERTS, best, 0)
        weight = tl.sum(tl.where(expert == best, scores, 0.0), 0)
        chosen = tl.where(place == k, best, chosen)
        weights = tl.where(place == k, weight, weights)
        keys = tl.where(expert == best, float("-inf"), keys)
    if NORMALISE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    tl.store(experts_ptr + row * TOP_K + place, chosen, mask=place < TOP_K)
    tl.store(weights_ptr + row * TOP_K + place, weights * scale, mask=place < TOP_K)


def route(logits: Tensor, bias: Tensor, top_k: int, scale: float, normalise: bool) -> tuple[Tensor, Tensor]:
    """logits float32 [n, experts] -> weights float32 and experts int64 [n, top_k]."""
    rows, experts = logits.shape
    weights = torch.empty((rows, top_k), device=logits.device)
    chosen = torch.empty((rows, top_k), dtype=torch.int64, device=logits.device)
    if rows:
        launch(
            _route_kernel,
            (rows,),
            logits.contiguous(),
            bias,
            weights,
            chosen,
            scale,
            EXPERTS=experts,
            BLOCK=triton.next_power_of_2(experts),
            TOP_K=top_k,
            PADDED_K=triton.next_power_of_2(top_k),
            NORMALISE=normalise,
            num_warps=1,
        )
    return weights, chosen


@triton.jit
def _route_softmax_kernel(
    logits_ptr,
    weights_ptr,
    experts_ptr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row. The first chosen is the largest, so that no power overflows."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    here = expert < EXPERTS
    release_next(PDL)
    wait_for_previous(PDL)
    logits = tl.load(logits_ptr + row * EXPERTS + expert, mask=here, other=float("-inf"))
    keys = logits
    largest = tl.max(logits, 0)
    place = tl.arange(0, PADDED_K)
    chosen = tl.zeros((PADDED_K,), tl.int64)
    weights = tl.zeros((PADDED_K,), tl.float32)
    for k in tl.static_range(TOP_K):
        # A NaN is no key: the row takes expert 0 and stays inside the stack.
        best = tl.min(tl.where(keys == tl.max(keys, 0), expert, BLOCK), 0)
        best = tl.where(best < EXPERTS, best, 0)
        weight = tl.exp(tl.sum(tl.where(expert == best, logits, 0.0), 0) - largest)
        chosen = tl.where(place == k, best, chosen)
        weights = tl.where(place == k, weight, weights)
        keys = tl.where(expert == best, float("-inf"), keys)
    tl.store(experts_ptr + row * TOP_K + place, chosen, mask=place < TOP_K)
    tl.store(weights_ptr + row * TOP_K + place, weights / tl.sum(weights, 0), mask=place < TOP_K)


def route_softmax(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """logits float32 [n, experts] -> weights float32 and experts int64 [n, top_k]."""
    rows, experts = logits.shape
    weights = torch.empty((rows, top_k), device=logits.device)
    chosen = torch.empty((rows, top_k), dtype=torch.int64, device=logits.device)
    if rows:
        launch(
            _route_softmax_kernel,
            (rows,),
            logits.contiguous(),
            weights,
            chosen,
            EXPERTS=experts,
            BLOCK=triton.next_power_of_2(experts),
            TOP_K=top_k,
            PADDED_K=triton.next_power_of_2(top_k),
            num_warps=1,
        )
    return weights, chosen


@triton.jit
def _combine_kernel(
    chosen_ptr,
    weights_ptr,
    shared_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK columns of one row."""
    release_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        values = tl.load(chosen_ptr + (row * TOP_K + k) * WIDTH + column, mask=here, other=0.0).to(tl.float32)
        total += values * tl.load(weights_ptr + row * TOP_K + k)
    kind = out_ptr.dtype.element_ty
    shared = tl.load(shared_ptr + row * WIDTH + column, mask=here, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + column, (total.to(kind).to(tl.float32) + shared).to(kind), mask=here)


def combine(chosen: Tensor, weights: Tensor, shared: Tensor) -> Tensor:
    """shared + sum over k of weights [n, k] * chosen [n * k, width], summed in float32 -> like shared [n, width]."""
    rows, width = shared.shape
    out = torch.empty_like(shared)
    if rows:
        launch(
            _combine_kernel,
            (rows, triton.cdiv(width, 512)),
            chosen,
            weights,
            shared,
            out,
            WIDTH=width,
            TOP_K=weights.shape[1],
            BLOCK=512,
            num_warps=2,
        )
    return out
