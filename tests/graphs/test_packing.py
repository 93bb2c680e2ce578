"""Items are packed into buckets with little padding."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from models.interfaces.capturable import Bucket
from service.graphs.buckets import cheapest, fits
from service.graphs.packing import LAUNCH_COST, Group, combine, pack

BUCKETS: list[Bucket] = [
    {"patches": patches, "sequences": max(2, patches // 64), "max_seqlen": patches}
    for patches in (256, 384, 512, 768, 1024, 1536, 2048)
]


def size(patches: int, sequences: int = 1) -> Bucket:
    return {"patches": patches, "sequences": sequences, "max_seqlen": -(-patches // sequences)}


def cost(groups: list[Group]) -> int:
    return sum(LAUNCH_COST + (group.bucket["patches"] if group.bucket else 0) for group in groups)


def partitions(items: list[int]) -> list[list[list[int]]]:
    if not items:
        return [[]]
    first, rest = items[0], items[1:]
    return [
        variant
        for partition in partitions(rest)
        for variant in (
            [[first], *partition],
            *([*partition[:i], [first, *partition[i]], *partition[i + 1 :]] for i in range(len(partition))),
        )
    ]


SIZES = st.builds(size, st.integers(1, 2500), st.integers(1, 40))


@given(st.lists(SIZES, max_size=12))
@settings(max_examples=150, deadline=None)
def test_every_item_is_packed_once_and_every_group_fits_all_limits(sizes: list[Bucket]) -> None:
    groups = pack(sizes, BUCKETS)
    assert sorted(index for group in groups for index in group.items) == list(range(len(sizes)))
    for group in groups:
        required = combine(sizes[index] for index in group.items)
        if group.bucket is None:
            assert len(group.items) == 1 and cheapest(BUCKETS, required) is None
        else:
            assert fits(group.bucket, required) and group.bucket == cheapest(BUCKETS, required)
    if groups:
        assert 0 in groups[0].items


@given(st.lists(st.builds(size, st.integers(1, 1100)), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_packing_is_close_to_the_best_there_is(sizes: list[Bucket]) -> None:
    best = min(
        cost([Group(tuple(items), bucket) for items, bucket in zip(partition, buckets, strict=True)])
        for partition in partitions(list(range(len(sizes))))
        if None not in (buckets := [cheapest(BUCKETS, combine(sizes[i] for i in items)) for items in partition])
    )
    packed = cost(pack(sizes, BUCKETS))
    alone = cost([Group((i,), cheapest(BUCKETS, one)) for i, one in enumerate(sizes)])
    assert best <= packed <= min(alone, 1.35 * best)


def test_two_small_groups_beat_one_half_empty_one() -> None:
    bucket_list: list[Bucket] = [{"patches": patches} for patches in (512, 4096)]
    groups = pack([{"patches": 500}, {"patches": 500}], bucket_list)
    assert [group.items for group in groups] == [(0,), (1,)]
    assert [group.bucket for group in groups] == [{"patches": 512}] * 2


def test_items_are_split_evenly_where_a_greedy_fill_wastes() -> None:
    bucket_list: list[Bucket] = [{"patches": patches} for patches in (1024, 4096)]
    groups = pack([{"patches": 512}] * 4, bucket_list)
    assert [len(group.items) for group in groups] == [2, 2]


def test_without_captured_graphs_everything_is_alone() -> None:
    assert pack([size(10), size(20)], []) == [Group((0,), None), Group((1,), None)]
