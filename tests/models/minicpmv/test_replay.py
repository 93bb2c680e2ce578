"""Replay equals eager: random slices, groups and versions through static, poisoned buffers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.media import MediaItem
from models.minicpmv.encoder import MiniCPMVEncoder
from models.minicpmv.model import load_model
from models.protocol import BufferSpec, Capacity, Plan
from service.graphs.accounting import Observations
from service.graphs.audit import audit
from service.graphs.buckets import fits
from service.graphs.buffers import exact_buffers
from service.graphs.pool import GraphPool
from service.graphs.runner import GraphRunner
from tests.models.minicpmv.golden import VERSIONS, directory, golden_prompt

CPU = torch.device("cpu")
TOLERANCE = 3e-5
"""Of the golden embeddings: products of other row counts round differently."""
LADDER: list[Capacity] = [
    {"patches": 24, "sequences": 2, "groups": 1, "max_seqlen": 16, "max_group_keys": 24},
    {"patches": 70, "sequences": 5, "groups": 5, "max_seqlen": 36, "max_group_keys": 70},
    {"patches": 200, "sequences": 24, "groups": 24, "max_seqlen": 64, "max_group_keys": 200},
]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


@cache
def encoder(version: str) -> MiniCPMVEncoder:
    return load_model(directory(version), CPU, torch.float32).encoder


@cache
def runner(version: str) -> GraphRunner:
    made = GraphRunner("test", "encoder", encoder(version), LADDER, GraphPool(CPU, 1 << 30), Observations())
    while made.capture_next(idle=True):
        pass
    assert made.recorded == LADDER[::-1]
    return made


def item(groups: Sequence[Sequence[tuple[int, int, int]]], version: str, seed: int) -> MediaItem:
    """groups of slices (rows, columns, temporal id)."""
    values = np.random.default_rng(seed)
    slices = [one for group in groups for one in group]
    frames = [values.integers(0, 256, (14 * rows, 14 * columns, 3), dtype=np.uint8) for rows, columns, _ in slices]
    return MediaItem(
        kind="video",
        frames=tuple(frames),
        arrays={
            "group_sizes": np.array([len(group) for group in groups], dtype=np.int32),
            "temporal_ids": np.array([time for _, _, time in slices], dtype=np.int32),
            "grid": np.zeros(2, dtype=np.int32),
        },
        num_patches=sum(rows * columns for rows, columns, _ in slices),
        num_sequences=len(slices),
        num_embeds=len(groups) * encoder(version).config.num_queries,
        digest=bytes(32),
    )


def eager(version: str, items: Sequence[MediaItem]) -> Tensor:
    plan = encoder(version).plan(items)
    buffers = exact_buffers(encoder(version).buffer_specs(plan.needs), plan, CPU)
    return encoder(version).forward(buffers, plan.needs)["embeds"]


def replayed(version: str, items: Sequence[MediaItem]) -> Tensor:
    """Through the static buffers, whose every byte, and the last outputs, are poisoned before the refill."""
    route = runner(version)
    assert route._static is not None
    route._static.device.fill_(255)
    for bucket in route._buckets.values():
        for output in bucket.recording.outputs.values():
            output.fill_(float("nan"))
    run = route.run(encoder(version).plan(items))
    assert run.route == "replay"
    return run.outputs["embeds"][: sum(item.num_embeds for item in items)].clone()


slices = st.tuples(st.integers(1, 7), st.integers(1, 7), st.integers(-1, 72000))
groups_of = {
    False: st.lists(st.lists(slices, min_size=1, max_size=1), min_size=1, max_size=4),
    True: st.lists(st.lists(slices, min_size=1, max_size=4), min_size=1, max_size=3),
}


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_mixes(data: st.DataObject) -> None:
    version = data.draw(st.sampled_from(VERSIONS))
    shapes = data.draw(st.lists(groups_of[version == "4.5"], min_size=1, max_size=3))
    items = [item(groups, version, seed) for seed, groups in enumerate(shapes)]
    alone = torch.cat([eager(version, [one]) for one in items])
    torch.testing.assert_close(eager(version, items), alone, atol=TOLERANCE, rtol=0)
    needs = encoder(version).needs(items)
    assert needs == encoder(version).plan(items).needs
    if any(fits(capacity, needs) for capacity in LADDER):
        torch.testing.assert_close(replayed(version, items), alone, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("version", VERSIONS)
def test_an_item_that_fills_a_bucket_and_the_largest_number_of_items(version: str) -> None:
    full = item([[(4, 4, 3)], [(2, 4, 5)]] if version != "4.5" else [[(4, 4, 3), (2, 4, 5)]], version, 0)
    torch.testing.assert_close(replayed(version, [full]), eager(version, [full]), atol=TOLERANCE, rtol=0)
    many = [item([[(1 + seed % 3, 2, seed)]], version, seed) for seed in range(24)]
    torch.testing.assert_close(replayed(version, many), eager(version, many), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("version", VERSIONS)
def test_padded_rows_of_nan_change_no_bit(version: str) -> None:
    """A position of the tower that only padding reads is NaN: keys, values and queries of every layer are."""
    poisoned = load_model(directory(version), CPU, torch.float32).encoder
    unread = 70 * 70 - 1
    poisoned.tower.position_embedding.weight[unread] = float("nan")
    items = [item([[(3, 4, 2)]], version, 0), item([[(2, 5, -1)], [(1, 3, 7)]], version, 1)]
    plan = encoder(version).plan(items)
    assert unread not in plan.arrays["position_ids"]
    capacity = LADDER[1]
    rows = sum(item.num_embeds for item in items)
    outputs = []
    for fill in (0, unread):
        padded = Plan(plan.arrays, plan.needs, fills={**plan.fills, "position_ids": fill, "pixels": 255 * (fill > 0)})
        buffers = exact_buffers(poisoned.buffer_specs(capacity), padded, CPU)
        outputs.append(poisoned.forward(buffers, capacity)["embeds"][:rows])
    assert torch.isfinite(outputs[0]).all()
    assert torch.equal(outputs[0], outputs[1])


def test_the_temporal_term_matters() -> None:
    prompt = golden_prompt("4.5", "video_fused")
    with_time = eager("4.5", prompt.items)
    timeless = [
        MediaItem(
            one.kind,
            one.frames,
            {**one.arrays, "temporal_ids": np.full_like(one.arrays["temporal_ids"], -1)},
            one.num_patches,
            one.num_sequences,
            one.num_embeds,
            one.digest,
        )
        for one in prompt.items
    ]
    assert (eager("4.5", timeless) - with_time).abs().max() > 0.3


@pytest.mark.parametrize("version", VERSIONS)
def test_ladder_holds_every_usual_picture(version: str) -> None:
    ladder = encoder(version).default_ladder()
    assert [capacity["patches"] for capacity in ladder] == sorted(capacity["patches"] for capacity in ladder)
    for capacity in ladder:
        assert encoder(version).buffer_specs(capacity)["pixels"].shape == (capacity["patches"], 588)
    needs = encoder(version).needs(golden_prompt(version, "images").items)
    assert any(fits(capacity, needs) for capacity in ladder)


def test_parts_of_a_long_video_are_whole_groups() -> None:
    video = item([[(3, 3, 0), (3, 3, 1)]] * 5 + [[(6, 6, 9)]] + [[(2, 2, 3)]] * 4, "4.5", 0)
    limit: Capacity = {"patches": 54, "sequences": 6, "groups": 3, "max_seqlen": 36, "max_group_keys": 54}
    parts = encoder("4.5").split(video, limit)
    assert [part.arrays["group_sizes"].tolist() for part in parts] == [[2, 2, 2], [2, 2], [1, 1, 1], [1, 1]]
    assert all(fits(limit, encoder("4.5").needs([part])) for part in parts)
    assert sum(part.num_patches for part in parts) == video.num_patches
    assert len({part.digest for part in parts}) == len(parts)
    whole = eager("4.5", [video])
    torch.testing.assert_close(torch.cat([eager("4.5", [part]) for part in parts]), whole, atol=TOLERANCE, rtol=0)
    assert encoder("4.5").split(video, encoder("4.5").needs([video])) == [video]


def test_a_group_over_the_limit_stays_whole() -> None:
    video = item([[(3, 3, 0)], [(7, 7, 1), (7, 7, 2)], [(3, 3, 3)]], "4.5", 0)
    limit: Capacity = {"patches": 20, "sequences": 6, "groups": 3, "max_seqlen": 36, "max_group_keys": 20}
    parts = encoder("4.5").split(video, limit)
    assert [part.num_sequences for part in parts] == [1, 2, 1]


@pytest.mark.parametrize("version", VERSIONS)
def test_audit(version: str) -> None:
    capacity, width = LADDER[1], encoder(version).config.width
    rows = capacity["groups"] * encoder(version).config.num_queries
    assert audit(encoder(version), capacity) == {"embeds": BufferSpec((rows, width), torch.float32)}
