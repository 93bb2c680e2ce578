"""Streams share batches, slots and pages; each must sound as it does alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.graphs.audit import audit
from tests.models.voxcpm2.company import TOLERANCE, check, request, serve, voice
from tests.support.speech import SpeechRig


@pytest.mark.parametrize("buckets", [(), (1, 2, 4, 8)], ids=["eager", "replayed"])
def test_streams_enter_and_leave(buckets: tuple[int, ...]) -> None:
    takes = serve([[0, 1], [2], [], [3, 4], [5]], buckets=buckets)
    assert sorted(takes) == [0, 1, 2, 3, 4, 5]
    check(takes)


@settings(max_examples=4, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=6, max_size=6), st.sampled_from([0, 7]))
def test_any_arrival_order(ticks: list[int], rows: int) -> None:
    arrivals: list[list[int]] = [[] for _ in range(4)]
    for number, tick in enumerate(ticks):
        arrivals[tick].append(number)
    check(serve(arrivals, rows))


@pytest.mark.parametrize("sizes", [(1, 30, -1), (7, 7, -1), (33, -1)])
def test_prefill_in_chunks(sizes: tuple[int, ...]) -> None:
    whole = SpeechRig(voice())
    whole.seat(1, request(3))
    _, expected = whole.prefill({1: -1})
    rig = SpeechRig(voice())
    rig.seat(2, request(3))
    for size in sizes:
        ready, conditioning = rig.prefill({2: size})
        assert bool(ready) == (size < 0)
    torch.testing.assert_close(conditioning, expected, **TOLERANCE)


def test_surplus_rows_change_nothing() -> None:
    rig = SpeechRig(voice())
    rig.speak({3: request(1)})
    before = {name: table[3].clone() for name, table in rig.state.items()}
    pages = rig.seats[3].pages.pages
    keys = rig.cache.caches[0]["k"].view(-1, 16, *rig.cache.caches[0]["k"].shape[1:])[pages].clone()
    out = rig.decode([3], rows=4)
    audio = rig.vae([3], rows=2)
    assert not out["finished"].any()
    assert not audio.any()
    for name, table in rig.state.items():
        torch.testing.assert_close(table[3], before[name], atol=0, rtol=0)
    after = rig.cache.caches[0]["k"].view(-1, 16, *rig.cache.caches[0]["k"].shape[1:])[pages]
    torch.testing.assert_close(after, keys, atol=0, rtol=0, equal_nan=True)


def test_priming_leaves_other_slots() -> None:
    rig = SpeechRig(voice())
    rig.state["vae"][1:] = 7.0
    rig.seat(3, request(2))
    assert (rig.state["vae"][[1, 2, 4, 5, 6, 7]] == 7.0).all()
    assert not (rig.state["vae"][3] == 7.0).any()


def test_solver_steps_change_the_patch() -> None:
    patches = []
    for steps in voice().solver_steps:
        rig = SpeechRig(voice())
        rig.seat(1, request(0))
        slots, conditioning = rig.prefill({1: -1})
        patches.append(rig.tail(slots, conditioning, steps=steps)["patch"])
    assert all(torch.isfinite(patch).all() for patch in patches)
    assert len({patch.sum().item() for patch in patches}) == len(patches)


def test_long_clips_are_encoded_in_pieces() -> None:
    vae = voice().vae
    wave = torch.randn(9 * 16000 + 123, generator=torch.Generator().manual_seed(3)) * 0.1
    padded = torch.nn.functional.pad(wave, (0, -wave.shape[0] % 640))
    torch.testing.assert_close(vae.encode(wave), vae.encoder(padded[None, None])[0], **TOLERANCE)


def test_steps_can_be_captured() -> None:
    rig = SpeechRig(voice())
    rows = {"rows": 3}
    patch, flags = ((3, 4, 8), torch.float32), ((3,), torch.bool)
    made = {"patch": patch, "stopped": flags, "finished": flags}
    for step, capacity, outputs in (
        (voice().decode_step(10, rig.state, rig.cache.caches, rig.cache.page_size), rows, made),
        (voice().tail(10, rig.state), rows, made),
        (voice().vae_step(rig.state), rows, {"audio": ((3, 7680), torch.float32)}),
    ):
        audited = audit(step, capacity)
        assert {name: (spec.shape, spec.dtype) for name, spec in audited.items()} == outputs
