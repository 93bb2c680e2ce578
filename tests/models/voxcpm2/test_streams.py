"""Streams share batches, slots and pages; each must sound as it does alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.voxcpm2.model import VoxCPM2, load_model
from tests.models.voxcpm2.golden import DIRECTORY, MODES, utterance
from tests.support.speech import SpeechRig, Utterance

TOLERANCE = {"atol": 2e-4, "rtol": 0.0}


@cache
def voice() -> VoxCPM2:
    return load_model(DIRECTORY, torch.device("cpu"), torch.float32)


def request(number: int) -> Utterance:
    """Every stream has its own prompt, noise, guidance and length."""
    made = utterance(MODES[number % 4], max_patches=2 + number % 4, min_patches=9)
    made.seed, made.cfg, made.temperature = 1000 + number, 1.5 + 0.25 * number, 1.0 - 0.1 * number
    return made


@cache
def alone(number: int) -> tuple[Tensor, Tensor]:
    patches, audio = SpeechRig(voice()).speak({1: request(number)})
    return patches[1], audio[1]


@dataclass
class Take:
    patches: list[Tensor] = field(default_factory=list)
    audio: list[Tensor] = field(default_factory=list)


def serve(arrivals: list[list[int]], rows: int) -> dict[int, Take]:
    """Ticks of an engine that acts one step late: a stream that ended rides along once more."""
    rig, takes = SpeechRig(voice(), num_slots=6, num_pages=160), {}
    free, waiting, running, surplus = [1, 2, 3, 4, 5], [], {}, []
    for tick in range(20):
        waiting += arrivals[tick] if tick < len(arrivals) else []
        seats = {free.pop(): waiting.pop(0) for _ in range(min(len(free), len(waiting)))}
        takes |= {number: Take() for number in seats.values()}
        for slot, number in seats.items():
            rig.seat(slot, request(number))
        slots = [*running, *surplus]
        if seats:
            slots, conditioning = rig.prefill(dict.fromkeys(seats, -1), slots)
            out = rig.tail(slots, conditioning, rows)
        elif slots:
            out = rig.decode(slots, rows)
        else:
            continue
        audio = rig.vae(slots, rows)
        free += surplus
        running |= seats
        ended = []
        for row, slot in enumerate(slots):
            if slot in surplus:
                assert not out["finished"][row]
                assert not audio[row].any()
                continue
            takes[running[slot]].patches.append(out["patch"][row].clone())
            takes[running[slot]].audio.append(audio[row].clone())
            if out["finished"][row]:
                ended.append(slot)
        for slot in ended:
            del running[slot]
        surplus = ended
    assert not running and not waiting
    return takes


def check(takes: dict[int, Take]) -> None:
    for number, take in takes.items():
        patches, audio = alone(number)
        torch.testing.assert_close(torch.stack(take.patches), patches, **TOLERANCE)
        torch.testing.assert_close(torch.cat(take.audio), audio, **TOLERANCE)


@pytest.mark.parametrize("rows", [0, 8])
def test_streams_enter_and_leave(rows: int) -> None:
    takes = serve([[0, 1], [2], [], [3, 4], [5]], rows)
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
