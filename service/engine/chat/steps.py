"""The captured steps of a chat model: decode, sampling after a prefill, and prefills without and with cached context.

The only input of a decode step is the list of request slots. It reads each slot's token, samples the next one and
writes the slot's state for the step after it. A slot that has stopped is inactive: its overrun row writes to scratch.

A batch with guided rows decodes in two steps, layers and sampling, so that the masks can be computed while the layers
run. A mask depends on the grammar and on the previous token, which the host has to read first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.interfaces.capturable import Bucket, BufferSpec
from models.layers.kv_cache import STATE_INTERVAL, PagedBatch, StateRows
from models.layers.op import op
from models.protocol import Decoder
from service.engine.chat.drafts import MAX_ROWS, Drafting, accept, drafted_state, look_up
from service.engine.chat.sampler import apply_penalties_and_filters, choose, corrupt_rows, mask_logits
from service.engine.chat.slot_state import IntColumn, SlotState

STATE_BUFFERS = ("state_read", "state_write", "snapshot_rows", "snapshot_ends")
"""Buffers of chunks of models with recurrent state, each int64 [sequences]."""


@dataclass(frozen=True, eq=False)
class Sampling:
    """The end of a step, after the backbone: logits, sampling, stop tokens, next inputs."""

    decoder: Decoder
    state: SlotState
    vocab_limit: int
    full: bool
    """With penalties and filters."""
    drafting: Drafting | None = None
    """Of models with a drafter that is used."""

    def __call__(
        self, slots: Tensor, hidden: Tensor, mask_rows: Tensor | None = None, *, draft: bool = False
    ) -> dict[str, Tensor]:
        """slots int64 [rows], hidden [rows, hidden_size], mask_rows int64 [rows] (rows of SlotState.allowed) ->
        "results" int32 [rows, 2]: token, and 1 where it stopped or -1 where a logit was NaN or inf. The full variant
        adds "logits" float32 [rows, vocabulary], before penalties and filters. draft: the next step has drafts."""
        outputs = self._sample(slots, hidden, mask_rows)
        if self.state.history.shape[1]:
            ints = self.state.ints[slots]
            places = slots, ints[:, IntColumn.LENGTH]
            self.state.history.index_put_(places, ints[:, IntColumn.TOKEN].to(torch.int32))
        if self.drafting is not None:
            self.drafting.after(slots, hidden, draft=draft and len(slots) <= MAX_ROWS)
        return outputs

    def _sample(self, slots: Tensor, hidden: Tensor, mask_rows: Tensor | None) -> dict[str, Tensor]:
        state = self.state
        # Columns past the tokenizer's vocabulary only pad the embedding.
        logits = self.decoder.logits(hidden)[:, : self.vocab_limit]
        if not self.full:
            return {"results": sample_tokens(logits, slots, state, mask_rows)}
        candidates = logits if mask_rows is None else mask_logits(logits, state.allowed[mask_rows])
        active = state.ints[slots, IntColumn.ACTIVE].to(torch.int32)
        results = sample_tokens(apply_penalties_and_filters(candidates.float(), slots, state), slots, state)
        tokens = results[:, 0].long()
        state.output_counts.index_put_((slots, tokens), state.output_counts[slots, tokens] + active)
        return {"results": results, "logits": logits.float()}


@op(cuda="service.engine.chat.step_kernels:sample_tokens")
def sample_tokens(logits: Tensor, slots: Tensor, state: SlotState, mask_rows: Tensor | None = None) -> Tensor:
    """Samples the slots' next tokens, greedily or by plain temperature, and commits them: logits [rows, vocabulary],
    slots int64 [rows], mask_rows int64 [rows] (rows of SlotState.allowed) -> results int32 [rows, 2] as of Sampling."""
    candidates = logits.float() if mask_rows is None else mask_logits(logits, state.allowed[mask_rows])
    return commit_tokens(choose(candidates, slots, state), corrupt_rows(candidates), slots, state)


def commit_tokens(tokens: Tensor, corrupt: Tensor, slots: Tensor, state: SlotState) -> Tensor:
    """Commits sampled tokens int64 [rows]: stops the slots that drew a stop token or are corrupt (bool [rows]; their
    token is 0), and writes the next inputs of all slots -> results int32 [rows, 2]."""
    ints = state.ints[slots]
    active = ints[:, IntColumn.ACTIVE]
    tokens = torch.where(corrupt, 0, tokens)
    ends = (tokens[:, None] == state.stop_ids[slots]).any(dim=1).to(torch.int64)
    stopped = torch.where(corrupt, -1, ends) * active
    following = ints.clone()
    following[:, IntColumn.TOKEN] = torch.where(active > 0, tokens, ints[:, IntColumn.TOKEN])
    following[:, IntColumn.LENGTH] += active
    following[:, IntColumn.POSITION] += active
    following[:, IntColumn.GENERATED] += active
    following[:, IntColumn.ACTIVE] = active - stopped.abs()
    state.ints.index_copy_(0, slots, following)
    return torch.stack((tokens, stopped), dim=1).to(torch.int32)


@op(cuda="service.engine.chat.step_kernels:decode_rows")
def decode_rows(
    slots: Tensor, state: SlotState, max_pages: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the next step of the slots int64 [rows] reads: tokens, positions and KV slots int64 [rows], block tables
    int32 [rows, max_pages], lengths with the new key int32 [rows]. Inactive slots have length 0 and write to the
    scratch page."""
    ints = state.ints[slots]
    active, length = ints[:, IntColumn.ACTIVE] > 0, ints[:, IntColumn.LENGTH]
    tables = state.block_tables[slots, :max_pages]
    pages = tables.gather(1, (length // page_size).clamp(max=max_pages - 1)[:, None]).squeeze(1).long()
    slot_mapping = torch.where(active, pages * page_size + length % page_size, 0)
    seq_lens = torch.where(active, length + 1, 0).to(torch.int32)
    return ints[:, IntColumn.TOKEN], ints[:, IntColumn.POSITION], slot_mapping, tables, seq_lens


@op(cuda="service.engine.chat.step_kernels:advance_states")
def advance_states(slots: Tensor, state: SlotState) -> tuple[Tensor, Tensor]:
    """The rows of recurrent state that the next step of the slots int64 [rows] reads and those that it writes, int64
    [rows]; commits them for the step after it. A state advances in place, but leaves its row at a multiple of
    STATE_INTERVAL tokens: the other row takes over, and SPARE then holds the state of the tokens before. Inactive slots
    have row 0."""
    ints = state.ints[slots]
    active, crossing = ints[:, IntColumn.ACTIVE] > 0, ints[:, IntColumn.LENGTH] % STATE_INTERVAL == 0
    rows = ints[:, IntColumn.STATE : IntColumn.SPARE + 1]
    following = torch.where((active & crossing)[:, None], rows.flip(1), rows)
    state.ints[:, IntColumn.STATE : IntColumn.SPARE + 1].index_copy_(0, slots, following)
    return torch.where(active, rows[:, 0], 0), torch.where(active, following[:, 0], 0)


def advance_pending(slots: Tensor, state: SlotState) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """advance_states with drafts, then rows of SlotState.pending and the number of their inputs that were accepted,
    int64 [rows]. The step advances the state in STATE by these inputs alone, and its own are pending then."""
    ints = state.ints[slots]
    active, length, stated = ints[:, IntColumn.ACTIVE] > 0, ints[:, IntColumn.LENGTH], ints[:, IntColumn.STATED]
    crossing = active & (length > stated) & (stated % STATE_INTERVAL == 0)
    rows = ints[:, IntColumn.STATE : IntColumn.SPARE + 1]
    following = torch.where(crossing[:, None], rows.flip(1), rows)
    stated_now = torch.where(active, length, stated)[:, None]
    columns = slice(IntColumn.STATE, IntColumn.STATED + 1)
    state.ints[:, columns].index_copy_(0, slots, torch.cat((following, stated_now), dim=1))
    read, write, pending = rows[:, 0], following[:, 0], length - stated
    return read * active, write * active, slots * active, pending * active


def state_rows(slots: Tensor, state: SlotState) -> StateRows | None:
    """Where the recurrent state of the slots' next step is; None for models without."""
    if not state.states:
        return None
    if not state.pending:
        return StateRows(state.states, *advance_states(slots, state))
    read, write, rows, counts = advance_pending(slots, state)
    return StateRows(state.states, read, write, inputs=state.pending, slots=rows, pending=counts)


@dataclass(frozen=True, eq=False)
class LayersStep:
    """The first half of a decode step: the decoder's layers over every slot's token. Bucket: rows, pages (of the
    longest sequence). Output: hidden [rows, hidden_size].

    With guided rows the hidden states stay in `held_hidden` [rows of the largest bucket, hidden_size] for the sampling,
    which is launched later, so there are no outputs to copy.
    """

    decoder: Decoder
    state: SlotState
    caches: Sequence[Mapping[str, Tensor]]
    page_size: int
    held_hidden: Tensor | None = None

    def buffer_specs(self, bucket: Bucket) -> dict[str, BufferSpec]:
        return {"slots": BufferSpec((bucket["rows"],), torch.int64)}

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        slots = buffers["slots"]
        tokens, positions, slot_mapping, tables, seq_lens = decode_rows(
            slots, self.state, bucket["pages"], self.page_size
        )
        states = state_rows(slots, self.state)
        batch = PagedBatch(self.caches, self.page_size, slot_mapping, tables, seq_lens, states=states)
        positions = positions[None].expand(self.decoder.position_axes, -1)
        hidden = self.decoder.forward(self.decoder.embed(tokens), positions, batch)
        if self.held_hidden is None:
            return {"hidden": hidden}
        self.held_hidden[: bucket["rows"]] = hidden
        return {}


@dataclass(frozen=True, eq=False)
class DecodeStep:
    """Every slot advances by one token. Bucket: as LayersStep. Output: that of Sampling."""

    layers: LayersStep
    sampling: Sampling

    def buffer_specs(self, bucket: Bucket) -> dict[str, BufferSpec]:
        return self.layers.buffer_specs(bucket)

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        return self.sampling(buffers["slots"], self.layers.forward(buffers, bucket)["hidden"])


@dataclass(frozen=True, eq=False)
class VerifyStep:
    """Every slot advances by one token and by the drafts that it accepts. Bucket: rows, pages, drafts.

    Output: "results" int32 [rows * (1 + drafts), 2] as of Sampling, slot by slot; behind the last token of a slot the
    second column is NOT_ACCEPTED or, where it had no draft, NOT_DRAFTED. The full variant adds "logits".
    """

    layers: LayersStep
    sampling: Sampling

    def buffer_specs(self, bucket: Bucket) -> dict[str, BufferSpec]:
        return self.layers.buffer_specs(bucket)

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        slots, state = buffers["slots"], self.layers.state
        drafts = look_up(slots, state, bucket["drafts"]) if state.history.shape[1] else state.drafts[slots]
        positions, batch, hidden = self._layers(slots, drafts, bucket["pages"])
        logits = self.layers.decoder.logits(hidden)[:, : self.sampling.vocab_limit]
        rows, drafted = drafted_state(slots, drafts, state, full=self.sampling.full)
        candidates = logits
        if self.sampling.full:
            candidates = apply_penalties_and_filters(logits.float(), rows, drafted)
        sampled = sample_tokens(candidates, rows, drafted)
        sampled = sampled.unflatten(0, (len(slots), -1)).long()
        results, count = accept(sampled, drafts, slots, state, full=self.sampling.full)
        if (drafting := self.sampling.drafting) is not None:
            embeddings = self.layers.decoder.embed(sampled[..., 0].flatten())
            predicted = drafting.drafter(hidden, embeddings, positions, batch).unflatten(0, sampled.shape[:2])
            drafting.draft(slots, predicted[torch.arange(len(slots), device=slots.device), count - 1], bucket["pages"])
        return {"results": results} | ({"logits": logits.float()} if self.sampling.full else {})

    def _layers(self, slots: Tensor, drafts: Tensor, max_pages: int) -> tuple[Tensor, PagedBatch, Tensor]:
        """The decoder over the slots' known tokens and drafts: positions [axes, n], the batch, and hidden states [n,
        hidden_size], n = rows * (1 + drafts)."""
        layers, state = self.layers, self.layers.state
        ints, size = state.ints[slots, :, None], layers.page_size
        width = 1 + drafts.shape[1]
        ahead = torch.arange(width, device=slots.device)
        active, length = ints[:, IntColumn.ACTIVE] > 0, ints[:, IntColumn.LENGTH]
        tables = state.block_tables[slots, :max_pages]
        places = length + ahead  # Where the answer's limit leaves them no page, the table has the scratch page.
        pages = tables.gather(1, (places // size).clamp(max=max_pages - 1)).long()
        batch = PagedBatch(
            layers.caches,
            size,
            torch.where(active, pages * size + places % size, 0).flatten(),
            cu_seqlens_q=width * torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device),
            prefill_tables=tables,
            prefill_lens=torch.where(active, length + width, 0).flatten().to(torch.int32),
            states=state_rows(slots, state),
        )
        tokens = torch.cat((ints[:, IntColumn.TOKEN], drafts.clamp(min=0)), dim=1).flatten()
        positions = (ints[:, IntColumn.POSITION] + ahead).flatten().expand(layers.decoder.position_axes, -1)
        return positions, batch, layers.decoder.forward(layers.decoder.embed(tokens), positions, batch)


@dataclass(frozen=True, eq=False)
class PrefillStep:
    """The layers over chunks of prompts. Bucket: tokens, sequences; for decoders with features of media rows
    (Decoder.feature_levels) also levels: their number, or 0 for text, which then does not pay for them. Output: hidden
    [tokens, hidden_size]. Padded rows write to the scratch page.

    cached: any mix of chunks, with cached context or without. Attention then reads the pages of the sequences through
    the block tables of their slots, which already hold the chunks' own pages. The lengths of the sequences are read on
    the device, so cached context is not a size of the bucket. Padded sequences have the scratch slot and no keys.
    Otherwise whole prompts or their first chunks, which attend to their own keys, packed.
    """

    layers: LayersStep
    dtype: torch.dtype
    cached: bool

    def buffer_specs(self, bucket: Bucket) -> dict[str, BufferSpec]:
        tokens, sequences, decoder = bucket["tokens"], bucket["sequences"], self.layers.decoder
        specs = {
            "hidden": BufferSpec((tokens, (1 + bucket.get("levels", 0)) * decoder.hidden_size), self.dtype),
            "positions": BufferSpec((tokens, decoder.position_axes), torch.int64),
            "slot_mapping": BufferSpec((tokens,), torch.int64),
            "cu_seqlens": BufferSpec((sequences + 1,), torch.int32),
        }
        if decoder.drafter is not None:
            specs["next_tokens"] = BufferSpec((tokens,), torch.int64)
        if self.layers.state.states:
            specs |= {name: BufferSpec((sequences,), torch.int64) for name in STATE_BUFFERS}
        if self.cached:
            specs["slots"] = BufferSpec((sequences,), torch.int64)
            specs["seq_lens"] = BufferSpec((sequences,), torch.int32)
        return specs

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        ends, layers = buffers["cu_seqlens"], self.layers
        batch = PagedBatch(
            layers.caches,
            layers.page_size,
            buffers["slot_mapping"],
            cu_seqlens_q=ends,
            cu_seqlens_k=None if self.cached else ends,
            prefill_tables=layers.state.block_tables[buffers["slots"]] if self.cached else None,
            prefill_lens=buffers["seq_lens"] if self.cached else None,
            states=chunk_states(buffers, layers.state.states),
        )
        return {"hidden": run_chunks(layers.decoder, buffers["hidden"], buffers["positions"].T, batch, buffers)}


def run_chunks(
    decoder: Decoder, hidden: Tensor, positions: Tensor, batch: PagedBatch, buffers: Mapping[str, Tensor]
) -> Tensor:
    """decoder.forward over chunks, and the drafter's keys. buffers: next_tokens int64 [n] for models with a drafter,
    the id behind each token, or -1 where that takes an embedding of media."""
    out = decoder.forward(hidden, positions, batch)
    if decoder.drafter is not None:
        following = buffers["next_tokens"]
        embeddings = torch.where((following < 0)[:, None], hidden.roll(-1, 0), decoder.embed(following.clamp(min=0)))
        decoder.drafter.cache_keys(out, embeddings, positions, batch)
    return out


def with_features(hidden: Tensor, width: int) -> Tensor:
    """Appends zeros, the features of text, to embeddings [n, hidden_size] -> rows [n, width] of a prefill."""
    return F.pad(hidden, (0, width - hidden.shape[1])) if width > hidden.shape[1] else hidden


def chunk_states(buffers: Mapping[str, Tensor], states: Sequence[Mapping[str, Tensor]]) -> StateRows | None:
    """Where the recurrent state of chunks is; None for models without."""
    if not states:
        return None
    read, write, snapshot_rows, snapshot_ends = (buffers[name] for name in STATE_BUFFERS)
    return StateRows(states, read, write, snapshot_rows, snapshot_ends)


@dataclass(frozen=True, eq=False)
class SampleStep:
    """Sampling for the prompts that end in a step of chunks. Bucket: rows. Output: that of Sampling."""

    sampling: Sampling
    dtype: torch.dtype

    def buffer_specs(self, bucket: Bucket) -> dict[str, BufferSpec]:
        rows, hidden_size = bucket["rows"], self.sampling.decoder.hidden_size
        return {"slots": BufferSpec((rows,), torch.int64), "hidden": BufferSpec((rows, hidden_size), self.dtype)}

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        return self.sampling(buffers["slots"], buffers["hidden"], draft=True)


@dataclass(frozen=True, eq=False)
class GuidedSampleStep:
    """Sampling for a batch with guided rows, whose hidden states are in `held_hidden`. When it is launched the layers
    may have ended, and the GPU is idle, so it must not wait for an upload: slots, mask rows and masks are copied to the
    slot state while the layers run (service.engine.chat.guided.guidance.MaskTable). Rows without a mask, and padding,
    use mask 0. Bucket: rows. Output: that of Sampling.
    """

    sampling: Sampling
    held_hidden: Tensor

    def buffer_specs(self, bucket: Bucket) -> dict[str, BufferSpec]:
        return {}

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        slots, mask_rows = self.sampling.state.sampled[:, : bucket["rows"]]
        return self.sampling(slots, self.held_hidden[: bucket["rows"]], mask_rows)
