"""The paged key/value cache as the networks see it.

Caches are flat: row = page * page_size + offset. Page 0 is scratch: padded rows write there, and nothing reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

Caches = Sequence[Mapping[str, Tensor]]
"""The tensors of each layer by name, as CacheSpec.allocate returns them."""


@dataclass(frozen=True)
class CacheSpec:
    """Cache of one layer: the shape of one token's row by tensor name, e.g. {"k": (2, 128), "v": (2, 128)} or
    {"latent": (576,)}."""

    rows: Mapping[str, tuple[int, ...]]

    def allocate(self, num_pages: int, page_size: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of a layer by name, zeros [num_pages * page_size, *row]."""
        return {
            name: torch.zeros((num_pages * page_size, *shape), device=device, dtype=dtype)
            for name, shape in self.rows.items()
        }

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return sum(dtype.itemsize * prod(shape) for shape in self.rows.values())


def allocate_together(
    specs: Sequence[CacheSpec], num_pages: int, page_size: int, device: torch.device, dtype: torch.dtype
) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """The tensors of all layers, as CacheSpec.allocate makes them, and what they are views of: for each shape of row
    one tensor [tensors of this shape, num_pages, page_size, *row], where a page of all layers is copied at once."""
    counts = Counter(shape for spec in specs for shape in spec.rows.values())
    whole = {
        shape: torch.zeros((count, num_pages, page_size, *shape), device=device, dtype=dtype)
        for shape, count in counts.items()
    }
    views = {shape: iter(tensor.flatten(1, 2)) for shape, tensor in whole.items()}
    return [{name: next(views[shape]) for name, shape in spec.rows.items()} for spec in specs], list(whole.values())


STATE_INTERVAL = 64
"""Chunks of prompts start at multiples of this many positions, and recurrent state is kept at multiples of it."""


@dataclass(frozen=True, eq=False)
class StateRows:
    """Where the recurrent state of the sequences of a batch is, which has either decode rows or prefill chunks.

    layers: the tensors [rows, *shape] of each layer with state, by name (models.protocol.Decoder.state_specs). Row 0 is
        scratch: padding and stopped rows read and write it, and no result may depend on it.
    read: int64 [decode rows or prefills], the row with the state before; 0 for a prompt that begins, from zeros.
    write: of the same shape, the row that gets the state after; it may be the one that is read.
    snapshot_rows, snapshot_ends: int64 [prefills], the row that gets the state after so many tokens of the
        chunk, a multiple of STATE_INTERVAL; row 0: none.
    inputs, slots, pending: for decode steps whose tokens may be rejected, as many of each sequence: decode rows, or
        with drafts chunks. `write` gets the state before them, and their inputs are kept for the next step, which
        applies those that were accepted. inputs: the tensors [slots + 1, tokens, *shape] of each layer, by name
        (models.protocol.Decoder.pending_specs); slots: int64 [sequences], rows of these, 0 is scratch; pending: int64
        [sequences], how many of the tokens in them come before this step's.
    """

    layers: Sequence[Mapping[str, Tensor]]
    read: Tensor
    write: Tensor
    snapshot_rows: Tensor | None = None
    snapshot_ends: Tensor | None = None
    inputs: Sequence[Mapping[str, Tensor]] = ()
    slots: Tensor | None = None
    pending: Tensor | None = None


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """Where the rows of one packed batch are in the cache. Tensors are on the device.

    They are decode rows, which advance one sequence each by one token, or prefill chunks.

    slot_mapping: int64 [n], the KV slot of every packed row (padding: a scratch slot). For a decode row, the slot of
    position seq_lens - 1 in its block table.
    block_tables: int32 [n, max_pages], pages of the decode rows' sequences; None: the rows are prefill chunks.
    seq_lens: int32 [n], keys that each decode row attends to, the new one included; 0 for padding.
    cu_seqlens_q, cu_seqlens_k: int32 [prefills + 1], bounds of the chunks' queries, and of their keys (cached + new);
    the same where nothing is cached.
    context_slots: int64 [total keys], KV slots of the prefills' keys in order; None when no prefill has cached context.
    prefill_tables, prefill_lens: int32 [prefills, max_pages] and [prefills], the prefills' pages and keys (cached +
    new), in place of cu_seqlens_k and context_slots: sizes that do not grow with the cached context, as a captured
    graph needs.
    states: of decoders with recurrent state.
    """

    caches: Caches
    page_size: int
    slot_mapping: Tensor
    block_tables: Tensor | None = None
    seq_lens: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    context_slots: Tensor | None = None
    prefill_tables: Tensor | None = None
    prefill_lens: Tensor | None = None
    states: StateRows | None = None
