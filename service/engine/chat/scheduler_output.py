"""What the scheduler decides and the runner launches: a step with its decode rows and prefill chunks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from service.engine.chat.sequence import ChatSequence


@dataclass
class DecodeRows:
    """The sequences that decode. Their counters are arrays int64 [num_slots + 1] by request slot, so that a step
    without changes needs no loop over rows.

    num_keys: positions whose keys launched steps have written; all drafts count until their step has been read.
    capacity: positions that the allocated pages hold.
    limit: positions that the longest answer fills.
    remaining: tokens that may still be launched; of drafts only those count that are known to be accepted.
    slots, sequences, needs: those of a Step. A change replaces them, since launched steps still hold the old ones.
    """

    num_slots: int
    page_size: int
    keys_ahead: int = 0
    """Positions behind the keys of a step to which its drafter writes."""
    members: dict[int, ChatSequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_keys = np.zeros(self.num_slots + 1, dtype=np.int64)
        self.capacity = np.zeros(self.num_slots + 1, dtype=np.int64)
        self.limit = np.zeros(self.num_slots + 1, dtype=np.int64)
        self.remaining = np.zeros(self.num_slots + 1, dtype=np.int64)
        self._refresh()

    def _refresh(self) -> None:
        self.slots = np.fromiter(self.members, dtype=np.int64, count=len(self.members))
        self.sequences = tuple(self.members.values())
        self.needs = sampler_needs(self.sequences)

    def add(self, sequence: ChatSequence) -> None:
        """Adds a sequence whose prefill was launched; its first token has not been read yet."""
        slot = sequence.slot
        self.num_keys[slot] = sequence.num_tokens
        self.capacity[slot] = len(sequence.pages) * self.page_size
        self.limit[slot] = sequence.num_prompt_tokens + sequence.max_new_tokens - 1
        self.remaining[slot] = sequence.max_new_tokens - len(sequence.generated) - 1
        if self.remaining[slot]:
            self.members[slot] = sequence
            self._refresh()

    def remove(self, sequence: ChatSequence) -> None:
        if self.members.pop(sequence.slot, None) is not None:
            self._refresh()

    def next_keys(self, drafts: int) -> np.ndarray:
        """Positions of each row that a step with so many drafts may read or write, int64 [rows]; those behind the limit
        need no page."""
        return np.minimum(self.num_keys[self.slots], self.limit[self.slots]) + 1 + drafts + self.keys_ahead

    def advance(self, drafts: int) -> None:
        """One step was launched; rows that reach their length cap leave."""
        self.num_keys[self.slots] += 1 + drafts
        self.remaining[self.slots] -= 1
        self.leave()

    def settle(self, slot: int, drafts: int, accepted: int) -> None:
        """A step with drafts was read. Call `leave` after the last row."""
        self.num_keys[slot] -= drafts - accepted
        self.remaining[slot] -= accepted

    def leave(self) -> None:
        """Rows that have reached their length cap leave."""
        if (self.remaining[self.slots] <= 0).any():
            self.members = {slot: sequence for slot, sequence in self.members.items() if self.remaining[slot] > 0}
            self._refresh()


@dataclass(frozen=True)
class Chunk:
    """Known tokens [start, end) of a sequence, to be computed in one step. After the last chunk a token is sampled."""

    sequence: ChatSequence
    start: int
    end: int
    is_last: bool
    snapshot_end: int = 0
    """Position of which the chunk leaves a snapshot of the state, in ChatSequence.snapshot_row; 0: none."""

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class BlockAllocation:
    """Page `page` becomes entry `index` of the slot's block table."""

    slot: int
    index: int
    page: int


class SamplerNeeds(NamedTuple):
    """What the sampling of a step's rows needs."""

    full: bool
    """Whether any row has penalties or filters."""
    logprobs: int | None
    """The largest number of alternatives that a row has to report; None if no row reports log probabilities."""
    guided: bool
    """Whether any row has a grammar, and so needs a mask."""
    hidden: bool = False
    """Whether rows report their hidden vectors: all of an embedding model, whose requests end with their prefill."""


@dataclass(frozen=True, eq=False)
class Step:
    """One batch: decode rows first, then prefill chunks."""

    slots: np.ndarray
    """Request slots of the decode rows, int64 [rows]."""
    sequences: tuple[ChatSequence, ...]
    """Sequences of the decode rows, in the order of `slots`."""
    num_pages: int
    """Block table entries that the longest decode row uses."""
    chunks: tuple[Chunk, ...]
    allocations: tuple[BlockAllocation, ...]
    """Pages that decode rows got for this step; their block tables are written before it runs."""
    needs: SamplerNeeds
    drafts: int = 0
    """Drafts of each decode row; the step then has no chunks, and no guided rows."""

    @property
    def sampled(self) -> tuple[ChatSequence, ...]:
        """The sequences that get a token, in the order of the results."""
        if not self.chunks:
            return self.sequences
        return (*self.sequences, *(chunk.sequence for chunk in self.chunks if chunk.is_last))


def sampler_needs(sequences: tuple[ChatSequence, ...]) -> SamplerNeeds:
    asked = [s.sampling.logprobs for s in sequences if s.sampling.logprobs is not None]
    return SamplerNeeds(
        full=any(s.needs_penalties_or_filters for s in sequences),
        logprobs=max(asked, default=None),
        guided=any(s.guide is not None for s in sequences),
        hidden=any(s.sampling.hidden for s in sequences),
    )
