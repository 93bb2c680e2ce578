"""Packs the items of all waiting requests into buckets with the least padding.

Several groupings are tried (first fit into every bucket, even splits) and the cheapest is used: greedy packing into the
largest bucket alone would pay for padding that two smaller buckets do not have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from models.protocol import Bucket
from service.graphs.buckets import cheapest, cost_of, fits, primary_size

LAUNCH_COST = 256
"""Fixed cost of a replay, in patches. The GEMMs of an encoder layer take 34 / 68 / 239 us for 256 / 1024 / 4096 patches
on an H100: a fixed part of 10 to 20 us and 0.05 us a patch."""
_MOST_EVEN_GROUPS = 4
"""Most groups of an even split; first fit into a small bucket finds finer ones."""


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


def pack(sizes: Sequence[Bucket], bucket_list: Sequence[Bucket]) -> list[Group]:
    """Groups that hold every item once, the group of item 0 first. An item that no bucket holds is alone."""
    if len(sizes) == 1:  # the usual case, in which all groupings below are one
        return [_group((0,), sizes, bucket_list)]
    lonely = [index for index, size in enumerate(sizes) if cheapest(bucket_list, size) is None]
    rest = sorted(set(range(len(sizes))) - set(lonely), key=lambda index: cost_of(sizes[index]), reverse=True)
    groupings = [_first_fit(rest, sizes, bucket_list, target) for target in bucket_list]
    groupings += [_split_evenly(rest, sizes, count) for count in range(1, min(len(rest), _MOST_EVEN_GROUPS) + 1)]
    packed = [[_group(items, sizes, bucket_list) for items in grouping] for grouping in groupings]
    best = min(packed, key=lambda groups: sum(map(_cost, groups)), default=[])
    groups = best + [Group((index,), None) for index in lonely]
    return sorted(groups, key=lambda group: min(group.items))


def _first_fit(
    order: Sequence[int], sizes: Sequence[Bucket], bucket_list: Sequence[Bucket], target: Bucket
) -> list[list[int]]:
    """First fit into groups of at most `target`; a larger item opens a group of the bucket that holds it."""
    groups: list[list[int]] = []
    filled: list[tuple[Bucket, Bucket]] = []
    for index in order:
        for position, (limit, used) in enumerate(filled):
            together = combine((used, sizes[index]))
            if fits(limit, together):
                groups[position].append(index)
                filled[position] = (limit, together)
                break
        else:
            own = target if fits(target, sizes[index]) else cheapest(bucket_list, sizes[index])
            assert own is not None
            groups.append([index])
            filled.append((own, sizes[index]))
    return groups


def _split_evenly(order: Sequence[int], sizes: Sequence[Bucket], count: int) -> list[list[int]]:
    """Into `count` groups of about equal primary size, largest items first."""
    groups: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for index in order:
        lightest = loads.index(min(loads))
        groups[lightest].append(index)
        loads[lightest] += sizes[index][primary_size(sizes[index])]
    return groups


def _group(items: Sequence[int], sizes: Sequence[Bucket], bucket_list: Sequence[Bucket]) -> Group:
    return Group(tuple(sorted(items)), cheapest(bucket_list, combine(sizes[index] for index in items)))


def _cost(group: Group) -> float:
    """Infinite for a group that no bucket holds, since each of its items alone has a bucket."""
    return LAUNCH_COST + group.bucket[primary_size(group.bucket)] if group.bucket else math.inf
