"""Routing of a mixture of experts, rows in the order of experts, and the sum over the chosen. References:
models.layers.moe."""

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


@triton.jit(do_not_specialize=["entries"])
def _expert_places_kernel(experts_ptr, places_ptr, ends_ptr, entries, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program: the entries of one expert. They lie behind those of all lower experts, which it counts first."""
    expert = tl.program_id(0)
    release_next(PDL)
    wait_for_previous(PDL)
    lower = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, entries, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        here = entry < entries
        chosen = tl.load(experts_ptr + entry, mask=here, other=0)
        lower += (here & (chosen < expert)).to(tl.int32)
    end = tl.sum(lower, 0)
    for first in range(0, entries, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        mine = tl.load(experts_ptr + entry, mask=entry < entries, other=-1) == expert
        one = mine.to(tl.int32)
        tl.store(places_ptr + entry, end + tl.cumsum(one, 0) - 1, mask=mine)
        end += tl.sum(one, 0)
    tl.store(ends_ptr + expert, end)


def expert_places(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """experts int64 [n, top_k] -> places int64 [n, top_k] and ends int32 [num_experts]."""
    places = torch.empty_like(experts)
    ends = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    launch(
        _expert_places_kernel,
        (num_experts,),
        experts,
        places,
        ends,
        experts.numel(),
        BLOCK=2048,
        num_warps=8,
    )
    return places, ends


@triton.jit
def _spread_rows_kernel(
    x_ptr,
    places_ptr,
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
    values = tl.load(x_ptr + row * WIDTH + column, mask=here, other=0.0)
    for k in tl.static_range(TOP_K):
        place = tl.load(places_ptr + row * TOP_K + k)
        tl.store(out_ptr + place * WIDTH + column, values, mask=here)


def spread_rows(x: Tensor, places: Tensor) -> Tensor:
    """x [n, width] -> [n * top_k, width], where row i lies at each of places[i], int64 [n, top_k]."""
    rows, width = x.shape
    out = torch.empty((places.numel(), width), dtype=x.dtype, device=x.device)
    if rows:
        launch(
            _spread_rows_kernel,
            (rows, triton.cdiv(width, 512)),
            x.contiguous(),
            places,
            out,
            WIDTH=width,
            TOP_K=places.shape[1],
            BLOCK=512,
            num_warps=2,
        )
    return out


@triton.jit
def _sum_experts_kernel(
    chosen_ptr,
    weights_ptr,
    places_ptr,
    shared_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACED: tl.constexpr,
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
        place = row * TOP_K + k
        if PLACED:
            place = tl.load(places_ptr + place)
        values = tl.load(chosen_ptr + place * WIDTH + column, mask=here, other=0.0).to(tl.float32)
        total += values * tl.load(weights_ptr + row * TOP_K + k)
    kind = out_ptr.dtype.element_ty
    shared = tl.load(shared_ptr + row * WIDTH + column, mask=here, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + column, (total.to(kind).to(tl.float32) + shared).to(kind), mask=here)


def combine(chosen: Tensor, weights: Tensor, shared: Tensor, places: Tensor | None = None) -> Tensor:
    """shared + sum over k of weights [n, k] * chosen [n * k, width], summed in float32 in the order of k -> like shared
    [n, width]. places int64 [n, k]: the rows of chosen; None: they lie in order."""
    rows, width = shared.shape
    shared = shared.contiguous()
    out = torch.empty_like(shared)
    if rows:
        launch(
            _sum_experts_kernel,
            (rows, triton.cdiv(width, 512)),
            chosen,
            weights,
            weights if places is None else places,
            shared,
            out,
            WIDTH=width,
            TOP_K=weights.shape[1],
            PLACED=places is not None,
            BLOCK=512,
            num_warps=2,
        )
    return out
