"""The paged key/value cache as the networks see it.

Caches are flat: row = page * page_size + offset. Page 0 and slot 0 are scratch: padded rows write there and nobody
reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CacheSpec:
    """One layer's cache: shape of one token's row by tensor name, e.g. {"k": (2, 128), "v": (2, 128)} or
    {"latent": (576,)}."""

    rows: Mapping[str, tuple[int, ...]]

    def allocate(self, num_pages: int, page_size: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        return {
            name: torch.zeros((num_pages * page_size, *shape), device=device, dtype=dtype)
            for name, shape in self.rows.items()
        }

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        itemsize = torch.empty((), dtype=dtype).element_size()
        return sum(itemsize * torch.Size(shape).numel() for shape in self.rows.values())


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """Where the rows of one packed batch live in the cache. Device tensors; Python ints are upper bounds.

    The first `num_decode_rows` packed rows advance one sequence each by one token; the rest are prefill chunks.

    slot_mapping: int64 [n], the cache row of every packed row (padding: a scratch row). A decode row's is that of
    position seq_lens - 1 in its block table.
    block_tables: int32 [num_decode_rows, max_pages], pages of the decode rows' sequences.
    seq_lens: int32 [num_decode_rows], keys that each decode row attends to, the new one included; 0 for padding.
    cu_seqlens_q, cu_seqlens_k: int32 [prefills + 1]; keys are past + new.
    key_rows: int64 [total keys], cache rows of the prefills' keys in order; None when no prefill has a past.
    """

    caches: Sequence[Mapping[str, Tensor]]
    page_size: int
    slot_mapping: Tensor
    num_decode_rows: int
    block_tables: Tensor | None = None
    seq_lens: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    key_rows: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
