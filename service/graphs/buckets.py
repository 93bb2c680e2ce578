"""Buckets: which of a list can hold a plan, which of those is the cheapest, and how items are packed into them.

The first name of a bucket ("patches", "rows") is its primary size: the time of a step grows with it, and occupancy and
padding are counted in it. Lists of buckets are sorted by the first size, then by the next.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import le

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


# Packing of items into buckets with the least padding. First fit is tried into every bucket, and the cheapest grouping
# is used: greedy packing into the largest bucket alone would pay for padding that two smaller buckets do not have.
#
# An engine packs before every encoder pass, in a burst 32 items at a time. So what is tried for each item only compares
# tuples, and only with groups that have room left.

Size = tuple[int, ...]
"""Sizes of a bucket in the order of its names. The first is the primary size, which adds up."""

LAUNCH_COST = 256
"""Fixed cost of a replay, in patches. The GEMMs of an encoder layer take 34 / 68 / 239 us for 256 / 1024 / 4096 patches
on an H100: a fixed part of 10 to 20 us and 0.05 us a patch."""


@dataclass(frozen=True)
class Group:
    """Items (by index) that run together in `bucket`, or eagerly where no bucket holds them."""

    items: tuple[int, ...]
    bucket: Bucket | None


def combine(sizes: Iterable[Bucket]) -> dict[str, int]:
    """The bucket that several items need together: sizes add up, those named max_... are maxima."""
    total: dict[str, int] = {}
    for size in sizes:
        for name, value in size.items():
            known = total.get(name, 0)
            total[name] = max(known, value) if name.startswith("max_") else known + value
    return total


@dataclass(eq=False)
class _Open:
    """A group that is being filled: what it needs by now, and the bucket that it may fill."""

    items: list[int]
    size: Size
    bucket: Size


class _SortedBuckets:
    """The buckets by their sizes as tuples, in order of their cost."""

    def __init__(self, bucket_list: Sequence[Bucket]) -> None:
        self.by_size = {cost_of(bucket): bucket for bucket in sorted(bucket_list, key=cost_of)}
        self._names = tuple(next(iter(self.by_size.values()), ()))
        self._primaries = [size[0] for size in self.by_size]
        self._maxima = [name.startswith("max_") for name in self._names]
        self._cheapest: dict[Size, Size | None] = {}

    def size(self, required: Bucket) -> Size | None:
        """None if it names other sizes than the buckets."""
        if required.keys() != set(self._names):
            return None
        return tuple(required[name] for name in self._names)

    def together(self, first: Size, second: Size) -> Size:
        """Like `combine`, for tuples of sizes."""
        return tuple([max(a, b) if most else a + b for a, b, most in zip(first, second, self._maxima, strict=True)])

    def cheapest(self, size: Size) -> Size | None:
        """The least costly bucket that holds `size`. The groupings that are tried have many groups in common."""
        if size not in self._cheapest:
            larger = islice(self.by_size, bisect_left(self._primaries, size[0]), None)
            self._cheapest[size] = next((bucket for bucket in larger if _holds(bucket, size)), None)
        return self._cheapest[size]


def _holds(limit: Size, size: Size) -> bool:
    return all(map(le, size, limit))


def pack(sizes: Sequence[Bucket], bucket_list: Sequence[Bucket]) -> list[Group]:
    """Groups that hold every item once, the group of item 0 first. An item that no bucket holds is alone."""
    buckets = _SortedBuckets(bucket_list)
    known = {index: size for index, required in enumerate(sizes) if (size := buckets.size(required)) is not None}
    own = {index: bucket for index, size in known.items() if (bucket := buckets.cheapest(size)) is not None}
    order = sorted(own, key=lambda index: known[index], reverse=True)
    # A single item, the usual case, can be grouped in one way only.
    targets = islice(buckets.by_size, None if len(order) > 1 else 1)
    groupings = [_first_fit(order, known, own, buckets, target) for target in targets]
    best = min(groupings, key=lambda groups: sum(LAUNCH_COST + group.bucket[0] for group in groups), default=[])
    groups = [Group(tuple(sorted(group.items)), buckets.by_size[group.bucket]) for group in best]
    groups += [Group((index,), None) for index in range(len(sizes)) if index not in own]
    return sorted(groups, key=lambda group: min(group.items))


def _first_fit(
    order: Sequence[int], sizes: Mapping[int, Size], own: Mapping[int, Size], buckets: _SortedBuckets, target: Size
) -> list[_Open]:
    """First fit into groups of at most `target`; a larger item opens a group of `own`, the bucket that holds it."""
    groups: list[_Open] = []
    for index in order:
        size = sizes[index]
        for group in groups:
            # The primary size alone rules out most groups.
            if group.size[0] + size[0] > group.bucket[0]:
                continue
            together = buckets.together(group.size, size)
            if _holds(group.bucket, together):
                group.items.append(index)
                group.size = together
                break
        else:
            groups.append(_Open([index], size, target if _holds(target, size) else own[index]))
    for group in groups:
        group.bucket = buckets.cheapest(group.size) or group.bucket
    return groups
