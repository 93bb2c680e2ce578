"""What the launches of attention have in common."""

from __future__ import annotations

from typing import Any

import triton
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
