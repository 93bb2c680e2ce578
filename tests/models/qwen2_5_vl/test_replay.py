"""Replay equals eager: random pictures and videos through static buffers, poisoned before every refill; and how much
padding the default buckets cost."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.interfaces.capturable import Bucket, BufferSpec
from models.interfaces.media import MediaItem
from models.qwen2_5_vl.model import load_model
from models.qwen2_5_vl.windows import num_windows, windowed_frame
from models.qwen2_vl.pictures import smart_resize
from service.graphs.buckets import cheapest, fits
from service.graphs.buffers import exact_buffers
from service.graphs.packing import combine, pack
from tests.models.qwen2_5_vl.golden import DIRECTORY, model
from tests.support.audit import audit
from tests.support.encoder_replay import CapturedEncoder, eager, grid_item, padded, random_item
from tests.support.inference import no_gradients as no_gradients

CPU = torch.device("cpu")
TOLERANCE = 2e-5
BUCKETS: list[Bucket] = [
    {"patches": 16, "sequences": 3, "max_seqlen": 16, "windows": 3},
    {"patches": 140, "sequences": 4, "max_seqlen": 140, "windows": 5},
    {"patches": 480, "sequences": 24, "max_seqlen": 256, "windows": 40},
]


@pytest.fixture(scope="module")
def captured() -> CapturedEncoder:
    return CapturedEncoder(model().encoder, BUCKETS)


item = partial(random_item, block=28)
shapes = st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))


@settings(max_examples=30, deadline=None)
@given(mix=st.lists(shapes, min_size=1, max_size=5))
def test_random_mixes(captured: CapturedEncoder, mix: list[tuple[int, int, int]]) -> None:
    captured.check_mix([item(*shape, seed) for seed, shape in enumerate(mix)], TOLERANCE)


def test_an_item_that_fills_a_bucket_and_the_largest_numbers_of_frames_and_windows(captured: CapturedEncoder) -> None:
    for items in (
        [item(1, 5, 7, 0)],
        [item(1, 1 + seed % 2, 1, seed) for seed in range(24)],
        [item(20, 1, 9, 0), *(item(1, 1, 5, seed) for seed in range(5))],
    ):
        required = model().encoder.required(items)
        assert any(required[name] == bucket[name] for bucket in BUCKETS for name in required)
        captured.check_replay(items, TOLERANCE)


def test_a_bucket_without_room_for_the_windows_is_not_chosen(captured: CapturedEncoder) -> None:
    """Strips of 1 x 5 embedding rows have two windows for 20 patches."""
    strips = [item(1, 1, 5, seed) for seed in range(4)]
    required = model().encoder.required(strips)
    assert required["patches"] <= BUCKETS[1]["patches"] and required["windows"] > BUCKETS[1]["windows"]
    assert cheapest(BUCKETS, required) == BUCKETS[2]
    captured.check_replay(strips, TOLERANCE)


def test_padded_rows_of_nan_change_no_bit() -> None:
    """A byte that only padding holds is NaN; no row of it is read, and padded rows repeat a real one."""
    encoder = load_model(DIRECTORY, CPU, torch.float32).encoder
    encoder.byte_values.view(3, 256)[:, 255] = float("nan")
    items = [item(1, 2, 6, 0), item(3, 1, 2, 1)]
    rows = sum(one.num_embeds for one in items)
    zeros, nans = (padded(encoder, items, BUCKETS[1], pixels=byte) for byte in (0, 255))
    assert torch.equal(zeros, nans) and nans.isfinite().all()
    assert torch.equal(nans[rows:], nans[:1].expand(len(nans) - rows, -1))
    torch.testing.assert_close(nans[:rows], eager(encoder, items), atol=TOLERANCE, rtol=0)


def test_bounds_behind_the_last_segment_repeat_it() -> None:
    """A bound of 0 would be a segment of negative length, which kernels read differently."""
    encoder, bucket = model().encoder, BUCKETS[2]
    plan = encoder.plan([item(1, 2, 6, 0), item(3, 1, 2, 1)])
    buffers = exact_buffers(encoder.buffer_specs(bucket), plan, CPU)
    for name in ("cu_seqlens", "cu_window_seqlens"):
        bounds = buffers[name].tolist()
        assert bounds == sorted(bounds) and bounds[-1] == plan.required["patches"]


@given(rows=st.integers(1, 30), columns=st.integers(1, 30), window=st.integers(1, 6))
def test_windows_of_any_frame(rows: int, columns: int, window: int) -> None:
    """Every embedding row has one place, a window holds what its square of the frame holds, and none is empty."""
    frame = windowed_frame(2 * rows, 2 * columns, 2, window)
    assert sorted(frame.order.tolist()) == list(range(rows * columns))
    assert len(frame.lengths) == num_windows(rows, columns, window)
    assert frame.lengths.min() > 0 and frame.lengths.sum() == 4 * rows * columns
    square = (frame.order // columns // window) * (-(-columns // window)) + frame.order % columns // window
    assert square.tolist() == np.repeat(np.arange(len(frame.lengths)), frame.lengths // 4).tolist()
    units = frame.coordinates.reshape(-1, 4, 2)
    assert (units[:, 0] // 2 @ np.array([columns, 1])).tolist() == frame.order.tolist()
    assert (units - units[:, :1] == [[0, 0], [0, 1], [1, 0], [1, 1]]).all()


@cache
def published_buckets() -> list[Bucket]:
    encoder = load_model(DIRECTORY, torch.device("meta"), torch.float32, "random").encoder
    encoder.images = replace(encoder.images, max_pixels=12_845_056)
    return encoder.default_buckets()


def picture(height: int, width: int, frames: int = 1) -> MediaItem:
    h, w = smart_resize(height, width, factor=28, min_pixels=3136, max_pixels=12_845_056)
    return grid_item(frames, h // 14, w // 14)


USUAL = {
    "448x448": [picture(448, 448)],
    "640x480": [picture(480, 640)],
    "1024x1024": [picture(1024, 1024)],
    "1920x1080": [picture(1080, 1920)],
    "16 frames of 448x448": [picture(448, 448, 16)],
    "224x224": [picture(224, 224)],
    "two pictures": [picture(480, 640), picture(448, 448)],
    "four pictures": [picture(448, 448)] * 4,
    "a picture and a video": [picture(1024, 1024), picture(448, 448, 16)],
}


@pytest.mark.parametrize("name", USUAL)
def test_usual_inputs_are_padded_by_at_most_15_percent(name: str) -> None:
    sizes = [model().encoder.required([one]) for one in USUAL[name]]
    buckets = [group.bucket for group in pack(sizes, published_buckets())]
    offered = sum(bucket["patches"] for bucket in buckets if bucket is not None)
    assert None not in buckets
    assert offered <= 1.15 * combine(sizes)["patches"]


@given(height=st.integers(224, 3000), width=st.integers(224, 3000))
def test_windows_of_pictures_from_224_pixels_on_cost_no_larger_bucket(height: int, width: int) -> None:
    required = model().encoder.required([picture(height, width)])
    by_patches = next((b for b in published_buckets() if b["patches"] >= required["patches"]), None)
    assert by_patches is None or fits(by_patches, required)


def test_the_encoder_reads_no_value() -> None:
    encoder = model().encoder
    rows = BufferSpec((35, encoder.config.out_features), torch.float32)
    assert audit(encoder, BUCKETS[1]) == {"embeds": rows}
