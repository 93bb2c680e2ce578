"""Request slots: rows of the slot-state tensors, allocated at admission and released at the end."""

from __future__ import annotations

from collections import deque


class SlotPool:
    """Slots 1..num_slots; slot 0 is scratch, so state tensors have num_slots + 1 rows."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = deque(range(1, num_slots + 1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def allocate(self) -> int:
        return self._free.popleft()

    def release(self, slot: int) -> None:
        assert 0 < slot <= self.num_slots and slot not in self._free
        self._free.append(slot)
