"""What kernels of attention, and their launches, have in common."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.launch import dot_precision

LOG2_E = 1.4426950408889634


def head_sizes(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """What a kernel is compiled for: strides between heads of q [n, Hq, D], k [m, Hkv, D] and v [m, Hkv, Dv], their
    widths, whole and in parts, query heads of a key head, and the precision of products."""
    (d1, d2), (v1, v2) = split_width(q.shape[-1]), split_width(v.shape[-1])
    strides = {"Q_HEAD": q.stride(1), "K_HEAD": k.stride(1), "V_HEAD": v.stride(1)}
    widths = {"D": q.shape[-1], "DV": v.shape[-1], "D1": d1, "D2": d2, "V1": v1, "V2": v2}
    return {**strides, **widths, "GROUP": q.shape[1] // k.shape[1], "PRECISION": dot_precision(q)}


def values_in_keys(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether values are the first columns of keys, and a part of theirs (MLA): they need not be read again."""
    same = v_cache.data_ptr() == k_cache.data_ptr() and v_cache.stride() == k_cache.stride()
    return same and v_cache.shape[-1] == split_width(v_cache.shape[-1])[0] == split_width(k_cache.shape[-1])[0]


def split_width(width: int) -> tuple[int, int]:
    """A head dim as one power of two and a padded rest (0 if none): 80 -> (64, 16), 72 -> (64, 16), 12 -> (16, 0)."""
    if width <= 16:
        return 16, 0
    main = 1 << (width.bit_length() - 1)
    rest = width - main
    return main, 0 if rest == 0 else max(16, triton.next_power_of_2(rest))


class Softmax(NamedTuple):
    """An online softmax in base 2: weighted sums of both ranges of a value's columns, the sum of the weights, and the
    largest score."""

    acc1: Any
    acc2: Any
    total: Any
    peak: Any


@triton.jit
def no_keys(ROWS: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr):
    """The softmax of rows before their first key."""
    # The unused second accumulator of head dims without a rest costs nothing: it is never read.
    acc1, acc2 = tl.zeros((ROWS, V1), tl.float32), tl.zeros((ROWS, V2 if V2 > 0 else 16), tl.float32)
    return Softmax(acc1, acc2, tl.zeros((ROWS,), tl.float32), tl.full((ROWS,), float("-inf"), tl.float32))


@triton.jit
def load_heads(rows, here, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Both ranges of the columns of heads; the first one twice where there is no second. here: which rows are there,
    [rows, 1]."""
    columns = tl.arange(0, D1)[None, :]
    first = tl.load(rows + columns, mask=here & (columns < D), other=0.0)
    second = first
    if D2 > 0:
        rest = D1 + tl.arange(0, D2)[None, :]
        second = tl.load(rows + rest, mask=here & (rest < D), other=0.0)
    return first, second


@triton.jit
def _loaded(rows, columns, present, WIDTH: tl.constexpr, PADDED: tl.constexpr, ABSENT: tl.constexpr):
    """Columns of rows. PADDED: not all columns are there; ABSENT: nor all rows."""
    if ABSENT:
        x = tl.load(rows + columns, mask=present & (columns < WIDTH), other=0.0)
    elif PADDED:
        x = tl.load(rows + columns, mask=columns < WIDTH, other=0.0)
    else:
        x = tl.load(rows + columns)
    return x


@triton.jit
def attend_block(
    softmax,
    q,
    keys,
    k_rows,
    v_rows,
    present,
    limits,
    scale_log2,
    D: tl.constexpr,
    DV: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    V1: tl.constexpr,
    V2: tl.constexpr,
    ABSENT: tl.constexpr,
    LIMITED: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Softmax after one more block of keys [keys], whose rows these are. q: load_heads of the queries. ABSENT: only
    those that are `present` [keys, 1] are read. LIMITED: each query sees those below its limit, [queries]."""
    q1, q2 = q
    k1 = _loaded(k_rows, tl.arange(0, D1)[None, :], present, D, D1 > D, ABSENT)
    scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
    if D2 > 0:
        k2 = _loaded(k_rows, D1 + tl.arange(0, D2)[None, :], present, D, True, ABSENT)
        scores = tl.dot(q2, tl.trans(k2), acc=scores, input_precision=PRECISION)
    if LIMITED:
        scores = tl.where(keys[None, :] < limits[:, None], scores, float("-inf"))
    peak = tl.maximum(softmax.peak, tl.max(scores, 1) * scale_log2)
    # A row that sees no key yet keeps -inf, and inf - inf is NaN.
    base = tl.where(peak == float("-inf"), 0.0, peak) if LIMITED else peak
    weights = tl.exp2(scores * scale_log2 - base[:, None])
    decay = tl.exp2(softmax.peak - base)
    total = softmax.total * decay + tl.sum(weights, 1)
    if VALUES_IN_KEYS:
        v1 = k1
    else:
        v1 = _loaded(v_rows, tl.arange(0, V1)[None, :], present, DV, V1 > DV, ABSENT)
    weights = weights.to(v1.dtype)
    acc1 = tl.dot(weights, v1, acc=softmax.acc1 * decay[:, None], input_precision=PRECISION)
    acc2 = softmax.acc2
    if V2 > 0:
        v2 = _loaded(v_rows, V1 + tl.arange(0, V2)[None, :], present, DV, True, ABSENT)
        acc2 = tl.dot(weights, v2, acc=softmax.acc2 * decay[:, None], input_precision=PRECISION)
    return Softmax(acc1, acc2, total, peak)
