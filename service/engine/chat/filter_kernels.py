"""min_p, top_k and top_p in one kernel; reference: service.engine.chat.sampler.filtered. One program per row. The row
(0.6 MB of logits at most) stays in the L2 cache while two bits of the threshold are found per pass; in plain PyTorch
each of the 64 passes would go through memory three times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.launch import launch
from service.engine.chat.slot_state import IntColumn
from service.link.sampling import FloatColumn

_BLOCK = 2048
_TOP_K = tl.constexpr(int(IntColumn.TOP_K))
_TEMPERATURE = tl.constexpr(int(FloatColumn.TEMPERATURE))
_TOP_P = tl.constexpr(int(FloatColumn.TOP_P))
_MIN_P = tl.constexpr(int(FloatColumn.MIN_P))


@triton.jit
def _ordered(x):
    """float32 -> uint32 in the same order; -0.0 and 0.0 are one number."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return ordered.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _scaled(row_ptr, columns, size, inverse):
    """A product with the inverse temperature keeps the order of the quotients, which is all that is asked of it."""
    return tl.load(row_ptr + columns, mask=columns < size, other=float("-inf")) * inverse


@triton.jit
def _search(row_ptr, size, inverse, floor, peak, limit, target, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key whose equals and betters weigh at least `target`, among entries not under floor and limit."""
    digits = tl.arange(0, 4).to(tl.uint32)
    found = tl.full((), 0, tl.uint32)
    shift = tl.full((), 32, tl.uint32)
    for _ in range(16):
        shift -= 2
        candidates = found + (digits << shift)
        reached = tl.zeros((4,), tl.float32)
        for start in range(0, size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = _scaled(row_ptr, columns, size, inverse)
            keys = _ordered(x)
            if WEIGHTED:
                weights = tl.exp(x - peak)
            else:
                weights = tl.full((BLOCK,), 1.0, tl.float32)
            weights = tl.where((columns < size) & (x >= floor) & (keys >= limit), weights, 0.0)
            reached += tl.sum(tl.where(keys[None, :] >= candidates[:, None], weights[None, :], 0.0), axis=1)
        digit = tl.maximum(tl.sum((reached >= target).to(tl.int32), axis=0) - 1, 0)
        found += digit.to(tl.uint32) << shift
    return found


@triton.jit
def _filter_kernel(
    logits_ptr,
    out_ptr,
    ints_ptr,
    floats_ptr,
    size,
    stride,
    INTS: tl.constexpr,
    FLOATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    out_row_ptr = out_ptr + row.to(tl.int64) * size
    top_k = tl.load(ints_ptr + row * INTS + _TOP_K)
    top_p = tl.load(floats_ptr + row * FLOATS + _TOP_P)
    temperature = tl.load(floats_ptr + row * FLOATS + _TEMPERATURE)
    inverse = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    peak = tl.full((), float("-inf"), tl.float32)
    for start in range(0, size, BLOCK):
        x = _scaled(row_ptr, start + tl.arange(0, BLOCK), size, inverse)
        peak = tl.maximum(peak, tl.max(x, axis=0))
    floor = peak + tl.log(tl.load(floats_ptr + row * FLOATS + _MIN_P))
    limit = tl.full((), 0, tl.uint32)
    if top_k > 0:
        kept = tl.minimum(top_k, size).to(tl.float32)
        limit = _search(row_ptr, size, inverse, floor, peak, limit, kept, False, BLOCK)
    if top_p < 1.0:
        total = tl.full((), 0.0, tl.float32)
        for start in range(0, size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = _scaled(row_ptr, columns, size, inverse)
            inside = (columns < size) & (x >= floor) & (_ordered(x) >= limit)
            total += tl.sum(tl.where(inside, tl.exp(x - peak), 0.0), axis=0)
        # A target of 0 would be reached by no token at all; the best one always stays.
        target = tl.maximum(top_p * total, 1.1754944e-38)
        narrower = _search(row_ptr, size, inverse, floor, peak, limit, target, True, BLOCK)
        limit = tl.where(narrower > limit, narrower, limit)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = _scaled(row_ptr, columns, size, inverse)
        inside = (x >= floor) & (_ordered(x) >= limit) | ((x < float("inf")) == 0)
        logits = tl.load(row_ptr + columns, mask=columns < size, other=float("-inf"))
        tl.store(out_row_ptr + columns, tl.where(inside, logits, float("-inf")), mask=columns < size)


def filtered(logits: Tensor, ints: Tensor, floats: Tensor) -> Tensor:
    rows, size = logits.shape
    out = torch.empty((rows, size), dtype=logits.dtype, device=logits.device)
    launch(
        _filter_kernel,
        (rows,),
        logits,
        out,
        ints.contiguous(),
        floats.contiguous(),
        size,
        logits.stride(0),
        INTS=len(IntColumn),
        FLOATS=len(FloatColumn),
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return out
