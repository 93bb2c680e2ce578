"""Build PagedBatch values for tests: sequences over shuffled pages, chunked prefill, decode, and a greedy loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.interfaces.capturable import BufferSpec
from models.layers.kv_cache import CacheSpec, PagedBatch, StateRows


@dataclass
class PagedSequence:
    """Pages of one sequence, in order, the number of tokens whose keys are written, and the row of its state."""

    pages: list[int]
    length: int = 0
    row: int = 0


@dataclass
class PagedCache:
    """All caches and states of a model with a pool of shuffled pages; unused rows hold NaN so that reading them
    shows."""

    specs: Sequence[CacheSpec]
    num_pages: int = 64
    page_size: int = 16
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    state_specs: Sequence[Mapping[str, BufferSpec]] = ()
    num_states: int = 8

    def __post_init__(self) -> None:
        self.caches = [spec.allocate(self.num_pages, self.page_size, self.device, self.dtype) for spec in self.specs]
        for cache in self.caches:
            for values in cache.values():
                values[self.page_size :] = float("nan")
        generator = torch.Generator().manual_seed(7)
        self.free = (torch.randperm(self.num_pages - 1, generator=generator) + 1).tolist()
        self.states = [
            {
                name: torch.full((self.num_states, *spec.shape), float("nan"), dtype=spec.dtype, device=self.device)
                for name, spec in layer.items()
            }
            for layer in self.state_specs
        ]
        self.last_state = 0

    def new_sequence(self, bucket: int) -> PagedSequence:
        count = -(-bucket // self.page_size)
        pages, self.free = self.free[:count], self.free[count:]
        assert len(pages) == count, "the test's cache is too small"
        self.last_state += 1
        return PagedSequence(pages, row=self.last_state)

    def rows(self, sequence: PagedSequence, start: int, stop: int) -> list[int]:
        size = self.page_size
        return [sequence.pages[position // size] * size + position % size for position in range(start, stop)]

    def batch(
        self, decodes: Sequence[PagedSequence] = (), prefills: Sequence[tuple[PagedSequence, int]] = ()
    ) -> PagedBatch:
        """One step: each decode sequence advances by one token, each prefill by its count; lengths are advanced."""
        slot_mapping: list[int] = []
        for sequence in decodes:
            slot_mapping += self.rows(sequence, sequence.length, sequence.length + 1)
            sequence.length += 1
        states = None
        if self.states:
            advanced = [*decodes, *(sequence for sequence, _ in prefills)]
            read = self._tensor([sequence.row if sequence.length else 0 for sequence in advanced], torch.int64)
            write = self._tensor([sequence.row for sequence in advanced], torch.int64)
            states = StateRows(self.states, read, write)
        most = max((len(sequence.pages) for sequence in decodes), default=1)
        tables = [sequence.pages + [0] * (most - len(sequence.pages)) for sequence in decodes]
        has_past = any(sequence.length for sequence, _ in prefills)
        cu_q, cu_k, context_slots = [0], [0], []
        for sequence, count in prefills:
            slot_mapping += self.rows(sequence, sequence.length, sequence.length + count)
            sequence.length += count
            cu_q.append(cu_q[-1] + count)
            cu_k.append(cu_k[-1] + sequence.length)
            context_slots += self.rows(sequence, 0, sequence.length)
        return PagedBatch(
            caches=self.caches,
            page_size=self.page_size,
            slot_mapping=self._tensor(slot_mapping, torch.int64),
            block_tables=self._tensor(tables, torch.int32) if decodes else None,
            seq_lens=self._tensor([sequence.length for sequence in decodes], torch.int32) if decodes else None,
            cu_seqlens_q=self._tensor(cu_q, torch.int32) if prefills else None,
            cu_seqlens_k=self._tensor(cu_k, torch.int32) if prefills else None,
            context_slots=self._tensor(context_slots, torch.int64) if has_past else None,
            states=states,
        )

    def _tensor(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)
