"""Replay equals eager: random slices, groups and versions through static, poisoned buffers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.interfaces.capturable import Bucket, BufferSpec
from models.interfaces.media import MediaItem
from models.minicpmv.encoder import MiniCPMVEncoder
from models.minicpmv.model import load_model
from service.graphs.buckets import fits
from tests.models.minicpmv.golden import VERSIONS, directory, golden_prompt, inputs
from tests.support.audit import audit
from tests.support.encoder_replay import CapturedEncoder, eager, padded
from tests.support.golden import prompts
from tests.support.inference import no_gradients as no_gradients

CPU = torch.device("cpu")
TOLERANCE = 3e-5
"""Of the golden embeddings: products of other row counts round differently."""
BUCKETS: list[Bucket] = [
    {"patches": 24, "sequences": 2, "groups": 1, "max_seqlen": 16, "max_group_keys": 24},
    {"patches": 70, "sequences": 5, "groups": 5, "max_seqlen": 36, "max_group_keys": 70},
    {"patches": 200, "sequences": 24, "groups": 24, "max_seqlen": 64, "max_group_keys": 200},
]


@cache
def encoder(version: str) -> MiniCPMVEncoder:
    return load_model(directory(version), CPU, torch.float32).encoder


@cache
def captured(version: str) -> CapturedEncoder:
    return CapturedEncoder(encoder(version), BUCKETS)


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
    captured(version).check_mix(items, TOLERANCE)


@pytest.mark.parametrize("version", VERSIONS)
def test_an_item_that_fills_a_bucket_and_the_largest_number_of_items(version: str) -> None:
    full = item([[(4, 4, 3)], [(2, 4, 5)]] if version != "4.5" else [[(4, 4, 3), (2, 4, 5)]], version, 0)
    captured(version).check_replay([full], TOLERANCE)
    many = [item([[(1 + seed % 3, 2, seed)]], version, seed) for seed in range(24)]
    captured(version).check_replay(many, TOLERANCE)


@pytest.mark.parametrize("version", VERSIONS)
def test_padded_rows_of_nan_change_no_bit(version: str) -> None:
    """A position of the tower that only padding reads is NaN: keys, values and queries of every layer are."""
    poisoned = load_model(directory(version), CPU, torch.float32).encoder
    unread = 70 * 70 - 1
    poisoned.tower.position_embedding.weight[unread] = float("nan")
    items = [item([[(3, 4, 2)]], version, 0), item([[(2, 5, -1)], [(1, 3, 7)]], version, 1)]
    assert unread not in poisoned.plan(items).arrays["position_ids"]
    rows = sum(item.num_embeds for item in items)
    zeros, nans = (
        padded(poisoned, items, BUCKETS[1], position_ids=position, pixels=pixel)[:rows]
        for position, pixel in ((0, 0), (unread, 255))
    )
    assert torch.isfinite(zeros).all()
    assert torch.equal(zeros, nans)


def test_the_temporal_term_matters() -> None:
    fused = max(prompts(directory("4.5")), key=lambda name: len(inputs("4.5")["prompts"][name].get("temporal_ids", ())))
    prompt = golden_prompt("4.5", fused)
    with_time = eager(encoder("4.5"), prompt.items)
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
    assert (eager(encoder("4.5"), timeless) - with_time).abs().max() > 0.3


@pytest.mark.parametrize("version", VERSIONS)
def test_bucket_list_holds_every_usual_picture(version: str) -> None:
    bucket_list = encoder(version).default_buckets()
    assert [bucket["patches"] for bucket in bucket_list] == sorted(bucket["patches"] for bucket in bucket_list)
    for bucket in bucket_list:
        assert encoder(version).buffer_specs(bucket)["pixels"].shape == (bucket["patches"], 588)
    required = encoder(version).required(golden_prompt(version, prompts(directory(version))[0]).items)
    assert any(fits(bucket, required) for bucket in bucket_list)


def test_parts_of_a_long_video_are_whole_groups() -> None:
    video = item([[(3, 3, 0), (3, 3, 1)]] * 5 + [[(6, 6, 9)]] + [[(2, 2, 3)]] * 4, "4.5", 0)
    limit: Bucket = {"patches": 54, "sequences": 6, "groups": 3, "max_seqlen": 36, "max_group_keys": 54}
    parts = encoder("4.5").split(video, limit)
    assert [part.arrays["group_sizes"].tolist() for part in parts] == [[2, 2, 2], [2, 2], [1, 1, 1], [1, 1]]
    assert all(fits(limit, encoder("4.5").required([part])) for part in parts)
    assert sum(part.num_patches for part in parts) == video.num_patches
    assert len({part.digest for part in parts}) == len(parts)
    whole = eager(encoder("4.5"), [video])
    torch.testing.assert_close(
        torch.cat([eager(encoder("4.5"), [part]) for part in parts]), whole, atol=TOLERANCE, rtol=0
    )
    assert encoder("4.5").split(video, encoder("4.5").required([video])) == [video]


def test_a_group_over_the_limit_stays_whole() -> None:
    video = item([[(3, 3, 0)], [(7, 7, 1), (7, 7, 2)], [(3, 3, 3)]], "4.5", 0)
    limit: Bucket = {"patches": 20, "sequences": 6, "groups": 3, "max_seqlen": 36, "max_group_keys": 20}
    parts = encoder("4.5").split(video, limit)
    assert [part.num_sequences for part in parts] == [1, 2, 1]


@pytest.mark.parametrize("version", VERSIONS)
def test_audit(version: str) -> None:
    bucket, width = BUCKETS[1], encoder(version).config.hidden_size
    rows = bucket["groups"] * encoder(version).config.num_queries
    assert audit(encoder(version), bucket) == {"embeds": BufferSpec((rows, width), torch.float32)}
