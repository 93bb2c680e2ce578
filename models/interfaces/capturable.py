"""What can be captured: plan (host, numpy) -> buffers (device) -> forward(buffers, bucket) -> outputs.

Eager calls forward on buffers of the exact size; replay copies the plan into the static buffers of the cheapest
captured bucket that fits and replays the captured graph of the same forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

Bucket = Mapping[str, int]
"""Sizes by name, e.g. {"patches": 1024, "sequences": 64, "max_seqlen": 1024} or {"rows": 8}. A plan names the bucket
that it requires; a captured bucket fits when each of its sizes is at least the required one.

Order and names matter. The time of a call grows with the first size: of the buckets that fit, the one with the smallest
first size is the cheapest. Where items are packed, sizes add up, except that of those named max_... the largest counts
(service/graphs/buckets.py)."""
EXACT = "exact"
"""A name that only captured buckets have. Such a bucket fits a plan that requires its very sizes and nothing smaller:
its graph takes it that no row is padding."""


@dataclass(frozen=True)
class BufferSpec:
    """Shape and dtype of a buffer, or of a table of slot state without its leading slot axis."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Plan:
    """The contents of a call's buffers.

    arrays: host data by buffer name; written to the leading rows of the buffer (all in one packed upload).
    tensors: device data by buffer name; the tensors' rows are written one after the other.
    fills: filler for the rest of a buffer (0 unless named). The whole buffer is refilled at each replay.
    required: the smallest bucket that holds this plan, which is also the exact bucket of the eager route.
    """

    arrays: dict[str, np.ndarray]
    required: Bucket
    tensors: dict[str, list[Tensor]] = field(default_factory=dict)
    fills: dict[str, float] = field(default_factory=dict)


class Capturable(Protocol):
    """A computation that can be captured: forward reads nothing but buffers, constants and slot state.

    Not allowed in forward: .item(), .tolist(), torch.tensor on data, shapes that depend on data, and relying on what a
    buffer held before. Integers that are baked into a captured graph come only from `bucket`.
    """

    def buffer_specs(self, bucket: Bucket) -> dict[str, BufferSpec]:
        """The buffers of a call of this size by name, in their order in memory. The first axis of a buffer is filled
        from a plan row by row."""
        ...

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        """Outputs by name. buffers: as buffer_specs(bucket) describes them. In a bucket that is larger than a plan
        requires, the last rows of buffers and outputs are padding."""
        ...
