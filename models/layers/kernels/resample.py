"""Weighted sums of bytes along an axis, in whole numbers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.interfaces.resizing import WEIGHT_BITS
from models.layers.kernels.launch import launch

_BLOCK = 1024


@triton.jit(do_not_specialize=["rows", "values", "length", "new_length", "taps"])
def _resample_kernel(
    lines_ptr,
    first_ptr,
    weights_ptr,
    out_ptr,
    rows,
    values,
    length,
    new_length,
    taps,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK bytes of the output, which has `rows` rows of `values` bytes."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = index // values
    here = row < rows
    line, place = row // new_length, row % new_length
    first = tl.load(first_ptr + place, mask=here, other=0)
    start = lines_ptr + line * length * values + index % values
    total = tl.full((BLOCK,), 1 << (BITS - 1), tl.int32)
    for tap in range(taps):
        source = tl.minimum(first + tap, length - 1).to(tl.int64)
        byte = tl.load(start + source * values, mask=here, other=0).to(tl.int32)
        total += byte * tl.load(weights_ptr + place * taps + tap, mask=here, other=0)
    total = tl.minimum(tl.maximum(total >> BITS, 0), 255)
    tl.store(out_ptr + index, total.to(tl.uint8), mask=here)


def resample(lines: Tensor, first: Tensor, weights: Tensor) -> Tensor:
    """lines uint8 [n, length, values] contiguous, first int32 [new length], weights int32 [new length, taps] -> uint8
    [n, new length, values]."""
    count, length, values = lines.shape
    new_length, taps = weights.shape
    out = torch.empty((count, new_length, values), dtype=torch.uint8, device=lines.device)
    launch(
        _resample_kernel,
        (triton.cdiv(out.numel(), _BLOCK),),
        lines,
        first,
        weights,
        out,
        count * new_length,
        values,
        length,
        new_length,
        taps,
        BITS=WEIGHT_BITS,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out
