"""The recorded steps of a chat model: decode, and sampling alone behind a mixed batch, both over slot state; the
backbone of prefills without a past.

The only input of a decode step is the list of slots. It feeds each slot's token, samples the next and leaves the slot
ready for the step after it; a slot that stopped is inactive, so a surplus step writes scratch and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from models.layers.kv_cache import PagedBatch
from models.protocol import BufferSpec, Capacity, Decoder
from service.engine.sampler import choose, restricted
from service.engine.slot_state import Int, SlotState


class Sampling:
    """What follows the backbone: logits, choice, stop, next inputs."""

    def __init__(self, decoder: Decoder, state: SlotState, vocab_limit: int, *, full: bool) -> None:
        self._decoder = decoder
        self._state = state
        self._vocab_limit = vocab_limit
        self.full = full

    def __call__(self, slots: Tensor, hidden: Tensor) -> dict[str, Tensor]:
        """slots int64 [rows], hidden [rows, width] -> "results" int32 [rows, 2] (token, 1 where it stopped); the full
        variant adds "logits" float32 [rows, vocabulary]."""
        state = self._state
        # Rows past the tokenizer's vocabulary only pad the embedding.
        logits = self._decoder.logits(hidden)[:, : self._vocab_limit]
        if not self.full:
            return {"results": advance(logits, slots, state)}
        logits = logits.float()
        active = state.ints[slots, Int.ACTIVE].to(torch.int32)
        results = advance(restricted(logits, slots, state), slots, state)
        tokens = results[:, 0].long()
        state.output_counts.index_put_((slots, tokens), state.output_counts[slots, tokens] + active)
        return {"results": results, "logits": logits}


def advance(logits: Tensor, slots: Tensor, state: SlotState) -> Tensor:
    """Chooses the slots' tokens (greedy or by plain temperature) and settles them: logits [rows, vocabulary], slots
    int64 [rows] -> results int32 [rows, 2]."""
    if logits.is_cuda:
        from service.engine.step_kernels import advance_cuda

        return advance_cuda(logits, slots, state)
    return advance_reference(logits, slots, state)


def advance_reference(logits: Tensor, slots: Tensor, state: SlotState) -> Tensor:
    return settle(choose(logits.float(), slots, state), slots, state)


def settle(tokens: Tensor, slots: Tensor, state: SlotState) -> Tensor:
    """Chosen tokens int64 [rows]: stops what they stop and writes the slots' next inputs -> results int32 [rows, 2]."""
    ints = state.ints[slots]
    active = ints[:, Int.ACTIVE]
    stopped = (tokens[:, None] == state.stop_ids[slots]).any(dim=1).to(torch.int64) & active
    following = ints.clone()
    following[:, Int.TOKEN] = torch.where(active > 0, tokens, ints[:, Int.TOKEN])
    following[:, Int.LENGTH] += active
    following[:, Int.POSITION] += active
    following[:, Int.GENERATED] += active
    following[:, Int.ACTIVE] = active - stopped
    state.ints.index_copy_(0, slots, following)
    return torch.stack((tokens, stopped), dim=1).to(torch.int32)


