"""Replay equals eager: random pictures and videos through static buffers, poisoned before every refill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from models.decoder import CausalDecoder
from models.layers.kv_cache import PagedBatch
from models.media import MediaItem
from models.protocol import Capacity
from models.qwen2_vl.model import load_model
from models.qwen2_vl.vision import Qwen2VLEncoder
from service.graphs.accounting import Observations
from service.graphs.buckets import fits
from service.graphs.buffers import exact_buffers
from service.graphs.pool import GraphPool
from service.graphs.runner import GraphRunner
from tests.support.chat_golden import GOLDEN

CPU = torch.device("cpu")
TOLERANCE = 2e-5
MODEL = load_model(GOLDEN / "qwen2_vl", CPU, torch.float32)
LADDER: list[Capacity] = [
    {"patches": 16, "sequences": 3, "max_seqlen": 16},
    {"patches": 60, "sequences": 4, "max_seqlen": 60},
    {"patches": 240, "sequences": 24, "max_seqlen": 64},
]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def route() -> GraphRunner:
    with torch.inference_mode():
        made = GraphRunner("test", "encoder", MODEL.encoder, LADDER, GraphPool(CPU, 1 << 30), Observations())
        while made.capture_next(idle=True):
            pass
    assert made.recorded == LADDER[::-1]
    return made


def item(num_frames: int, rows: int, columns: int, seed: int) -> MediaItem:
    """Rows and columns of 2x2 blocks."""
    values = np.random.default_rng(seed)
    frames = tuple(values.integers(0, 256, (28 * rows, 28 * columns, 3), dtype=np.uint8) for _ in range(num_frames))
    pairs = -(-num_frames // 2)
    patches = pairs * rows * columns * 4
    return MediaItem(
        kind="image" if num_frames == 1 else "video",
        frames=frames,
        arrays={"grid_thw": np.array([pairs, 2 * rows, 2 * columns], dtype=np.int32)},
        num_patches=patches,
        num_sequences=pairs,
        num_embeds=patches // 4,
        digest=bytes(32),
    )


def eager(encoder: Qwen2VLEncoder, items: Sequence[MediaItem]) -> Tensor:
    plan = encoder.plan(items)
    assert encoder.needs(items) == plan.needs
    return encoder.forward(exact_buffers(encoder.buffer_specs(plan.needs), plan, CPU), plan.needs)["embeds"]


def replayed(route: GraphRunner, items: Sequence[MediaItem]) -> Tensor:
    """Every byte of the static buffers, and the last outputs, are poisoned before the refill."""
    assert route._static is not None
    route._static.device.fill_(255)
    for bucket in route._buckets.values():
        for output in bucket.recording.outputs.values():
            output.fill_(float("nan"))
    run = route.run(MODEL.encoder.plan(items))
    assert run.route == "replay"
    return run.outputs["embeds"][: sum(item.num_embeds for item in items)].clone()


shapes = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))


@settings(max_examples=40, deadline=None)
@given(mix=st.lists(shapes, min_size=1, max_size=5))
def test_random_mixes(route: GraphRunner, mix: list[tuple[int, int, int]]) -> None:
    items = [item(*shape, seed) for seed, shape in enumerate(mix)]
    alone = torch.cat([eager(MODEL.encoder, [one]) for one in items])
    torch.testing.assert_close(eager(MODEL.encoder, items), alone, atol=TOLERANCE, rtol=0)
    if any(fits(capacity, MODEL.encoder.needs(items)) for capacity in LADDER):
        torch.testing.assert_close(replayed(route, items), alone, atol=TOLERANCE, rtol=0)


def test_an_item_that_fills_a_bucket_and_the_largest_number_of_items(route: GraphRunner) -> None:
    full = [item(1, 3, 5, 0)]
    torch.testing.assert_close(replayed(route, full), eager(MODEL.encoder, full), atol=TOLERANCE, rtol=0)
    many = [item(1, 1 + seed % 2, 1, seed) for seed in range(24)]
    torch.testing.assert_close(replayed(route, many), eager(MODEL.encoder, many), atol=TOLERANCE, rtol=0)


def test_padded_rows_of_nan_change_no_bit() -> None:
    """A byte that only padding holds is NaN: queries, keys and values of the padded rows are NaN in every layer."""
    encoder = load_model(GOLDEN / "qwen2_vl", CPU, torch.float32).encoder
    encoder.byte_values.view(3, 256)[:, 255] = float("nan")
    items = [item(1, 2, 3, 0), item(3, 1, 2, 1)]
    items = [
        MediaItem(
            one.kind,
            tuple(frame.clip(0, 254) for frame in one.frames),
            one.arrays,
            one.num_patches,
            one.num_sequences,
            one.num_embeds,
            one.digest,
        )
        for one in items
    ]
    plan, capacity = encoder.plan(items), LADDER[1]
    rows = sum(one.num_embeds for one in items)
    outputs = []
    for filler in (0, 255):
        padded = type(plan)(plan.arrays, plan.needs, plan.tensors, {**plan.fills, "pixels": filler})
        buffers = exact_buffers(encoder.buffer_specs(capacity), padded, CPU)
        outputs.append(encoder.forward(buffers, capacity)["embeds"])
    assert outputs[1][rows:].isnan().all()
    assert outputs[0].isfinite().all()
    assert torch.equal(outputs[0][:rows], outputs[1][:rows])


def test_the_default_ladder_ascends_and_holds_four_of_the_largest_pictures() -> None:
    ladder = MODEL.encoder.default_ladder()
    assert [capacity["patches"] for capacity in ladder] == sorted(capacity["patches"] for capacity in ladder)
    largest = MODEL.encoder.images.max_pixels // 14**2
    assert ladder[-1]["patches"] >= min(4 * largest, 16384)
    assert all(capacity["max_seqlen"] == capacity["patches"] for capacity in ladder)


def test_the_encoder_reads_no_value() -> None:
    """Fake tensors have no values: .item(), .tolist(), nonzero and data-dependent shapes raise."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        specs = MODEL.encoder.buffer_specs(LADDER[1])
        buffers = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in specs.items()}
        embeds = MODEL.encoder.forward(buffers, LADDER[1])["embeds"]
    assert tuple(embeds.shape) == (15, 96)


def test_a_decode_step_reads_no_value() -> None:
    decoder: CausalDecoder = MODEL.decoder
    with FakeTensorMode(allow_non_fake_inputs=True):
        caches = [spec.allocate(4, 16, CPU, torch.float32) for spec in decoder.cache_specs()]
        batch = PagedBatch(
            caches=caches,
            page_size=16,
            slot_mapping=torch.empty(5, dtype=torch.int64),
            num_decode_rows=5,
            block_tables=torch.empty((5, 3), dtype=torch.int32),
            seq_lens=torch.empty(5, dtype=torch.int32),
        )
        hidden = decoder.embed(torch.empty(5, dtype=torch.int64))
        logits = decoder.logits(decoder.forward(hidden, torch.empty((3, 5), dtype=torch.int32), batch))
    assert tuple(logits.shape) == (5, 316) and logits.dtype == torch.float32
