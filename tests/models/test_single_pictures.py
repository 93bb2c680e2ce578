"""Single pictures in buckets of one segment, by dense attention: every family that has them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from models.interfaces.capturable import EXACT, Bucket
from models.interfaces.media import MediaItem
from models.layers import dense_segments
from models.layers.dense_segments import WHOLE_ROWS
from models.protocol import VisionEncoder
from tests.models.families.family import FAMILIES, Family, families
from tests.support.chat_golden import largest_difference
from tests.support.encoder_replay import CapturedEncoder, bytes_of_nan, random_item
from tests.support.golden import fact_of_own_fixture
from tests.support.inference import no_gradients as no_gradients
from tests.support.inline_engine import InlineEngine
from tests.support.one_segment import dense_calls as dense_calls
from tests.support.one_segment import taken as taken

TOLERANCE = 2e-5
CASES = families("qwen2_vl", "qwen3_vl", "kimi_vl")


def noise(family: Family, seed: int) -> MediaItem:
    """Without a byte of 255, also where it is resized."""
    pixels = np.random.default_rng(seed).integers(90, 160, (56, 112, 3), dtype=np.uint8)
    return family.processor.image(Image.fromarray(pixels))


def one_segment_bucket(encoder: VisionEncoder, item: MediaItem, spare: int = 0) -> Bucket:
    rows = (-(-item.num_patches // WHOLE_ROWS) + spare) * WHOLE_ROWS
    return dict(encoder.required([item])) | {"patches": rows, "sequences": 1, "max_seqlen": rows}


def dense_layers(encoder: Any) -> int:
    return len(getattr(encoder, "full_attention", encoder.blocks))


@pytest.mark.parametrize("family", CASES)
def test_golden_pictures(family: Family, taken: list[int], dense_calls: list[int]) -> None:
    """In buckets of whole rows, without room to spare and with, and in exact ones."""
    encoder, layers = family.model.encoder, dense_layers(family.model.encoder)
    for name in family.images:
        (item,) = family.items(name)
        exact = dict(encoder.required([item])) | {EXACT: 1}
        for bucket in (*(one_segment_bucket(encoder, item, spare) for spare in (0, 2)), exact):
            captured = CapturedEncoder(encoder, [bucket])
            taken.clear()
            dense_calls.clear()
            assert largest_difference(captured.replayed([item]), family.embeds(name)) <= TOLERANCE
            if bucket is exact:
                assert (taken, dense_calls) == ([], [item.num_patches] * layers)
            else:
                assert (len(taken), dense_calls) == (layers, [])


@fact_of_own_fixture
@pytest.mark.parametrize("family", CASES)
def test_an_engine_takes_an_exact_bucket_for_pictures_that_fill_it(
    family: Family, monkeypatch: pytest.MonkeyPatch, dense_calls: list[int]
) -> None:
    item, (smaller,) = noise(family, 5), family.items(family.images[0])
    monkeypatch.setattr(dense_segments, "on_hopper", lambda *_: True)
    made, sizes = family.model, ((1, item.num_patches), (2, item.num_patches))
    monkeypatch.setitem(dense_segments.ROWS, made.encoder.config.head_dim, range(1, 4096))
    monkeypatch.setattr(type(made.encoder), "exact_sizes", sizes)
    engine = InlineEngine(made, family.processor, encoder_buckets=(64, 128))
    runner = engine.worker._vision.runner
    while runner.capture_next(idle=True):
        pass
    assert [EXACT in bucket for bucket in runner.captured] == [False, False, True, True]
    dense_calls.clear()
    for items, exact in (
        ([item], True),
        ([smaller], False),
        ([item, smaller], False),
        ([item, noise(family, 6)], True),
    ):
        plan = engine.model.encoder.plan(items)
        graph = runner.graph_for(plan.required)
        assert graph is not None and (EXACT in graph.bucket) == exact
        runner.run(plan)
    assert dense_calls == [rows for n, each in sizes for rows in [n * each] * dense_layers(made.encoder)]


@pytest.mark.gpu
def test_a_replay_of_an_exact_bucket_equals_its_eager_run(dense_calls: list[int]) -> None:
    """On a poisoned pool; the eager run attends in general."""
    encoder = FAMILIES["qwen2_vl"].fresh("cuda", torch.bfloat16).encoder
    item = random_item(1, 17, 23, 0, block=28)
    required = dict(encoder.required([item]))
    exact, general = required | {EXACT: 1}, required | {"patches": 1600, "sequences": 8, "max_seqlen": 1600}
    captured = CapturedEncoder(encoder, [exact, general], torch.device("cuda"))
    graph = captured.runner.graph_for(required)
    assert graph is not None and graph.bucket == exact and dense_calls
    for rows, plain in captured.replays_on_a_poisoned_pool([[item]] * 2, partial(bytes_of_nan, encoder, general)):
        torch.testing.assert_close(rows, plain, atol=0.05, rtol=0)


@pytest.mark.gpu
def test_a_replay_of_a_large_picture_equals_its_eager_run(taken: list[int]) -> None:
    """By kernels, in a pool of NaN; the eager run, of a size that is no bucket's, attends in general."""
    encoder = FAMILIES["qwen2_vl"].fresh("cuda", torch.bfloat16).encoder
    item = random_item(1, 23, 24, 0, block=28)
    required = dict(encoder.required([item]))
    single = required | {"patches": 2240, "sequences": 1, "max_seqlen": 2240}
    general = required | {"patches": 2304, "sequences": 8, "max_seqlen": 2304}
    captured = CapturedEncoder(encoder, [single, general], torch.device("cuda"))
    graph = captured.runner.graph_for(required)
    assert graph is not None and graph.bucket == single
    poison = partial(bytes_of_nan, encoder, general)
    for rows, plain in captured.replays_on_a_poisoned_pool([[item]] * 2, poison):
        assert rows.isfinite().all()
        torch.testing.assert_close(rows[: len(plain)], plain, atol=0.05, rtol=0)
    assert taken and not dense_segments._refused
