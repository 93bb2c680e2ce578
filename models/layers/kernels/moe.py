"""Logits and choice of a router, rows in the order of experts, their GEMMs, and the sum over the chosen. References:
models.layers.moe."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.e4m3 import Coded, parts, sums_of_codes, takes_ahead
from models.layers.kernels.launch import launch, release_next, wait_for_previous
from models.layers.moe import Gate
from models.layers.quantized import COLUMNS, GROUP, QuantizedWeight

_WARPS = 4
"""Of a program of few rows; 2, of 32 columns each, load scales ahead."""


@triton.jit(do_not_specialize=["rows"])
def _router_logits_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    rows,
    stride_x,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_M rows, all experts, SPLIT columns. A weight in float32 is split into three parts in x's dtype
    (in bfloat16, exactly), whose products with x are added in float32."""
    kind = x_ptr.dtype.element_ty
    release_next(PDL)
    wait_for_previous(PDL)
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    expert = tl.arange(0, BLOCK_N)[None, :]
    logits = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, SPLIT, BLOCK_K):
        column = tl.program_id(1) * SPLIT + start + tl.arange(0, BLOCK_K)
        inner = column[:, None]
        x_here = (row < rows) & (column[None, :] < WIDTH)
        x = tl.load(x_ptr + row * stride_x + column[None, :], mask=x_here, other=0.0)
        weight = tl.load(weight_ptr + expert * WIDTH + inner, mask=(expert < EXPERTS) & (inner < WIDTH), other=0.0)
        high = weight.to(kind)
        rest = weight - high.to(tl.float32)
        middle = rest.to(kind)
        low = (rest - middle.to(tl.float32)).to(kind)
        logits = tl.dot(x, low, logits)
        logits = tl.dot(x, middle, logits)
        logits = tl.dot(x, high, logits)
    out = out_ptr + (tl.program_id(1).to(tl.int64) * rows + row) * EXPERTS + expert
    tl.store(out, logits, mask=(row < rows) & (expert < EXPERTS))


