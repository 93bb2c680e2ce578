"""Static buffers: what stands in them, and how arrays are packed into them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.interfaces.capturable import Bucket, BufferSpec, Plan
from service.graphs.buckets import LAUNCH_COST, Group, cheapest, combine, fits, pack
from service.graphs.buffers import Layout, StaticBuffers, exact_buffers, upload_arrays
from tests.support.devices import DEVICES

SPECS = {
    "ids": BufferSpec((5,), torch.int64),
    "mask": BufferSpec((3,), torch.bool),
    "hidden": BufferSpec((4, 2), torch.bfloat16),
    "pixels": BufferSpec((3, 7), torch.uint8),
}


def plan(device: str, **changes: object) -> Plan:
    values: dict[str, object] = {
        "arrays": {"ids": np.array([4, 5]), "pixels": np.full((1, 7), 9, np.uint8)},
        "tensors": {"hidden": [torch.ones((1, 2), device=device), torch.full((2, 2), 3.0, device=device)]},
        "fills": {"ids": -1.0, "hidden": 0.5},
        "required": {},
    }
    return Plan(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("device", DEVICES)
def test_the_whole_buffer_is_written_at_each_fill(device: str) -> None:
    where = torch.device(device)
    layout = Layout.of(SPECS)
    static = StaticBuffers(layout.num_bytes, where)
    for _ in range(4):
        static.device.fill_(0xFF)
        for host in static._hosts:
            host.fill_(0xFF)
        buffers = static.fill(layout, plan(device))
        assert buffers["ids"].tolist() == [4, 5, -1, -1, -1]
        assert buffers["mask"].tolist() == [False] * 3
        assert buffers["pixels"].tolist() == [[9] * 7, [0] * 7, [0] * 7]
        assert buffers["hidden"].tolist() == [[1, 1], [3, 3], [3, 3], [0.5, 0.5]]


@pytest.mark.parametrize("device", DEVICES)
def test_fills_in_flight_do_not_overwrite_each_other(device: str) -> None:
    layout = Layout.of({"ids": BufferSpec((1 << 16,), torch.int64)})
    static = StaticBuffers(layout.num_bytes, torch.device(device))
    sums = []
    for value in range(8):
        array = np.full(1 << 16, value)
        sums.append(static.fill(layout, Plan(arrays={"ids": array}, required={}))["ids"].sum())
    assert [int(total) for total in sums] == [value << 16 for value in range(8)]


@pytest.mark.parametrize("device", DEVICES)
def test_exact_buffers_and_uploads_keep_values_shapes_and_dtypes(device: str) -> None:
    where = torch.device(device)
    buffers = exact_buffers(SPECS, plan(device), where)
    assert buffers["hidden"].dtype == torch.bfloat16 and buffers["ids"].tolist() == [4, 5, -1, -1, -1]
    sent = upload_arrays({"a": np.arange(3), "b": np.zeros((0, 4), np.float32), "c": np.array([True])}, where)
    assert sent["a"].tolist() == [0, 1, 2] and sent["b"].shape == (0, 4) and sent["c"].tolist() == [True]
    turned = upload_arrays({"a": np.arange(6, dtype=np.int32).reshape(2, 3).T, "b": np.float32([0.5])}, where)
    assert turned["a"].tolist() == [[0, 3], [1, 4], [2, 5]] and turned["b"].tolist() == [0.5]
    assert turned["a"].dtype == torch.int32 and upload_arrays({}, where) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arrays": {"idz": np.zeros(1)}}, "plan names 'idz'"),
        ({"arrays": {"ids": np.zeros(1, np.int32)}}, "is int64 and its array is int32"),
        ({"arrays": {"ids": np.zeros(6, np.int64)}}, r"has shape \(5,\)"),
        ({"arrays": {"pixels": np.zeros((1, 6), np.uint8)}}, r"has shape \(3, 7\)"),
        ({"tensors": {"hidden": [torch.ones((3, 2)), torch.ones((2, 2))]}}, "row 3 on gets"),
        ({"arrays": {"hidden": np.zeros((1, 2), np.float32)}, "tensors": {}}, "give it as device tensors"),
    ],
)
def test_a_plan_that_does_not_fit_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exact_buffers(SPECS, plan("cpu", **changes), torch.device("cpu"))


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
    for item, count, small in ((500, 2, 512), (512, 4, 1024)):
        groups = pack([{"patches": item}] * count, [{"patches": small}, {"patches": 4096}])
        assert [group.bucket for group in groups] == [{"patches": small}] * 2
        assert [len(group.items) for group in groups] == [count // 2] * 2


def test_without_captured_graphs_everything_is_alone() -> None:
    assert pack([size(10), size(20)], []) == [Group((0,), None), Group((1,), None)]
