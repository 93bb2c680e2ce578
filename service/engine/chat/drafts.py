"""Drafts (arXiv:2211.17192): a decode step computes each sequence's known token and drafts of the next ones, and
accepts drafts for as long as they equal what is sampled.

Every position is sampled with the random number, penalties and minimum length that it would have without drafts, so the
answers are the same, seeded ones too, up to rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from models.interfaces.capturable import Bucket, BufferSpec
from models.layers.kv_cache import STATE_INTERVAL, PagedBatch
from service.engine.chat.costs import ChatCosts
from service.engine.chat.sampler import apply_penalties_and_filters
from service.engine.chat.slot_state import IntColumn, SlotState
from service.engine.chat.steps import LayersStep, Sampling, sample_tokens, state_rows

MAX_ROWS = 32
"""Batches of more rows are not drafted for: their steps compute long enough that further rows cost time."""
NGRAM = 3
"""Prompt lookup drafts what followed the last occurrence of so many last tokens."""
NOT_ACCEPTED, NOT_DRAFTED = 2, 3
"""Second column of results, beside those of Sampling: positions that got no token."""


def look_up(slots: Tensor, state: SlotState, count: int) -> Tensor:
    """Drafts int64 [rows, count] for the slots int64 [rows], by prompt lookup in SlotState.history; -1 for none."""
    history, length = state.history[slots], state.ints[slots, IntColumn.LENGTH, None]
    places = torch.arange(history.shape[1], device=slots.device)
    last = history.gather(1, (length - places[:NGRAM]).clamp(min=0))
    found = (places >= NGRAM - 1) & (places < length)
    for back in range(NGRAM):
        found &= history.roll(back, dims=1) == last[:, back, None]
    end = torch.where(found, places, -1).amax(dim=1, keepdim=True)
    # Behind the last token the text goes on as it did since the occurrence.
    drafts = history.gather(1, end + 1 + places[:count] % (length - end).clamp(min=1))
    return torch.where(end >= 0, drafts, -1).long()


@dataclass(frozen=True, eq=False)
class VerifyStep:
    """Every slot advances by one token and by the drafts that it accepts. Bucket: rows, pages, drafts.

    Output: "results" int32 [rows * (1 + drafts), 2] as of Sampling, slot by slot; behind the last token of a slot the
    second column is NOT_ACCEPTED or, where it had no draft, NOT_DRAFTED. The full variant adds "logits".
    """

    layers: LayersStep
    sampling: Sampling

    @property
    def name(self) -> str:
        return "verify_full" if self.sampling.full else "verify"

    def buffer_specs(self, bucket: Bucket) -> dict[str, BufferSpec]:
        return self.layers.buffer_specs(bucket)

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        slots, state = buffers["slots"], self.layers.state
        drafts = look_up(slots, state, bucket["drafts"])
        logits = self._logits(slots, drafts, bucket["pages"])
        rows, drafted = _drafted_state(slots, drafts, state, full=self.sampling.full)
        candidates = logits
        if self.sampling.full:
            candidates = apply_penalties_and_filters(logits.float(), rows, drafted)
        sampled = sample_tokens(candidates, rows, drafted)
        results = accept(sampled.unflatten(0, (len(slots), -1)).long(), drafts, slots, state, full=self.sampling.full)
        return {"results": results} | ({"logits": logits.float()} if self.sampling.full else {})

    def _logits(self, slots: Tensor, drafts: Tensor, max_pages: int) -> Tensor:
        """Logits [rows * (1 + drafts), vocabulary] of the slots' known tokens and drafts."""
        layers, state = self.layers, self.layers.state
        ints, size = state.ints[slots, :, None], layers.page_size
        width = 1 + drafts.shape[1]
        ahead = torch.arange(width, device=slots.device)
        active, length = ints[:, IntColumn.ACTIVE] > 0, ints[:, IntColumn.LENGTH]
        tables = state.block_tables[slots, :max_pages]
        places = length + ahead
        pages = tables.gather(1, (places // size).clamp(max=max_pages - 1)).long()
        # Behind the limit there may be no page.
        kept = active & (ints[:, IntColumn.GENERATED] + ahead < ints[:, IntColumn.LIMIT])
        batch = PagedBatch.of_chunks(
            layers.caches,
            size,
            torch.where(kept, pages * size + places % size, 0).flatten(),
            width * torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device),
            tables,
            torch.where(active, length + width, 0).flatten().to(torch.int32),
            state_rows(slots, state),
        )
        tokens = torch.cat((ints[:, IntColumn.TOKEN], drafts.clamp(min=0)), dim=1).flatten()
        positions = (ints[:, IntColumn.POSITION] + ahead).flatten().expand(layers.decoder.position_axes, -1)
        hidden = layers.decoder.forward(layers.decoder.embed(tokens), positions, batch)
        return layers.decoder.logits(hidden)[:, : self.sampling.vocab_limit]


def _drafted_state(slots: Tensor, drafts: Tensor, state: SlotState, *, full: bool) -> tuple[Tensor, SlotState]:
    """Rows of a state of its own for each slot and each position: that of the slot once the drafts before were
    accepted. full: with the tables of penalties."""
    width = 1 + drafts.shape[1]
    each = slots.repeat_interleave(width)
    drafted = copy.copy(state)
    drafted.ints, drafted.floats, drafted.stop_ids = state.ints[each], state.floats[each], state.stop_ids[each]
    drafted.ints[:, IntColumn.GENERATED] += torch.arange(width, device=slots.device).repeat(len(slots))
    if full:
        drafted.bias_ids, drafted.bias_values = state.bias_ids[each], state.bias_values[each]
        drafted.prompt_seen = state.prompt_seen[each]
        counts = state.output_counts[slots, None].repeat(1, width, 1)
        for place, draft in enumerate(drafts.clamp(min=0).unbind(1), 1):
            later = draft[:, None, None].expand(-1, width - place, 1)
            counts[:, place:].scatter_add_(2, later, torch.ones_like(later, dtype=counts.dtype))
        drafted.output_counts = counts.flatten(0, 1)
    return torch.arange(len(each), device=slots.device), drafted


def accept(sampled: Tensor, drafts: Tensor, slots: Tensor, state: SlotState, *, full: bool) -> Tensor:
    """Commits what was sampled at the known token and at each draft, int64 [rows, 1 + drafts, 2] as of Sampling, up to
    the first draft that differs, the first stop, the limit, and with recurrent state a multiple of STATE_INTERVAL ->
    the results of VerifyStep."""
    ints = state.ints[slots]
    tokens, stops = sampled.unbind(-1)
    ahead = torch.arange(tokens.shape[1], device=slots.device)
    active, length = ints[:, IntColumn.ACTIVE], ints[:, IntColumn.LENGTH]
    accepted = (tokens[:, :-1] == drafts) & (stops[:, :-1] == 0)
    count = 1 + accepted.cumprod(dim=1).sum(dim=1)
    count = torch.minimum(count, ints[:, IntColumn.LIMIT] - ints[:, IntColumn.GENERATED])
    if state.states:
        count = torch.minimum(count, STATE_INTERVAL - length % STATE_INTERVAL)
    count = count * active
    last = (count - 1).clamp(min=0)[:, None]
    following = ints.clone()
    following[:, IntColumn.TOKEN] = torch.where(active > 0, tokens.gather(1, last).squeeze(1), ints[:, IntColumn.TOKEN])
    for column in (IntColumn.LENGTH, IntColumn.POSITION, IntColumn.GENERATED):
        following[:, column] += count
    goes_on = (stops.gather(1, last).squeeze(1) == 0) & (following[:, IntColumn.GENERATED] < ints[:, IntColumn.LIMIT])
    following[:, IntColumn.ACTIVE] = active * goes_on
    state.ints.index_copy_(0, slots, following)
    new = ahead < count[:, None]
    if full:
        for token, is_new in zip(tokens.unbind(1), new.unbind(1), strict=True):
            state.output_counts.index_put_((slots, token), state.output_counts[slots, token] + is_new.int())
    if state.history.shape[1]:
        state.history.index_put_((slots[:, None], length[:, None] + 1 + ahead), tokens.to(torch.int32))
    had_draft = torch.cat((torch.ones_like(drafts[:, :1]), drafts), dim=1) >= 0
    stops = torch.where(new, stops, torch.where(had_draft, NOT_ACCEPTED, NOT_DRAFTED))
    return torch.stack((tokens, stops), dim=-1).flatten(0, 1).to(torch.int32)


_WEIGHT = 0.1
_PROBE = 64
"""Steps without drafts after which a step has some again, to learn whether they pay now."""
_USUAL_COST = 1.25
"""Seconds of a step with drafts relative to one without, until both were measured."""


class DraftLength:
    """How many drafts a step verifies: all or none, by the tokens that they brought and the seconds that they cost."""

    def __init__(self, most: int) -> None:
        """most: 0 for no drafts at all."""
        self._most = most
        self._accepted = float(most)
        """Running mean of accepted drafts of a row."""
        self._steps_without = 0

    def choose(self, rows: int, costs: ChatCosts) -> int:
        """For a step of decode rows alone."""
        if not self._most or not 0 < rows <= MAX_ROWS:
            return 0
        plain, verify = costs.mean("decode", rows), costs.mean("verify", rows)
        ratio = verify / plain if plain and verify else _USUAL_COST
        self._steps_without = 0 if 1 + self._accepted > ratio else self._steps_without + 1
        return 0 if self._steps_without % _PROBE else self._most

    def observe(self, accepted: int) -> None:
        """accepted: drafts of a row of a step."""
        self._accepted += _WEIGHT * (accepted - self._accepted)