_LOGITS_PROGRAMS = 512
"""Where few rows make fewer programs, they share out the columns: several on a multiprocessor can wait for their loads
at the same time. _MIN_SPLITS share them out however many rows there are, so that the kernel of 1,024 rows serves more,
too."""
_MIN_SPLITS, _MAX_SPLITS = 16, 32
_LOGITS_BLOCK_K = 64


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x bfloat16 [n, hidden_size], weight float32 [experts, hidden_size] -> float32 [splits, n, experts]."""
    rows, width = x.shape
    experts = weight.shape[0]
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("router: rows of x and weights must be contiguous")
    block_m = 16 if rows <= 16 else 32
    tiles = triton.cdiv(rows, block_m)
    wanted = min(max(_LOGITS_PROGRAMS // max(tiles, 1), _MIN_SPLITS), _MAX_SPLITS)
    most = min(wanted, triton.cdiv(width, _LOGITS_BLOCK_K))
    splits = 1 << (most.bit_length() - 1)
    out = torch.empty((splits, rows, experts), device=x.device)
    launch(
        _router_logits_kernel,
        (tiles, splits),
        x,
        weight,
        out,
        rows,
        x.stride(0),
        EXPERTS=experts,
        WIDTH=width,
        SPLIT=triton.cdiv(triton.cdiv(width, splits), _LOGITS_BLOCK_K) * _LOGITS_BLOCK_K,
        BLOCK_M=block_m,
        BLOCK_N=max(16, triton.next_power_of_2(experts)),
        BLOCK_K=_LOGITS_BLOCK_K,
        num_warps=4,
        num_stages=3,
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _route_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    rows,
    scale,
    SPLITS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row. SOFTMAX: the first chosen is the largest, so that no power overflows."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    here = expert < EXPERTS
    if not SOFTMAX:
        bias = tl.load(bias_ptr + expert, mask=here, other=0.0)
    release_next(PDL)
    wait_for_previous(PDL)
    scores = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        scores += tl.load(logits_ptr + (split * rows.to(tl.int64) + row) * EXPERTS + expert, mask=here, other=0.0)
    if SOFTMAX:
        scores = tl.where(here, scores, float("-inf"))
        keys = scores
        largest = tl.max(scores, 0)
    else:
        scores = tl.sigmoid(scores)
        keys = tl.where(here, scores + bias, float("-inf"))
    place = tl.arange(0, PADDED_K)
    chosen = tl.zeros((PADDED_K,), tl.int64)
    weights = tl.zeros((PADDED_K,), tl.float32)
    for k in tl.static_range(TOP_K):
        # A NaN is no key: the row takes expert 0 and stays inside the stack.
        best = tl.min(tl.where(keys == tl.max(keys, 0), expert, BLOCK), 0)
        best = tl.where(best < EXPERTS, best, 0)
        weight = tl.sum(tl.where(expert == best, scores, 0.0), 0)
        if SOFTMAX:
            weight = tl.exp(weight - largest)
        chosen = tl.where(place == k, best, chosen)
        weights = tl.where(place == k, weight, weights)
        keys = tl.where(expert == best, float("-inf"), keys)
    if NORMALISE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    tl.store(experts_ptr + row * TOP_K + place, chosen, mask=place < TOP_K)
    if SOFTMAX:
        weights = weights / tl.sum(weights, 0)
    else:
        weights = weights * scale
    tl.store(weights_ptr + row * TOP_K + place, weights, mask=place < TOP_K)


def route(
    logits: Tensor, bias: Tensor | None, top_k: int, scale: float = 1.0, normalise: bool = True
) -> tuple[Tensor, Tensor]:
    """logits float32 [splits, n, experts] -> weights float32 and experts int64 [n, top_k]."""
    splits, rows, experts = logits.shape
    weights = torch.empty((rows, top_k), device=logits.device)
    chosen = torch.empty((rows, top_k), dtype=torch.int64, device=logits.device)
    launch(
        _route_kernel,
        (rows,),
        logits.contiguous(),
        logits if bias is None else bias,
        weights,
        chosen,
        rows,
        scale,
        SPLITS=splits,
        EXPERTS=experts,
        BLOCK=triton.next_power_of_2(experts),
        TOP_K=top_k,
        PADDED_K=triton.next_power_of_2(top_k),
        SOFTMAX=bias is None,
        NORMALISE=normalise and bias is not None,
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
    launch(_expert_places_kernel, (num_experts,), experts, places, ends, experts.numel(), BLOCK=2048, num_warps=8)
    return places, ends


@triton.jit
def _spread_rows_kernel(
    x_ptr, places_ptr, out_ptr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
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
    x_ptr,
    gate_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK columns of one row."""
    release_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < WIDTH
    if gate_ptr is not None:
        everywhere = tl.arange(0, PADDED)
        gate = tl.load(gate_ptr + everywhere, mask=everywhere < WIDTH, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        place = row * TOP_K + k
        if PLACED:
            place = tl.load(places_ptr + place)
        values = tl.load(chosen_ptr + place * WIDTH + column, mask=here, other=0.0).to(tl.float32)
        total += values * tl.load(weights_ptr + row * TOP_K + k)
    kind = out_ptr.dtype.element_ty
    shared = tl.load(shared_ptr + row * WIDTH + column, mask=here, other=0.0).to(tl.float32)
    if gate_ptr is not None:
        x = tl.load(x_ptr + row * WIDTH + everywhere, mask=everywhere < WIDTH, other=0.0).to(tl.float32)
        shared *= tl.sigmoid(tl.sum(x * gate, 0))
    tl.store(out_ptr + row * WIDTH + column, (total.to(kind).to(tl.float32) + shared).to(kind), mask=here)


def combine(
    chosen: Tensor, weights: Tensor, shared: Tensor, places: Tensor | None = None, gate: Gate | None = None
) -> Tensor:
    """models.layers.moe.combine; the sum is taken in the order of k."""
    rows, width = shared.shape
    shared = shared.contiguous()
    out = torch.empty_like(shared)
    x, gate_weight = (None, None) if gate is None else (gate[0].contiguous(), gate[1])
    launch(
        _sum_experts_kernel,
        (rows, triton.cdiv(width, 512)),
        chosen,
        weights,
        weights if places is None else places,
        shared,
        x,
        gate_weight,
        out,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        TOP_K=weights.shape[1],
        PLACED=places is not None,
        BLOCK=512,
        num_warps=2,
    )
    return out


@triton.jit
def _tile_of(ends_ptr, tile, EXPERTS: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr):
    """Expert of a tile of BLOCK_M rows of one expert, its first row, and the end of its rows. Tiles are counted
    over the experts; one behind the last has no rows."""
    expert = tl.arange(0, PADDED)
    ends = tl.load(ends_ptr + expert, mask=expert < EXPERTS, other=0)
    starts = tl.load(ends_ptr + expert - 1, mask=(expert > 0) & (expert < EXPERTS), other=0)
    tiles = tl.where(expert < EXPERTS, (ends - starts + BLOCK_M - 1) // BLOCK_M, 0)
    tiles_before = tl.cumsum(tiles, 0) - tiles
    mine = (tile >= tiles_before) & (tile < tiles_before + tiles)
    chosen = tl.sum(tl.where(mine, expert, 0), 0).to(tl.int64)
    first_row = tl.sum(tl.where(mine, starts + (tile - tiles_before) * BLOCK_M, 0), 0)
    return chosen, first_row, tl.sum(tl.where(mine, ends, 0), 0)


@triton.jit
def _grouped_kernel(
    x_ptr,
    weight_ptr,
    ends_ptr,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_N outputs of a tile (_tile_of)."""
    release_next(PDL)
    wait_for_previous(PDL)
    chosen, first_row, end = _tile_of(ends_ptr, tl.program_id(1), EXPERTS, PADDED, BLOCK_M)
    if first_row < end:
        m = first_row + tl.arange(0, BLOCK_M)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        x_rows, x_here = x_ptr + m.to(tl.int64)[:, None] * K + k[None, :], m[:, None] < end
        weight_rows = weight_ptr + (chosen * N + n)[:, None] * K + k[None, :]
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for first in range(0, K, BLOCK_K):
            weight = tl.load(weight_rows + first)
            x = tl.load(x_rows + first, mask=x_here, other=0.0)
            acc = tl.dot(weight, tl.trans(x), acc)
        out = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=x_here)


def grouped_gemm(x: Tensor, stack: Tensor, ends: Tensor, tile: tuple[int, int, int] | None = None) -> Tensor:
    """models.layers.moe.grouped_gemm."""
    rows, (experts, outputs, inputs) = x.shape[0], stack.shape
    out = torch.empty((rows, outputs), device=x.device, dtype=x.dtype)
    block_m, warps, stages = tile or ((16, 2, 4) if rows <= 16 * experts else (64, 4, 3))
    launch(
        _grouped_kernel,
        (outputs // COLUMNS, min(rows, triton.cdiv(rows, block_m) + experts)),
        x.contiguous(),
        stack,
        ends,
        out,
        N=outputs,
        K=inputs,
        EXPERTS=experts,
        PADDED=triton.next_power_of_2(experts),
        BLOCK_M=block_m,
        BLOCK_N=COLUMNS,
        BLOCK_K=GROUP,
        num_warps=warps,
        num_stages=stages,
    )
    return out


@triton.jit
def _grouped_codes_kernel(
    x_ptr,
    values_ptr,
    scale_ptr,
    zeros_ptr,
    ends_ptr,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    FORM: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    ZEROS: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_N outputs of a tile (_tile_of)."""
    release_next(PDL)
    wait_for_previous(PDL)
    chosen, first_row, end = _tile_of(ends_ptr, tl.program_id(1), EXPERTS, PADDED, BLOCK_M)
    if first_row < end:
        m = first_row + tl.arange(0, BLOCK_M)
        n = chosen * N + tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        x_here = m[:, None] < end
        acc, _ = sums_of_codes(
            x_ptr + m.to(tl.int64)[:, None] * K, x_here, Coded(values_ptr, scale_ptr, zeros_ptr, K // PARTS), n, 0, K,
            N, K, SCALE_GROUP, PARTS, FORM, ZEROS, False, True, AHEAD, "",
        )  # fmt: skip
        out = out_ptr + m.to(tl.int64)[:, None] * N + (n - chosen * N)[None, :]
        tl.store(out, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=x_here)


def grouped_codes(x: Tensor, stack: QuantizedWeight, ends: Tensor) -> Tensor:
    """models.layers.moe.grouped_linear of a stack that is held as codes."""
    read, rows, (experts, outputs, inputs) = parts(stack), x.shape[0], stack.shape
    out = torch.empty((rows, outputs), device=x.device, dtype=x.dtype)
    block_m, warps = (16, _WARPS) if rows <= 16 * experts else (64, 4)
    assert read.scale is not None
    launch(
        _grouped_codes_kernel,
        (outputs // COLUMNS, min(rows, triton.cdiv(rows, block_m) + experts)),
        x.contiguous(),
        read.values,
        read.scale,
        read.zeros if read.zeros is not None else read.values,
        ends,
        out,
        N=outputs,
        K=inputs,
        EXPERTS=experts,
        PADDED=triton.next_power_of_2(experts),
        **{**read.constants, "SCALE_GROUP": read.group or inputs},
        AHEAD=takes_ahead(read, COLUMNS, warps),
        BLOCK_M=block_m,
        BLOCK_N=COLUMNS,
        num_warps=warps,
        num_stages=4,
    )
    return out
