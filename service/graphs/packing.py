"""Packs the items of all waiting requests into buckets with the least padding.

Several groupings are tried (first fit into every bucket, even splits) and the cheapest is used: greedy packing into the
largest bucket alone would pay for padding that two smaller buckets do not have.

An engine packs before every encoder pass, in a burst 32 items at a time. So what is tried for each item only compares
tuples, and only with groups that have room left.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import le

from models.interfaces.capturable import Bucket
from service.graphs.buckets import cost_of

Size = tuple[int, ...]
"""Sizes of a bucket in the order of its names. The first is the primary size, which adds up."""

LAUNCH_COST = 256
"""Fixed cost of a replay, in patches. The GEMMs of an encoder layer take 34 / 68 / 239 us for 256 / 1024 / 4096 patches
on an H100: a fixed part of 10 to 20 us and 0.05 us a patch."""
_MAX_EVEN_GROUPS = 4
"""Largest number of groups of an even split; first fit into a small bucket finds finer ones."""


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
    """A group that is being filled, and the bucket that it needs."""

    items: list[int]
    size: Size


class _SortedBuckets:
    """The buckets in order of their cost, with sizes as tuples in the order of their names."""

    def __init__(self, bucket_list: Sequence[Bucket]) -> None:
        self.buckets = sorted(bucket_list, key=cost_of)
        self.limits = [cost_of(bucket) for bucket in self.buckets]
        self._names = tuple(self.buckets[0]) if self.buckets else ()
        self._primaries = [limit[0] for limit in self.limits]
        self._maxima = [name.startswith("max_") for name in self._names]
        self._cheapest: dict[Size, int | None] = {}

    def size(self, required: Bucket) -> Size | None:
        """None if it names other sizes than the buckets."""
        if required.keys() != set(self._names):
            return None
        return tuple(required[name] for name in self._names)

    def together(self, first: Size, second: Size) -> Size:
        """Like `combine`, for tuples of sizes."""
        return tuple([max(a, b) if most else a + b for a, b, most in zip(first, second, self._maxima, strict=True)])

    def cheapest(self, size: Size) -> int | None:
        """Index of the least costly bucket that holds `size`. The groupings that are tried have many groups in
        common."""
        if size not in self._cheapest:
            larger = range(bisect_left(self._primaries, size[0]), len(self.limits))
            self._cheapest[size] = next((index for index in larger if _holds(self.limits[index], size)), None)
        return self._cheapest[size]

    def bucket(self, size: Size) -> Bucket | None:
        index = self.cheapest(size)
        return None if index is None else self.buckets[index]

    def cost(self, size: Size) -> float:
        """Infinite if no bucket holds the group, although each of its items alone has one."""
        index = self.cheapest(size)
        return math.inf if index is None else LAUNCH_COST + self._primaries[index]


def _holds(limit: Size, size: Size) -> bool:
    return all(map(le, size, limit))


def pack(sizes: Sequence[Bucket], bucket_list: Sequence[Bucket]) -> list[Group]:
    """Groups that hold every item once, the group of item 0 first. An item that no bucket holds is alone."""
    buckets = _SortedBuckets(bucket_list)
    known = {index: size for index, required in enumerate(sizes) if (size := buckets.size(required)) is not None}
    own = {index: bucket for index, size in known.items() if (bucket := buckets.cheapest(size)) is not None}
    order = sorted(own, key=lambda index: known[index], reverse=True)
    # One item, the usual case, can be grouped in one way only.
    targets = range(len(buckets.limits) if len(order) > 1 else 0)
    groupings = [_first_fit(order, known, own, buckets, target) for target in targets]
    most = min(len(order), _MAX_EVEN_GROUPS)
    groupings += [_split_evenly(order, known, buckets, count) for count in range(1, most + 1)]
    best = min(groupings, key=lambda groups: sum(buckets.cost(group.size) for group in groups), default=[])
    groups = [Group(tuple(sorted(group.items)), buckets.bucket(group.size)) for group in best]
    groups += [Group((index,), None) for index in range(len(sizes)) if index not in own]
    return sorted(groups, key=lambda group: min(group.items))


def _first_fit(
    order: Sequence[int], sizes: Mapping[int, Size], own: Mapping[int, int], buckets: _SortedBuckets, target: int
) -> list[_Open]:
    """First fit into groups of at most bucket `target`; a larger item opens a group of `own`, the bucket that holds
    it."""
    groups: list[_Open] = []
    limits: list[Size] = []
    left: list[int] = []
    """Room left in the primary size, which alone rules out most groups."""
    for index in order:
        size = sizes[index]
        primary = size[0]
        for place, room in enumerate(left):
            if room < primary:
                continue
            together = buckets.together(groups[place].size, size)
            if _holds(limits[place], together):
                groups[place].items.append(index)
                groups[place].size = together
                left[place] -= primary
                break
        else:
            limit = buckets.limits[target]
            limit = limit if _holds(limit, size) else buckets.limits[own[index]]
            groups.append(_Open([index], size))
            limits.append(limit)
            left.append(limit[0] - primary)
    return groups


def _split_evenly(order: Sequence[int], sizes: Mapping[int, Size], buckets: _SortedBuckets, count: int) -> list[_Open]:
    """Into `count` groups of about equal primary size, largest items first."""
    groups: list[_Open] = [_Open([index], sizes[index]) for index in order[:count]]
    for index in order[count:]:
        lightest = min(groups, key=lambda group: group.size[0])
        lightest.items.append(index)
        lightest.size = buckets.together(lightest.size, sizes[index])
    return groups
