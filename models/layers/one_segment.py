"""Attention of one segment, a single large picture, that covers all packed rows except for padding at the end.

Here dense attention (cuDNN's, through torch's scaled_dot_product_attention) is faster than attention of segments of any
lengths. But it takes no length, and in a captured graph the length is data. So queries and keys are lengthened by a few
features, the first of which separates rows from padding: the query of a row gives padding a score far below any other,
and the query of a padding row attends to padding only, whose values are zeros. cuDNN pads head dims of 72 and 80 to 128
anyway, so these features cost nothing; with a head dim of 64 they would, since it has a tile of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import lcm

import torch
from torch import Tensor

from models.interfaces.capturable import Bucket
from models.layers.attention import varlen_attention
from models.layers.equal_segments import attend_equal_segments, dense, exact_buckets, on_hopper
from models.layers.op import op
from models.layers.packed import rotate_packed
from models.layers.rotary import rotate_half_split

log = logging.getLogger(__name__)

FEATURES = 8
"""Features by which a head is lengthened: head dims must stay multiples of 8 for cuDNN."""
MIN_ROWS = 2048
"""With fewer rows dense attention gains a few microseconds, which are not worth a graph of their own."""
WHOLE_ROWS = 64
"""Rows are a multiple of this, since cuDNN builds a plan for every number of rows, which takes a while. Eager passes of
other sizes use attention of any lengths."""
_HEAD_DIMS = (72, 80)
"""Measured to be faster on Hopper (benchmarks/results/kernels/attention_one_segment.json)."""
_refused: set[tuple[int, torch.dtype]] = set()
"""Head dims and dtypes that cuDNN has refused."""


def far(dtype: torch.dtype) -> float:
    """By how much the scores of padding are lowered, before they are scaled; exact in `dtype`. After the scale of any
    head dim, the weight of such a score is exactly 0 in float32."""
    return 2.0**15 if dtype == torch.float16 else 2.0**30


@op(cuda="models.layers.kernels.packed:lengthen")
def lengthen(qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Rotated and lengthened queries and keys: [2, n, heads, D + FEATURES].

    qkv [n, 3 * heads, D]; cos and sin float32 [n, D / 2], half-split; cu_seqlens int32 [2], of one segment that starts
    at row 0. Rows behind the segment may hold anything; their values are set to zero in place.
    """
    rows, heads, width = qkv.shape[0], qkv.shape[1] // 3, qkv.shape[2]
    present = (torch.arange(rows, device=qkv.device) < cu_seqlens[1])[:, None, None]
    rotated = torch.where(present, rotate_half_split(qkv[:, : 2 * heads], cos, sin), 0.0)
    out = qkv.new_zeros((2, rows, heads, width + FEATURES))
    out[0, :, :, :width], out[1, :, :, :width] = rotated.chunk(2, dim=1)
    out[0, :, :, width] = torch.where(present[..., 0], 1.0, -1.0)
    out[1, :, :, width] = torch.where(present[..., 0], 0.0, -far(qkv.dtype))
    qkv[:, 2 * heads :] = torch.where(present, qkv[:, 2 * heads :], 0.0)
    return out


def attend_lengthened(qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Dense attention inside one segment, arguments as of `lengthen` -> [n, heads, D]; rows behind the segment are
    zero.

    On a GPU by cuDNN; RuntimeError if it refuses.
    """
    heads, width = qkv.shape[1] // 3, qkv.shape[2]
    queries, keys = lengthen(qkv, cos, sin, cu_seqlens)
    q, k, v = (x.transpose(0, 1)[None] for x in (queries, keys, qkv[:, 2 * heads :]))
    return dense(q, k, v, width**-0.5)[0].transpose(0, 1)


def attend_packed(qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, cu_seqlens: Tensor | None, longest: int) -> Tensor:
    """Attention inside each segment: qkv [n, 3 * heads, D], rows of q, then k, then v, overwritten -> [n, heads, D].

    rotary: cos and sin float32 [n, D / 2], which rotate q and k first; None: no rotation. cu_seqlens int32 [segments +
    1], the tail may repeat; None: the rows are segments of exactly `longest` rows, which is not read otherwise. Rows
    outside all segments are zero in the result.
    """
    if cu_seqlens is None:
        return attend_equal_segments(qkv, rotary, longest)
    if rotary is not None:
        rows, packed_heads, width = qkv.shape
        if pays(width, qkv.dtype, qkv.device):
            _prepare(packed_heads, width, qkv.dtype, qkv.device)
            # Decided by shapes alone: a captured graph knows nothing else.
            one_segment = cu_seqlens.shape[0] == 2 and rows >= MIN_ROWS and rows % WHOLE_ROWS == 0
            if one_segment and (attended := _dense(qkv, *rotary, cu_seqlens)) is not None:
                return attended
        rotate_packed(qkv, 2 * qkv.shape[1] // 3, *rotary)
    q, k, v = qkv.chunk(3, dim=1)
    return varlen_attention(q, k, v, cu_seqlens, cu_seqlens)


def pays(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether dense attention was measured to be faster for heads of this size on this device."""
    return head_dim in _HEAD_DIMS and on_hopper(dtype, device)


@cache
def _prepare(packed_heads: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compiles the kernel of `lengthen` in the first pass of a start, with the tower's other kernels, and not when the
    first large picture comes."""
    half = torch.zeros((1, width // 2), device=device)
    ends = torch.zeros(2, dtype=torch.int32, device=device)
    lengthen(torch.zeros((1, packed_heads, width), dtype=dtype, device=device), half, half, ends)


def _dense(qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor) -> Tensor | None:
    """attend_lengthened; None if cuDNN refuses, which the first call finds out, before any capture. The rows of the
    segment are still intact then."""
    if (qkv.shape[2], qkv.dtype) in _refused:
        return None
    try:
        return attend_lengthened(qkv, cos, sin, cu_seqlens)
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        log.warning("cuDNN does not attend to single pictures, the kernel for any lengths does: %s", error)
        _refused.add((qkv.shape[2], qkv.dtype))
        return None


def one_segment_buckets(
    bucket_list: Iterable[Mapping[str, int]], head_dim: int, merged_patches: int, weight: Tensor
) -> list[Mapping[str, int]]:
    """For each large bucket of the list, a bucket for one segment; none where dense attention is not faster.

    weight: any weight of the tower, for its dtype and device. Rows are cut to a multiple of WHOLE_ROWS and of
    merged_patches, the patches of an embedding.
    """
    if not pays(head_dim, weight.dtype, weight.device):
        return []
    found: dict[int, Mapping[str, int]] = {}
    for bucket in bucket_list:
        whole = lcm(WHOLE_ROWS, merged_patches)
        rows = bucket["patches"] // whole * whole
        if rows >= MIN_ROWS:
            found[rows] = dict(bucket) | {"patches": rows, "sequences": 1, "max_seqlen": rows}
    return list(found.values())


def dense_buckets(
    bucket_list: Sequence[Bucket],
    exact_sizes: Iterable[tuple[int, int]],
    head_dim: int,
    merged_patches: int,
    weight: Tensor,
) -> list[Bucket]:
    """All buckets in which attend_packed is dense: those for one segment, and those of `exact_sizes`, the number of
    equal segments and the patches of each. The other arguments as of one_segment_buckets."""
    exact = exact_buckets(bucket_list, exact_sizes, head_dim, weight)
    return [*one_segment_buckets(bucket_list, head_dim, merged_patches, weight), *exact]
