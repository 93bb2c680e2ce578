"""Grouping items of all waiting requests into the capacities that waste least.

Several groupings are made (first fit into every rung, even splits) and the cheapest is taken: greedy packing into the
largest rung alone pays for padding that two smaller rungs would not have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from models.protocol import Capacity
from service.graphs.buckets import cheapest, cost_of, fits, leading

LAUNCH_COST = 256
"""What a replay costs beside its rows, in patches. An encoder layer's products take 34 / 68 / 239 us for 256 / 1024 /
4096 patches on an H100, so a fixed part of 10 to 20 us stands against 0.05 us a patch."""
_MOST_EVEN_GROUPS = 4
"""Even splits into more are not tried: first fit into a small rung finds those."""


@dataclass(frozen=True)
class Group:
    """Items (by index) that run together in `capacity`, or eagerly where no rung holds them."""

    items: tuple[int, ...]
    capacity: Capacity | None


def combine(sizes: Iterable[Capacity]) -> dict[str, int]:
    """What several items need together: sizes add up, those named max_... are maxima."""
    total: dict[str, int] = {}
    for size in sizes:
        for name, value in size.items():
            known = total.get(name, 0)
            total[name] = max(known, value) if name.startswith("max_") else known + value
    return total


def pack(sizes: Sequence[Capacity], ladder: Sequence[Capacity]) -> list[Group]:
    """Groups that hold every item once; the one with item 0 comes first. An item over every rung is alone."""
    if len(sizes) == 1:  # the usual case, in which all groupings below are one
        return [_group((0,), sizes, ladder)]
    lonely = [index for index, size in enumerate(sizes) if cheapest(ladder, size) is None]
    rest = sorted(set(range(len(sizes))) - set(lonely), key=lambda index: cost_of(sizes[index]), reverse=True)
    groupings = [_first_fit(rest, sizes, ladder, target) for target in ladder]
    groupings += [_split_evenly(rest, sizes, count) for count in range(1, min(len(rest), _MOST_EVEN_GROUPS) + 1)]
    packed = [[_group(items, sizes, ladder) for items in grouping] for grouping in groupings]
    best = min(packed, key=lambda groups: sum(map(_cost, groups)), default=[])
    groups = best + [Group((index,), None) for index in lonely]
    return sorted(groups, key=lambda group: min(group.items))


def _first_fit(
    order: Sequence[int], sizes: Sequence[Capacity], ladder: Sequence[Capacity], target: Capacity
) -> list[list[int]]:
    """Into as few groups of at most `target` as go; an item over it opens a group of the rung that holds it."""
    groups: list[list[int]] = []
    filled: list[tuple[Capacity, Capacity]] = []
    for index in order:
        for position, (limit, used) in enumerate(filled):
            together = combine((used, sizes[index]))
            if fits(limit, together):
                groups[position].append(index)
                filled[position] = (limit, together)
                break
        else:
            own = target if fits(target, sizes[index]) else cheapest(ladder, sizes[index])
            assert own is not None
            groups.append([index])
            filled.append((own, sizes[index]))
    return groups


def _split_evenly(order: Sequence[int], sizes: Sequence[Capacity], count: int) -> list[list[int]]:
    """Into `count` groups of about equal leading size, largest items first."""
    groups: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for index in order:
        lightest = loads.index(min(loads))
        groups[lightest].append(index)
        loads[lightest] += sizes[index][leading(sizes[index])]
    return groups


def _group(items: Sequence[int], sizes: Sequence[Capacity], ladder: Sequence[Capacity]) -> Group:
    return Group(tuple(sorted(items)), cheapest(ladder, combine(sizes[index] for index in items)))


def _cost(group: Group) -> float:
    """Infinite for a group that no rung holds: each of its items has one."""
    return LAUNCH_COST + group.capacity[leading(group.capacity)] if group.capacity else math.inf
