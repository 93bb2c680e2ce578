"""Replay equals eager: random pictures and videos through static, poisoned buffers; every step passes the audit."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.interfaces.capturable import Bucket, BufferSpec
from models.interfaces.media import MediaItem
from models.kimi_vl.config import load_config
from models.kimi_vl.pictures import load_image_settings
from models.kimi_vl.vision import KimiVisionEncoder
from tests.models.kimi_vl.golden import PUBLISHED_VISION, item, model, processor, write_config
from tests.support.audit import audit
from tests.support.encoder_replay import CapturedEncoder, padded
from tests.support.inference import no_gradients as no_gradients
from tests.support.inline_engine import InlineEngine

TOLERANCE = 2e-5
"""Of the golden embeddings: products of other row counts round differently."""
BUCKETS: list[Bucket] = [
    {"patches": 24, "sequences": 2, "max_seqlen": 24},
    {"patches": 96, "sequences": 6, "max_seqlen": 96},
    {"patches": 256, "sequences": 16, "max_seqlen": 256},
]


@cache
def captured() -> CapturedEncoder:
    return CapturedEncoder(model().encoder, BUCKETS)


even = st.integers(1, 4).map(lambda blocks: 2 * blocks)
pictures = st.lists(st.tuples(even, even), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(st.lists(pictures, min_size=1, max_size=4))
def test_random_mixes(shapes: list[list[tuple[int, int]]]) -> None:
    captured().check_mix([item(grids, seed) for seed, grids in enumerate(shapes)], TOLERANCE)


@pytest.mark.parametrize(
    "items",
    [
        [item([(6, 4)])],
        [item([(2, 48)])],
        [item([(16, 16)])],
        [item([(4, 4)], seed) for seed in range(16)],
        [item([(2, 2)] * 16)],
    ],
    ids=["fills the smallest", "a strip", "fills the largest", "most pictures", "most frames"],
)
def test_full_buckets(items: list[MediaItem]) -> None:
    captured().check_replay(items, TOLERANCE)


def test_padded_rows_of_nan_change_no_bit() -> None:
    items = [item([(4, 6)], 0), item([(2, 4), (6, 2)], 1)]
    rows = sum(item.num_embeds for item in items)
    zeros, nans = (
        padded(model().encoder, items, BUCKETS[1], positions=position, pixels=pixel)[:rows]
        for position, pixel in ((0.0, 0), (float("nan"), 255))
    )
    assert torch.isfinite(zeros).all()
    assert torch.equal(zeros, nans)


def test_the_position_cache_is_bounded_and_exact() -> None:
    encoder = model().encoder
    grids = [(2 * rows, 2 * columns) for rows in range(1, 10) for columns in range(1, 10)]
    first = [encoder._positions(grid).clone() for grid in grids]
    assert len(encoder._interpolated) < len(grids)
    assert all(torch.equal(encoder._positions(grid), rows) for grid, rows in zip(grids, first, strict=True))


@pytest.mark.parametrize(("limit", "largest"), [(4096, 8960), (16384, 17928)])
def test_the_bucket_list_holds_every_picture_of_the_checkpoint(tmp_path: Path, limit: int, largest: int) -> None:
    write_config(tmp_path, vision=PUBLISHED_VISION, limit=limit)
    config = load_config(tmp_path)
    images = load_image_settings(tmp_path, config.vision)
    with torch.device("meta"):
        encoder = KimiVisionEncoder(config, images)
    bucket_list = encoder.default_buckets()
    budgets = [bucket["patches"] for bucket in bucket_list]
    assert budgets == sorted(set(budgets))
    assert budgets[-1] == largest >= images.most_patches
    assert all(bucket["max_seqlen"] == bucket["patches"] for bucket in bucket_list)
    assert encoder.buffer_specs(bucket_list[-1])["positions"].shape == (largest, 1152)
    # Steps of more than a half would pad more than packing saves.
    assert all(following <= 1.5 * budget for budget, following in pairwise(budgets))


def test_the_encoder_passes_the_audit() -> None:
    for bucket in BUCKETS:
        assert audit(model().encoder, bucket) == {
            "embeds": BufferSpec((bucket["patches"] // 4, model().decoder.hidden_size), torch.float32)
        }


@pytest.mark.parametrize("full", [False, True])
def test_the_decode_step_passes_the_audit(full: bool) -> None:
    worker = InlineEngine(model(), processor(), encoder_buckets=(256,)).worker
    step = worker._runner.graphs.decode[full].capturable
    outputs = audit(step, {"rows": 4, "pages": 8})
    assert outputs["results"] == BufferSpec((4, 2), torch.int32)
    if full:
        assert outputs["logits"] == BufferSpec((4, processor().vocab_size), torch.float32)
