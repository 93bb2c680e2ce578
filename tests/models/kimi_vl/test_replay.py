"""Replay equals eager: random pictures and videos through static, poisoned buffers; every step passes the audit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.kimi_vl.config import load_config
from models.kimi_vl.processor import load_image_settings
from models.kimi_vl.vision import KimiVisionEncoder
from models.media import MediaItem
from models.protocol import BufferSpec, Capacity, Plan
from service.graphs.accounting import Observations
from service.graphs.audit import audit
from service.graphs.buckets import fits
from service.graphs.buffers import exact_buffers
from service.graphs.pool import GraphPool
from service.graphs.runner import GraphRunner
from tests.models.kimi_vl.golden import PUBLISHED_VISION, item, model, processor, write_config
from tests.support.inline_engine import InlineEngine

CPU = torch.device("cpu")
TOLERANCE = 2e-5
"""Of the golden embeddings: products of other row counts round differently."""
LADDER: list[Capacity] = [
    {"patches": 24, "sequences": 2, "max_seqlen": 24},
    {"patches": 96, "sequences": 6, "max_seqlen": 96},
    {"patches": 256, "sequences": 16, "max_seqlen": 256},
]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@cache
def runner() -> GraphRunner:
    made = GraphRunner("test", "encoder", model().encoder, LADDER, GraphPool(CPU, 1 << 30), Observations())
    while made.capture_next(idle=True):
        pass
    assert made.recorded == LADDER[::-1]
    return made


def eager(items: Sequence[MediaItem]) -> Tensor:
    plan = model().encoder.plan(items)
    buffers = exact_buffers(model().encoder.buffer_specs(plan.needs), plan, CPU)
    return model().encoder.forward(buffers, plan.needs)["embeds"]


def replayed(items: Sequence[MediaItem]) -> Tensor:
    """Through the static buffers, whose every byte, and the last outputs, are poisoned before the refill."""
    route = runner()
    assert route._static is not None
    route._static.device.fill_(255)
    for bucket in route._buckets.values():
        for output in bucket.recording.outputs.values():
            output.fill_(float("nan"))
    run = route.run(model().encoder.plan(items))
    assert run.route == "replay"
    assert run.outputs["embeds"].isfinite().all()
    return run.outputs["embeds"][: sum(item.num_embeds for item in items)].clone()


even = st.integers(1, 4).map(lambda blocks: 2 * blocks)
pictures = st.lists(st.tuples(even, even), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(st.lists(pictures, min_size=1, max_size=4))
def test_random_mixes(shapes: list[list[tuple[int, int]]]) -> None:
    items = [item(grids, seed) for seed, grids in enumerate(shapes)]
    alone = torch.cat([eager([one]) for one in items])
    torch.testing.assert_close(eager(items), alone, atol=TOLERANCE, rtol=0)
    needs = model().encoder.needs(items)
    assert needs == model().encoder.plan(items).needs
    if any(fits(capacity, needs) for capacity in LADDER):
        torch.testing.assert_close(replayed(items), alone, atol=TOLERANCE, rtol=0)


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
    torch.testing.assert_close(replayed(items), eager(items), atol=TOLERANCE, rtol=0)


def test_padded_rows_of_nan_change_no_bit() -> None:
    encoder = model().encoder
    items = [item([(4, 6)], 0), item([(2, 4), (6, 2)], 1)]
    plan = encoder.plan(items)
    rows = sum(item.num_embeds for item in items)
    outputs = []
    for position, pixel in ((0.0, 0), (float("nan"), 255)):
        fills = {**plan.fills, "positions": position, "pixels": pixel}
        padded = Plan(plan.arrays, plan.needs, plan.tensors, fills)
        buffers = exact_buffers(encoder.buffer_specs(LADDER[1]), padded, CPU)
        outputs.append(encoder.forward(buffers, LADDER[1])["embeds"][:rows])
    assert torch.isfinite(outputs[0]).all()
    assert torch.equal(outputs[0], outputs[1])


def test_the_position_cache_is_bounded_and_exact() -> None:
    encoder = model().encoder
    grids = [(2 * rows, 2 * columns) for rows in range(1, 10) for columns in range(1, 10)]
    first = [encoder._positions(grid).clone() for grid in grids]
    assert len(encoder._interpolated) < len(grids)
    assert all(torch.equal(encoder._positions(grid), rows) for grid, rows in zip(grids, first, strict=True))


@pytest.mark.parametrize(("limit", "largest"), [(4096, 8960), (16384, 17928)])
def test_the_ladder_holds_every_picture_of_the_checkpoint(tmp_path: Path, limit: int, largest: int) -> None:
    write_config(tmp_path, vision=PUBLISHED_VISION, limit=limit)
    with torch.device("meta"):
        encoder = KimiVisionEncoder(load_config(tmp_path), load_image_settings(tmp_path))
    ladder = encoder.default_ladder()
    budgets = [capacity["patches"] for capacity in ladder]
    assert budgets == sorted(set(budgets))
    assert budgets[-1] == largest >= load_image_settings(tmp_path).most_patches
    assert all(capacity["max_seqlen"] == capacity["patches"] for capacity in ladder)
    assert encoder.buffer_specs(ladder[-1])["positions"].shape == (largest, 1152)
    # Steps of more than a half would waste more than packing saves.
    assert all(following <= 1.5 * budget for budget, following in pairwise(budgets))


def test_the_encoder_passes_the_audit() -> None:
    for capacity in LADDER:
        assert audit(model().encoder, capacity) == {"embeds": BufferSpec((capacity["patches"] // 4, 96), torch.float32)}


@pytest.mark.parametrize("full", [False, True])
def test_the_decode_step_passes_the_audit(full: bool) -> None:
    worker = InlineEngine(model(), processor(), encoder_buckets=(256,)).worker
    step = worker._runner._decode[full].capturable
    outputs = audit(step, {"rows": 4, "pages": 8})
    assert outputs["results"] == BufferSpec((4, 2), torch.int32)
    if full:
        assert outputs["logits"] == BufferSpec((4, processor().vocab_size), torch.float32)
