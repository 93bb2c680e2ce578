"""Dense attention inside packed segments (cuDNN's, through torch's scaled_dot_product_attention), where it is faster
than attention of segments of any lengths.

Equal segments that fill all rows, pictures of common sizes in graphs that hold nothing else, need no lengths: they have
EXACT buckets (models/interfaces/capturable.py).

One segment, a single large picture of another size, covers all rows except for padding at the end. Dense attention
takes no length, and in a captured graph the length is data. So queries and keys are lengthened by a few features, the
first of which separates rows from padding: the query of a row gives padding a score far below any other, and the query
of a padding row attends to padding only, whose values are zeros. cuDNN pads head dims of 72 and 80 to 128 anyway, so
these features cost nothing; with a head dim of 64 they would, since it has a tile of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from math import lcm

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.interfaces.capturable import EXACT, Bucket
from models.layers.attention import varlen_attention
from models.layers.op import op
from models.layers.packed import rotate_packed
from models.layers.rotary import rotate_half_split

log = logging.getLogger(__name__)

ROWS = {64: range(784, 16385), 72: range(784, 2048), 80: range(784, 16385)}
"""Rows of a segment for which an exact bucket pays, by head dim; with 1200 rows it is slower. From 2048 rows on, heads
of 72 are as fast in the buckets for one segment, which hold other sizes, too
(benchmarks/results/kernels/attention.json).
"""
FEATURES = 8
"""Features by which a head is lengthened: head dims must stay multiples of 8 for cuDNN."""
MIN_ROWS = 2048
"""With fewer rows dense attention gains a few microseconds, which are not worth a graph of their own."""
WHOLE_ROWS = 64
"""Rows are a multiple of this, since cuDNN builds a plan for every number of rows, which takes a while. Eager passes of
other sizes use attention of any lengths."""
_HEAD_DIMS = (72, 80)
"""Measured to be faster on Hopper (benchmarks/results/kernels/attention_one_segment.json)."""
_HOPPER = (9, 0)
_refused: set[tuple[str, int, torch.dtype]] = set()
"""Kinds of segments, head dims and dtypes that cuDNN has refused."""


def attend_packed(qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, cu_seqlens: Tensor | None, longest: int) -> Tensor:
    """Attention inside each segment: qkv [n, 3 * heads, D], rows of q, then k, then v, overwritten -> [n, heads, D].

    rotary: cos and sin float32 [n, D / 2], which rotate q and k first; None: no rotation. cu_seqlens int32 [segments +
    1], the tail may repeat; None: the rows are segments of exactly `longest` rows, which is not read otherwise. Rows
    outside all segments are zero in the result.
    """
    if cu_seqlens is None:
        return attend_equal_segments(qkv, rotary, longest)
    rows, packed_heads, width = qkv.shape
    if rotary is not None:
        if pays(width, qkv.dtype, qkv.device):
            _prepare(packed_heads, width, qkv.dtype, qkv.device)
            # Decided by shapes alone: a captured graph knows nothing else.
            if cu_seqlens.shape[0] == 2 and rows >= MIN_ROWS and rows % WHOLE_ROWS == 0:
                attend = partial(attend_lengthened, qkv, *rotary, cu_seqlens)
                if (attended := _unless_refused("single pictures", qkv, attend)) is not None:
                    return attended
        rotate_packed(qkv, 2 * packed_heads // 3, *rotary)
    q, k, v = qkv.chunk(3, dim=1)
    return varlen_attention(q, k, v, cu_seqlens, cu_seqlens)


def attend_equal_segments(qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, length: int) -> Tensor:
    """attend_packed for rows that are segments of exactly `length` rows."""
    rows, heads, width = qkv.shape[0], qkv.shape[1] // 3, qkv.shape[2]
    if rotary is not None:
        rotate_packed(qkv, 2 * heads, *rotary)

    def attend() -> Tensor:
        q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in qkv.chunk(3, dim=1))
        return dense(q, k, v, width**-0.5).transpose(1, 2).flatten(0, 1)

    if (attended := _unless_refused("equal segments", qkv, attend)) is not None:
        return attended
    q, k, v = qkv.chunk(3, dim=1)
    cu_seqlens = torch.arange(0, rows + 1, length, dtype=torch.int32, device=qkv.device)
    return varlen_attention(q, k, v, cu_seqlens, cu_seqlens)


def _unless_refused(what: str, qkv: Tensor, attend: Callable[[], Tensor]) -> Tensor | None:
    """attend(); None if cuDNN refuses, which the first call finds out, before any capture. The rows of segments are
    still intact then."""
    key = what, qkv.shape[2], qkv.dtype
    if key in _refused:
        return None
    try:
        return attend()
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        log.warning("cuDNN does not attend to %s, the kernel for any lengths does: %s", what, error)
        _refused.add(key)
        return None


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """scaled_dot_product_attention of [segments, heads, rows, D], on a GPU by cuDNN; RuntimeError if it refuses."""
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    if not can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, False, False)):
        # scaled_dot_product_attention would give the reasons as several warnings.
        raise RuntimeError(f"no kernel for {q.dtype} heads of {q.shape[-1]} and {v.shape[-1]} features")
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, scale=scale)


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


@cache
def on_hopper(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this is a device and a dtype for which dense attention was measured: Hopper, 16 bits, with cuDNN."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.backends.cudnn.is_available() and torch.cuda.get_device_capability(device) == _HOPPER


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


def bounds(cu_seqlens: Tensor, bucket: Bucket) -> Tensor | None:
    """cu_seqlens for attend_packed: None in an exact bucket."""
    return None if EXACT in bucket else cu_seqlens


def dense_buckets(
    bucket_list: Sequence[Bucket],
    exact_sizes: Iterable[tuple[int, int]],
    head_dim: int,
    merged_patches: int,
    weight: Tensor,
) -> list[Bucket]:
    """All buckets in which attend_packed is dense; none where that is not faster.

    For each large bucket of the list one for a single segment, whose rows are cut to a multiple of WHOLE_ROWS and of
    merged_patches, the patches of an embedding. Then EXACT ones for those of exact_sizes, the number of equal segments
    and the patches of each, that the largest bucket of the list could hold. weight: any weight of the tower, for its
    dtype and device.
    """
    whole, largest = lcm(WHOLE_ROWS, merged_patches), max(bucket["patches"] for bucket in bucket_list)
    alone: dict[int, Bucket] = {}
    for bucket in bucket_list if pays(head_dim, weight.dtype, weight.device) else ():
        rows = bucket["patches"] // whole * whole
        if rows >= MIN_ROWS:
            alone[rows] = dict(bucket) | {"patches": rows, "sequences": 1, "max_seqlen": rows}
    exact = [
        {"patches": segments * patches, "sequences": segments, "max_seqlen": patches, EXACT: 1}
        for segments, patches in exact_sizes
        if segments * patches <= largest and patches in ROWS.get(head_dim, ())
    ]
    return [*alone.values(), *(exact if on_hopper(weight.dtype, weight.device) else ())]