def decode_rows(
    slots: Tensor, state: SlotState, max_pages: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tokens, positions, cache rows, block tables and lengths of the slots' next step; inactive slots have length 0
    and write to the scratch page."""
    if slots.is_cuda:
        from service.engine.step_kernels import decode_rows_cuda

        return decode_rows_cuda(slots, state, max_pages, page_size)
    return decode_rows_reference(slots, state, max_pages, page_size)


def decode_rows_reference(
    slots: Tensor, state: SlotState, max_pages: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    ints = state.ints[slots]
    active, length = ints[:, Int.ACTIVE] > 0, ints[:, Int.LENGTH]
    tables = state.block_tables[slots, :max_pages]
    pages = tables.gather(1, (length // page_size).clamp(max=max_pages - 1)[:, None]).squeeze(1).long()
    cache_rows = torch.where(active, pages * page_size + length % page_size, 0)
    seq_lens = torch.where(active, length + 1, 0).to(torch.int32)
    return ints[:, Int.TOKEN], ints[:, Int.POSITION], cache_rows, tables, seq_lens


class DecodeStep:
    """Every slot advances by one token. Capacity: rows, pages (of the longest sequence)."""

    def __init__(
        self,
        decoder: Decoder,
        state: SlotState,
        caches: Sequence[Mapping[str, Tensor]],
        page_size: int,
        sampling: Sampling,
    ) -> None:
        self.name = "decode_full" if sampling.full else "decode"
        self._decoder = decoder
        self._state = state
        self._caches = caches
        self._page_size = page_size
        self._sampling = sampling

    def buffer_specs(self, capacity: Capacity) -> dict[str, BufferSpec]:
        return {"slots": BufferSpec((capacity["rows"],), torch.int64)}

    def forward(self, buffers: Mapping[str, Tensor], capacity: Capacity) -> dict[str, Tensor]:
        slots = buffers["slots"]
        tokens, positions, cache_rows, tables, seq_lens = decode_rows(
            slots, self._state, capacity["pages"], self._page_size
        )
        batch = PagedBatch(
            caches=self._caches,
            page_size=self._page_size,
            slot_mapping=cache_rows,
            num_decode_rows=capacity["rows"],
            block_tables=tables,
            seq_lens=seq_lens,
        )
        positions = positions[None].expand(self._decoder.position_axes, -1)
        hidden = self._decoder.forward(self._decoder.embed(tokens), positions, batch)
        return self._sampling(slots, hidden)


class PrefillStep:
    """Backbone of whole prompts, or their first chunks. Capacity: tokens, sequences.

    Up to about a thousand tokens a prefill is bound by its launches. Padded rows write to the scratch page.
    """

    name = "prefill"

    def __init__(
        self,
        decoder: Decoder,
        caches: Sequence[Mapping[str, Tensor]],
        page_size: int,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        self._decoder = decoder
        self._caches = caches
        self._page_size = page_size
        self._width = width
        self._dtype = dtype

    def buffer_specs(self, capacity: Capacity) -> dict[str, BufferSpec]:
        tokens = capacity["tokens"]
        return {
            "hidden": BufferSpec((tokens, self._width), self._dtype),
            "positions": BufferSpec((tokens, self._decoder.position_axes), torch.int64),
            "cache_rows": BufferSpec((tokens,), torch.int64),
            "cu_seqlens": BufferSpec((capacity["sequences"] + 1,), torch.int32),
        }

    def forward(self, buffers: Mapping[str, Tensor], capacity: Capacity) -> dict[str, Tensor]:
        batch = PagedBatch(
            caches=self._caches,
            page_size=self._page_size,
            slot_mapping=buffers["cache_rows"],
            num_decode_rows=0,
            cu_seqlens_q=buffers["cu_seqlens"],
            cu_seqlens_k=buffers["cu_seqlens"],
            max_seqlen_q=capacity["tokens"],
            max_seqlen_k=capacity["tokens"],
        )
        return {"hidden": self._decoder.forward(buffers["hidden"], buffers["positions"].T, batch)}


class SampleStep:
    """Sampling for the rows of a mixed batch that end in a token. Capacity: rows."""

    def __init__(self, sampling: Sampling, width: int, dtype: torch.dtype) -> None:
        self.name = "sample_full" if sampling.full else "sample"
        self._sampling = sampling
        self._width = width
        self._dtype = dtype

    def buffer_specs(self, capacity: Capacity) -> dict[str, BufferSpec]:
        rows = capacity["rows"]
        return {
            "slots": BufferSpec((rows,), torch.int64),
            "hidden": BufferSpec((rows, self._width), self._dtype),
        }

    def forward(self, buffers: Mapping[str, Tensor], capacity: Capacity) -> dict[str, Tensor]:
        return self._sampling(buffers["slots"], buffers["hidden"])
