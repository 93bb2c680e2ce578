"""The sequences that decode, and how many keys and tokens each of them has left."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from service.engine.chat.scheduler_output import sampler_needs
from service.engine.chat.sequence import ChatSequence


@dataclass
class DecodeRows:
    """The sequences that decode, one token per step. Their counters are arrays int64 [num_slots + 1] by request slot,
    so that a step without changes needs no loop over rows.

    num_keys: positions whose keys launched steps have written.
    capacity: positions that the allocated pages hold.
    remaining: tokens that may still be launched.
    slots, sequences, needs: those of a Step. A change replaces them, since launched steps still hold the old ones.
    """

    num_slots: int
    page_size: int
    members: dict[int, ChatSequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_keys = np.zeros(self.num_slots + 1, dtype=np.int64)
        self.capacity = np.zeros(self.num_slots + 1, dtype=np.int64)
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
        self.remaining[slot] = sequence.max_new_tokens - len(sequence.generated) - 1
        if self.remaining[slot]:
            self.members[slot] = sequence
            self._refresh()

    def remove(self, sequence: ChatSequence) -> None:
        if self.members.pop(sequence.slot, None) is not None:
            self._refresh()

    def advance(self) -> None:
        """One step was launched; rows that reach their length cap leave."""
        self.num_keys[self.slots] += 1
        self.remaining[self.slots] -= 1
        if not self.remaining[self.slots].all():
            self.members = {slot: sequence for slot, sequence in self.members.items() if self.remaining[slot]}
            self._refresh()
