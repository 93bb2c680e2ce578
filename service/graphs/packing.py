"""Packs the items of all waiting requests into buckets with the least padding.

First fit is tried into every bucket, and the cheapest grouping is used: greedy packing into the largest bucket alone
would pay for padding that two smaller buckets do not have.

An engine packs before every encoder pass, in a burst 32 items at a time. So what is tried for each item only compares
tuples, and only with groups that have room left.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import le

from models.interfaces.capturable import Bucket
from service.graphs.buckets import cost_of

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
