"""Replay equals eager: random pictures and videos through static buffers, poisoned before every refill."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.interfaces.capturable import Bucket, BufferSpec
from models.qwen2_vl.config import ImageSettings
from models.qwen3_vl.model import load_model
from models.qwen3_vl.vision import Qwen3VLEncoder
from service.engine.chat.steps import PrefillStep
from service.graphs.buckets import cheapest
from tests.models.qwen3_vl.golden import BOTH, CPU, DENSE, Golden
from tests.support.audit import audit, audited_decode
from tests.support.encoder_replay import CapturedEncoder, padded, random_item
from tests.support.inference import no_gradients as no_gradients

TOLERANCE = 2e-5
MODEL = DENSE.model
BUCKETS: list[Bucket] = [
    {"patches": 16, "sequences": 3, "max_seqlen": 16},
    {"patches": 60, "sequences": 4, "max_seqlen": 60},
    {"patches": 240, "sequences": 24, "max_seqlen": 64},
]


@pytest.fixture(scope="module")
def captured() -> CapturedEncoder:
    return CapturedEncoder(MODEL.encoder, BUCKETS)


item = partial(random_item, block=32)
shapes = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))


@settings(max_examples=15, deadline=None)
@given(mix=st.lists(shapes, min_size=1, max_size=5))
def test_random_mixes(captured: CapturedEncoder, mix: list[tuple[int, int, int]]) -> None:
    captured.check_mix([item(*shape, seed) for seed, shape in enumerate(mix)], TOLERANCE)


def test_padded_rows_of_nan_change_no_bit() -> None:
    """A byte that only padding holds is NaN: queries, keys, values and features of the padded rows are NaN."""
    encoder = load_model(DENSE.directory, CPU, torch.float32).encoder
    encoder.byte_values.view(3, 256)[:, 255] = float("nan")
    items = [item(1, 2, 3, 0), item(3, 1, 2, 1)]
    rows = sum(one.num_embeds for one in items)
    zeros, nans = (padded(encoder, items, BUCKETS[1], pixels=byte) for byte in (0, 255))
    assert nans[rows:].isnan().all()
    assert zeros.isfinite().all()
    assert torch.equal(zeros[:rows], nans[:rows])


@pytest.mark.parametrize(
    ("patches", "pairs"),
    [(784, 1), (1200, 1), (4096, 1), (8160, 1), (6272, 8)],
    ids=["448x448", "640x480", "1024x1024", "1920x1080", "16 frames of 448x448"],
)
def test_common_inputs_pad_a_published_bucket_by_15_percent_at_most(patches: int, pairs: int) -> None:
    published = Qwen3VLEncoder(DENSE.model.encoder.tower, ImageSettings(65_536, 16_777_216, (0.5,) * 3, (0.5,) * 3))
    bucket_list = published.default_buckets()
    assert [bucket["patches"] for bucket in bucket_list] == sorted(bucket["patches"] for bucket in bucket_list)
    assert bucket_list[-1]["patches"] == 16384
    for count in range(1, 5):
        total = count * patches
        if total > 16384:
            break
        required = {"patches": total, "sequences": count * pairs, "max_seqlen": patches // pairs}
        bucket = cheapest(bucket_list, required)
        assert bucket is not None and bucket["patches"] <= 1.15 * total, (count, bucket)


@pytest.mark.parametrize("golden", [pytest.param(golden, id=kind) for kind, golden in BOTH.items()])
def test_the_networks_read_no_value(golden: Golden) -> None:
    decoder, levels = golden.model.decoder, golden.model.decoder.feature_levels
    width = decoder.config.block.hidden_size
    embeds = audit(golden.model.encoder, BUCKETS[1])["embeds"]
    assert embeds.shape == (15, (1 + levels) * width)
    caches = [spec.allocate(4, 16, CPU, torch.float32) for spec in decoder.cache_specs()]
    prefill = PrefillStep(decoder, caches, 16, width, torch.float32)
    for count in (0, levels):
        hidden = audit(prefill, {"tokens": 24, "sequences": 2, "levels": count})["hidden"]
        assert hidden.shape == (24, width)
    assert audited_decode(decoder, 5) == BufferSpec((5, decoder.vocab_size), torch.float32)
