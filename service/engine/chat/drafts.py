"""Drafts (arXiv:2211.17192): a decode step computes each sequence's known token and drafts of the next ones, and
accepts drafts for as long as they equal what is sampled.

Every position is sampled with the random number, penalties and minimum length that it would have without drafts, so the
answers are the same, seeded ones too, up to rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.layers.kv_cache import STATE_INTERVAL, PagedBatch
from models.protocol import Decoder, Drafter
from service.engine.chat.pacing import ChatCosts
from service.engine.chat.slot_state import IntColumn, SlotState

MAX_ROWS = 32
"""Batches of more rows are not drafted for: their steps compute long enough that further rows cost time."""
NGRAM = 3
"""Prompt lookup drafts what followed the last occurrence of so many last tokens."""
SEARCHED = 32_768
"""The last positions, in which prompt lookup finds them: its time must not grow with the longest context."""
NOT_ACCEPTED, NOT_DRAFTED = 2, 3
"""Second column of results, beside those of Sampling: positions that got no token."""


def look_up(slots: Tensor, state: SlotState, count: int) -> Tensor:
    """Drafts int64 [rows, count] for the slots int64 [rows], by prompt lookup in SlotState.history; -1 for none."""
    length, width = state.ints[slots, IntColumn.LENGTH, None], min(state.history.shape[1], SEARCHED)
    places = torch.arange(width, device=slots.device)
    first = (length + 1 - width).clamp(min=0)
    history, length = state.history[slots[:, None], first + places], length - first
    last = history.gather(1, (length - places[:NGRAM]).clamp(min=0))
    found = (places >= NGRAM - 1) & (places < length)
    for back in range(NGRAM):
        found &= history.roll(back, dims=1) == last[:, back, None]
    end = torch.where(found, places, -1).amax(dim=1, keepdim=True)
    # Behind the last token the text goes on as it did since the occurrence.
    drafts = history.gather(1, end + 1 + places[:count] % (length - end).clamp(min=1))
    return torch.where(end >= 0, drafts, -1).long()


@dataclass(frozen=True, eq=False)
class Drafting:
    """Drafts by a model's own drafter, made behind a step for the next one: SlotState.drafts."""

    decoder: Decoder
    state: SlotState
    caches: Sequence[Mapping[str, Tensor]]
    page_size: int
    vocab_limit: int

    def draft(self, slots: Tensor, predicted: Tensor, max_pages: int) -> None:
        """predicted [rows, hidden_size]: the drafter's output for the token before TOKEN of the slots int64 [rows]."""
        drafts: list[Tensor] = []
        for ahead in range(self.state.drafts.shape[1]):
            if drafts:
                positions, batch = self._rows(slots, ahead - 1, max_pages)
                predicted = self.drafter(predicted, self.decoder.embed(drafts[-1]), positions, batch)
            drafts.append(self.decoder.logits(predicted)[:, : self.vocab_limit].argmax(dim=-1))
        self.state.drafts.index_copy_(0, slots, torch.stack(drafts, dim=1))

    def after(self, slots: Tensor, hidden: Tensor, *, draft: bool) -> None:
        """hidden [rows, hidden_size]: what the slots int64 [rows] have just sampled TOKEN from. draft: False only
        writes the drafter's keys."""
        max_pages = self.state.block_tables.shape[1]
        positions, batch = self._rows(slots, -1, max_pages)
        embeddings = self.decoder.embed(self.state.ints[slots, IntColumn.TOKEN])
        if draft:
            self.draft(slots, self.drafter(hidden, embeddings, positions, batch), max_pages)
        else:
            self.drafter.cache_keys(hidden, embeddings, positions, batch)
            self.state.drafts.index_fill_(0, slots, -1)

    @property
    def drafter(self) -> Drafter:
        assert self.decoder.drafter is not None
        return self.decoder.drafter

    def _rows(self, slots: Tensor, ahead: int, max_pages: int) -> tuple[Tensor, PagedBatch]:
        """Rotary positions [axes, rows] and the batch of one token of each slot, `ahead` positions behind TOKEN."""
        ints, size = self.state.ints[slots], self.page_size
        tables = self.state.block_tables[slots, :max_pages]
        place = ints[:, IntColumn.LENGTH] + ahead
        active = ints[:, IntColumn.ACTIVE] > 0
        pages = tables.gather(1, (place // size).clamp(0, max_pages - 1)[:, None]).squeeze(1).long()
        slot_mapping = torch.where(active, pages * size + place % size, 0)
        seq_lens = torch.where(active, place + 1, 0).to(torch.int32)
        batch = PagedBatch(self.caches, size, slot_mapping, tables, seq_lens)
        return (ints[:, IntColumn.POSITION] + ahead).expand(self.decoder.position_axes, -1), batch


def drafted_state(slots: Tensor, drafts: Tensor, state: SlotState, *, full: bool) -> tuple[Tensor, SlotState]:
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


def accept(sampled: Tensor, drafts: Tensor, slots: Tensor, state: SlotState, *, full: bool) -> tuple[Tensor, Tensor]:
    """Commits what was sampled at the known token and at each draft, int64 [rows, 1 + drafts, 2] as of Sampling, up to
    the first draft that differs, the first stop, the limit, and with recurrent state a multiple of STATE_INTERVAL ->
    the results of VerifyStep, and the number of tokens int64 [rows], 0 for inactive slots."""
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
    return torch.stack((tokens, stops), dim=-1).flatten(0, 1).to(torch.int32), count


_WEIGHT = 0.1
_PROBE, _PROBE_STEPS = 64, 4
"""Where drafts do not pay, so many of so many steps have some, to learn whether they pay now."""
_PLAIN = 256
"""Where they pay, one of so many steps has none, to learn what such a step costs now."""
_USUAL_COST = 1.25
"""Seconds of a step with drafts relative to one without, until both were measured."""


class DraftLength:
    """How many drafts a step verifies: all or none, by the tokens that they brought and the seconds that they cost."""

    def __init__(self, most: int) -> None:
        """most: 0 for no drafts at all."""
        self._most = most
        self._accepted = float(most)
        """Running mean of accepted drafts of a row."""
        self._steps_without = self._steps_with = 0
        """Steps since they paid, and since they did not."""

    def choose(self, rows: int, costs: ChatCosts) -> int:
        """For a step of so many decode rows."""
        if not self._most or not 0 < rows <= MAX_ROWS:
            return 0
        plain, verify = costs.mean("decode", rows), costs.mean("verify", rows)
        ratio = verify / plain if plain and verify else _USUAL_COST
        if 1 + self._accepted > ratio:
            self._steps_without, self._steps_with = 0, self._steps_with + 1
            return self._most if self._steps_with % _PLAIN else 0
        self._steps_without, self._steps_with = self._steps_without + 1, 0
        return self._most if self._steps_without % _PROBE < _PROBE_STEPS else 0

    def observe(self, accepted: int) -> None:
        """accepted: drafts of a row of a step."""
        self._accepted += _WEIGHT * (accepted - self._accepted)
