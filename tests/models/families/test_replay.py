"""Replay equals eager: random items through static buffers that are poisoned before every refill."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.interfaces.capturable import BufferSpec
from service.engine.chat.slot_state import SlotState, allocate_layers
from service.engine.chat.steps import LayersStep, PrefillStep
from service.graphs.buffers import exact_buffers
from tests.models.families.family import CPU, FAMILIES, HEARING, Family, families
from tests.support.audit import audit, audited_decode, audited_verify
from tests.support.encoder_replay import CapturedEncoder, eager, padded
from tests.support.inference import no_gradients as no_gradients


@cache
def captured(family: Family) -> CapturedEncoder:
    return CapturedEncoder(family.model.encoder, family.buckets)


@pytest.mark.parametrize("family", [*families(), HEARING])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(data=st.data())
def test_random_mixes(family: Family, data: st.DataObject) -> None:
    side = st.integers(1, family.side)
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 5), side, side), min_size=1, max_size=5))
    items = [family.random(*shape, seed) for seed, shape in enumerate(shapes)]
    captured(family).check_mix(items, family.embeds_tolerance)


@pytest.mark.parametrize("family", [*families(), HEARING])
def test_items_that_fill_a_bucket(family: Family) -> None:
    for mix in family.full:
        items = [family.random(*shape) for shape in mix]
        required = family.model.encoder.required(items)
        assert any(required[name] == bucket[name] for bucket in family.buckets for name in required)
        captured(family).check_replay(items, family.embeds_tolerance)


@pytest.mark.parametrize("family", [*families(quick=("qwen2_5_vl", "kimi_vl")), HEARING])
def test_padded_rows_of_nan_change_no_bit(family: Family) -> None:
    """Whatever padding holds: bytes, positions, and so queries, keys and values of its rows in every layer."""
    encoder, plain, poison = family.poisoned(family.loaded().encoder)
    items = [family.random(1, 2, 3, 0), family.random(3, 1, 2, 1)]
    rows = sum(one.num_embeds for one in items)
    zeros, nans = (padded(encoder, items, family.buckets[1], **fills) for fills in (plain, poison))
    assert zeros[:rows].isfinite().all() and torch.equal(zeros[:rows], nans[:rows])
    torch.testing.assert_close(nans[:rows], eager(encoder, items), atol=family.embeds_tolerance, rtol=0)
    if family.name in ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe"):  # Others gather rows; padding repeats real ones.
        assert nans[rows:].isnan().all()


@pytest.mark.parametrize("family", families())
def test_the_poison_of_gpu_tests_reaches_every_row(family: Family) -> None:
    encoder = family.loaded().encoder
    with family.nan_run(encoder, encoder.plan([family.random(1, 2, 3, 0)])) as plan:
        buffers = exact_buffers(encoder.buffer_specs(family.largest), plan, CPU)
        assert encoder.forward(buffers, family.largest)["embeds"].isnan().all()


def test_bounds_behind_the_last_segment_repeat_it() -> None:
    """A bound of 0 would be a segment of negative length, which kernels read differently."""
    family = FAMILIES["qwen2_5_vl"]
    plan = family.model.encoder.plan([family.random(1, 2, 6, 0), family.random(3, 1, 2, 1)])
    buffers = exact_buffers(family.model.encoder.buffer_specs(family.buckets[2]), plan, CPU)
    for name in ("cu_seqlens", "cu_window_seqlens"):
        bounds = buffers[name].tolist()
        assert bounds == sorted(bounds) and bounds[-1] == plan.required["patches"]


@pytest.mark.parametrize("family", [*families(), HEARING])
def test_forwards_read_no_value_on_the_host(family: Family) -> None:
    """So they can be captured: an encoder, a prefill with features and without, a decode step without drafts and
    with."""
    encoder, decoder, bucket = family.model.encoder, family.model.decoder, family.buckets[1]
    levels, hidden = getattr(decoder, "feature_levels", 0), decoder.hidden_size
    assert audit(encoder, bucket) == {"embeds": BufferSpec((family.rows(bucket), (1 + levels) * hidden), torch.float32)}
    caches = [spec.allocate(4, 16, CPU, torch.float32) for spec in decoder.cache_specs()]
    state = SlotState(3, 4, decoder.vocab_size, CPU, allocate_layers(decoder.state_specs(), 4, CPU))
    prefill = PrefillStep(LayersStep(decoder, state, caches, 16), torch.float32, cached=False)
    for count in {0, levels}:
        assert audit(prefill, {"tokens": 24, "sequences": 2, "levels": count})["hidden"].shape == (24, hidden)
    assert audited_decode(decoder, 5) == BufferSpec((5, decoder.vocab_size), torch.float32)
    assert audited_verify(decoder, 2, 3) == BufferSpec((6, decoder.vocab_size), torch.float32)
