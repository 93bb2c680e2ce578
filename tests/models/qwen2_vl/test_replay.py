"""Replay equals eager: random pictures and videos through static buffers, poisoned before every refill."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.interfaces.capturable import Bucket, BufferSpec
from models.qwen2_vl.model import load_model
from models.qwen2_vl.patches import patch_buckets
from tests.support.audit import audit, audited_decode
from tests.support.encoder_replay import CapturedEncoder, padded, random_item
from tests.support.golden import GOLDEN
from tests.support.inference import no_gradients as no_gradients

CPU = torch.device("cpu")
TOLERANCE = 2e-5
MODEL = load_model(GOLDEN / "qwen2_vl", CPU, torch.float32)
BUCKETS: list[Bucket] = [
    {"patches": 16, "sequences": 3, "max_seqlen": 16},
    {"patches": 60, "sequences": 4, "max_seqlen": 60},
    {"patches": 240, "sequences": 24, "max_seqlen": 64},
]


@pytest.fixture(scope="module")
def captured() -> CapturedEncoder:
    return CapturedEncoder(MODEL.encoder, BUCKETS)


item = partial(random_item, block=28)
shapes = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))


@settings(max_examples=40, deadline=None)
@given(mix=st.lists(shapes, min_size=1, max_size=5))
def test_random_mixes(captured: CapturedEncoder, mix: list[tuple[int, int, int]]) -> None:
    captured.check_mix([item(*shape, seed) for seed, shape in enumerate(mix)], TOLERANCE)


def test_an_item_that_fills_a_bucket_and_the_largest_number_of_items(captured: CapturedEncoder) -> None:
    captured.check_replay([item(1, 3, 5, 0)], TOLERANCE)
    captured.check_replay([item(1, 1 + seed % 2, 1, seed) for seed in range(24)], TOLERANCE)


def test_padded_rows_of_nan_change_no_bit() -> None:
    """A byte that only padding holds is NaN: queries, keys and values of the padded rows are NaN in every layer."""
    encoder = load_model(GOLDEN / "qwen2_vl", CPU, torch.float32).encoder
    encoder.byte_values.view(3, 256)[:, 255] = float("nan")
    items = [item(1, 2, 3, 0), item(3, 1, 2, 1)]
    rows = sum(one.num_embeds for one in items)
    zeros, nans = (padded(encoder, items, BUCKETS[1], pixels=byte) for byte in (0, 255))
    assert nans[rows:].isnan().all()
    assert zeros.isfinite().all()
    assert torch.equal(zeros[:rows], nans[:rows])


def test_the_default_bucket_list_ascends_and_holds_four_of_the_largest_pictures() -> None:
    bucket_list = MODEL.encoder.default_buckets()
    assert [bucket["patches"] for bucket in bucket_list] == sorted(bucket["patches"] for bucket in bucket_list)
    largest = MODEL.encoder.images.max_pixels // 14**2
    assert bucket_list[-1]["patches"] >= min(4 * largest, 16384)
    assert all(bucket["max_seqlen"] == bucket["patches"] for bucket in bucket_list)


def test_buckets_hold_whole_embedding_rows() -> None:
    """Also of nine patches, which divide no size of the list."""
    vision = replace(MODEL.encoder.config, merge_size=3)
    assert all(bucket["patches"] % 9 == 0 for bucket in patch_buckets(vision, MODEL.encoder.images))


def test_the_encoder_reads_no_value() -> None:
    assert audit(MODEL.encoder, BUCKETS[1]) == {"embeds": BufferSpec((15, MODEL.decoder.hidden_size), torch.float32)}


def test_a_decode_step_reads_no_value() -> None:
    assert audited_decode(MODEL.decoder, 5) == BufferSpec((5, 316), torch.float32)
