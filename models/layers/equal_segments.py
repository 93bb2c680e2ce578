"""Attention of equal segments that fill all packed rows: pictures of common sizes, in graphs that hold nothing else.

Dense attention (cuDNN's, through torch's scaled_dot_product_attention) is faster than attention of segments of any
lengths, and in an EXACT bucket (models/interfaces/capturable.py) it needs no lengths. models/layers/one_segment.py is
for single pictures of other sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.interfaces.capturable import EXACT, Bucket
from models.layers.attention import varlen_attention
from models.layers.packed import rotate_packed

log = logging.getLogger(__name__)

ROWS = {64: range(784, 16385), 72: range(784, 2048), 80: range(784, 16385)}
"""Rows of a segment for which an exact bucket pays, by head dim; with 1200 rows it is slower. From 2048 rows on, heads
of 72 are as fast in the buckets of one_segment.py, which hold other sizes, too
(benchmarks/results/kernels/attention.json).
"""
_HOPPER = (9, 0)
_refused: set[tuple[int, torch.dtype]] = set()
"""Head dims and dtypes that cuDNN has refused."""


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """scaled_dot_product_attention of [segments, heads, rows, D], on a GPU by cuDNN; RuntimeError if it refuses."""
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    if not can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, False, False)):
        # scaled_dot_product_attention would give the reasons as several warnings.
        raise RuntimeError(f"no kernel for {q.dtype} heads of {q.shape[-1]} and {v.shape[-1]} features")
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, scale=scale)


def attend_equal_segments(qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, length: int) -> Tensor:
    """models.layers.one_segment.attend_packed for rows that are segments of exactly `length` rows."""
    rows, heads, width = qkv.shape[0], qkv.shape[1] // 3, qkv.shape[2]
    if rotary is not None:
        rotate_packed(qkv, 2 * heads, *rotary)
    q, k, v = qkv.chunk(3, dim=1)
    if (width, qkv.dtype) not in _refused:
        try:
            by_segment = [x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v)]
            return dense(by_segment[0], by_segment[1], by_segment[2], width**-0.5).transpose(1, 2).flatten(0, 1)
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            log.warning("cuDNN does not attend to equal segments, the kernel for any lengths does: %s", error)
            _refused.add((width, qkv.dtype))
    cu_seqlens = torch.arange(0, rows + 1, length, dtype=torch.int32, device=qkv.device)
    return varlen_attention(q, k, v, cu_seqlens, cu_seqlens)


@cache
def on_hopper(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this is a device and a dtype for which dense attention was measured: Hopper, 16 bits, with cuDNN."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.backends.cudnn.is_available() and torch.cuda.get_device_capability(device) == _HOPPER


def exact_buckets(
    bucket_list: Sequence[Bucket], sizes: Iterable[tuple[int, int]], head_dim: int, weight: Tensor
) -> list[Bucket]:
    """EXACT buckets for those of `sizes` for which dense attention is faster and that the largest bucket of the list
    could hold.

    sizes: of calls with equal segments: their number, and the patches of each. weight: any weight of the tower, for
    its dtype and device.
    """
    if not on_hopper(weight.dtype, weight.device) or head_dim not in ROWS:
        return []
    largest = max(bucket["patches"] for bucket in bucket_list)
    return [
        {"patches": segments * patches, "sequences": segments, "max_seqlen": patches, EXACT: 1}
        for segments, patches in sizes
        if segments * patches <= largest and patches in ROWS[head_dim]
    ]


def bounds(cu_seqlens: Tensor, bucket: Bucket) -> Tensor | None:
    """cu_seqlens for attend_packed: None in an exact bucket."""
    return None if EXACT in bucket else cu_seqlens
