"""Buckets: which of a list can hold a plan, and which of those is the cheapest.

The first name of a bucket ("patches", "rows") is its primary size: the time of a step grows with it, and occupancy and
padding are counted in it. Lists of buckets are sorted by the first size, then by the next.
"""

from __future__ import annotations

from collections.abc import Iterable

from models.interfaces.capturable import EXACT, Bucket

BucketKey = tuple[tuple[str, int], ...]

_SPAN = 16
_MIN_FILL = 0.95
"""Share of a dense bucket that must not be padding. Its attention computes padding, too; without any it takes
0.65 to 0.87 (heads of 72) or 0.80 to 0.96 (heads of 80) of the time of attention that skips padding
(benchmarks/results/kernels/attention_one_segment.json)."""


def key_of(bucket: Bucket) -> BucketKey:
    """Hashable form, names in the bucket's own order."""
    return tuple(bucket.items())


def cost_of(bucket: Bucket) -> tuple[int, ...]:
    """Sort key of buckets: the first size, then the next."""
    return tuple(bucket.values())


def primary_size(bucket: Bucket) -> str:
    """Name of the size that the time of a step grows with."""
    return next(iter(bucket))


def fits(offered: Bucket, needed: Bucket) -> bool:
    """Whether `offered` holds `needed`: both name the same sizes, and each is large enough, or equal if `offered` is
    EXACT."""
    exact = EXACT in offered
    return offered.keys() - {EXACT} == needed.keys() and all(
        size == offered[name] if exact else size <= offered[name] for name, size in needed.items()
    )


def fills(bucket: Bucket, needed: Bucket) -> bool:
    """Whether little of the bucket's primary size would be padding."""
    name = primary_size(bucket)
    return needed[name] >= _MIN_FILL * bucket[name]


def cheapest(bucket_list: Iterable[Bucket], needed: Bucket) -> Bucket | None:
    """The least costly bucket that holds `needed`."""
    return min((bucket for bucket in bucket_list if fits(bucket, needed)), key=cost_of, default=None)


def captured_first(before_ready: Iterable[Bucket], *, restarted: bool) -> list[Bucket]:
    """What to capture before the server is ready: `before_ready`, or after a restart only the smallest of it."""
    return sorted(before_ready, key=cost_of)[:1] if restarted else list(before_ready)


def spanning(bucket_list: Iterable[Bucket]) -> list[Bucket]:
    """A few of the buckets that together hold whatever any of them holds: the largest, and after each chosen one the
    next that is at most a sixteenth of it."""
    taken: list[Bucket] = []
    for bucket in sorted(bucket_list, key=cost_of, reverse=True):
        if not taken or (bucket[primary_size(bucket)] * _SPAN <= taken[-1][primary_size(bucket)]):
            taken.append(bucket)
    return taken


def powers_of_two(largest: int) -> list[int]:
    """1, 2, 4, ... and `largest`: sizes that exercise every kernel variant. A kernel that selects its tile by the
    number of rows uses each tile over a range of at least a factor of two (tests/models/kernels/test_variants.py)."""
    return [*(1 << power for power in range((largest - 1).bit_length())), largest]


def round_up(size: int) -> int:
    """`size` rounded up to one of four sizes per power of two, so that similar sizes are measured together."""
    step = 1 << max(0, size.bit_length() - 3)
    return -(-size // step) * step


def chosen_buckets(sizes: Iterable[int], largest: int) -> list[int]:
    """The batch sizes of a setting, cut to `largest`, since no batch has more rows."""
    return sorted({min(size, largest) for size in sizes})


def row_buckets(largest: int) -> list[int]:
    """Default batch sizes up to `largest`: every power of two up to 8, then steps of at most a third."""
    steps = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128]
    while steps[-1] < largest:
        steps.append(steps[-1] + 32)
    return [*(step for step in steps if step < largest), largest]
