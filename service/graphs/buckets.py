"""Capacities: which bucket holds a plan, and which of those that do costs least.

The names of a ladder's capacities are in order of cost: the first ("patches", "rows") is what a step's time grows
with, and what occupancy and padding are counted in.
"""

from __future__ import annotations

from collections.abc import Iterable

from models.protocol import Capacity

CapacityKey = tuple[tuple[str, int], ...]


def key_of(capacity: Capacity) -> CapacityKey:
    """Hashable form, names in the capacity's own order."""
    return tuple(capacity.items())


def cost_of(capacity: Capacity) -> tuple[int, ...]:
    """Orders capacities of one ladder: by their first size, then by the next."""
    return tuple(capacity.values())


def leading(capacity: Capacity) -> str:
    """The name of the size that a step's time grows with."""
    return next(iter(capacity))


def shortfall(offered: Capacity, needed: Capacity) -> str | None:
    """What `offered` lacks to hold `needed`, in words; None when it fits. Both must name the same sizes."""
    if offered.keys() != needed.keys():
        return f"sizes {sorted(offered)} are offered and {sorted(needed)} are needed"
    for name, size in needed.items():
        if size > offered[name]:
            return f"{name} {size} is over {offered[name]}"
    return None


def fits(offered: Capacity, needed: Capacity) -> bool:
    return shortfall(offered, needed) is None


def cheapest(ladder: Iterable[Capacity], needed: Capacity) -> Capacity | None:
    """The least costly capacity that holds `needed`."""
    return min((capacity for capacity in ladder if fits(capacity, needed)), key=cost_of, default=None)


def octaves(largest: int) -> list[int]:
    """1, 2, 4, ... and `largest`: sizes that meet every kernel variant. A kernel that chooses its tile by the number of
    rows keeps a choice from some size to twice that size at least (tests/models/kernels/test_variants.py)."""
    return [*(1 << power for power in range((largest - 1).bit_length())), largest]


def row_ladder(largest: int) -> list[int]:
    """Default batch sizes up to `largest`: every power of two to 8, then steps of at most a third."""
    steps = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128]
    while steps[-1] < largest:
        steps.append(steps[-1] + 32)
    return [*(step for step in steps if step < largest), largest]
