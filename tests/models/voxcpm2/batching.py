"""Streams that come and go in one batch, and what each of them says alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from models.voxcpm2.model import VoxCPM2, load_model
from tests.models.voxcpm2.golden import DIRECTORY, MODES, PREFILLS, utterance
from tests.support.speech import SpeechRig, Utterance

TOLERANCE = {"atol": 2e-4, "rtol": 0.0}


@cache
def voice(device: str = "cpu") -> VoxCPM2:
    return load_model(DIRECTORY, torch.device(device), torch.float32)


def request(number: int) -> Utterance:
    """Every stream has its own prompt, noise, guidance and length."""
    made = utterance(MODES[number % 4], max_patches=2 + number % 4, min_patches=9)
    made.seed, made.cfg, made.temperature = 1000 + number, 1.5 + 0.25 * (number % 5), 1.0 - 0.05 * (number % 8)
    return made


@cache
def alone(number: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    patches, audio = SpeechRig(voice(device), device=device).speak({1: request(number)})
    return patches[1], audio[1]


@dataclass
class Take:
    patches: list[Tensor] = field(default_factory=list)
    audio: list[Tensor] = field(default_factory=list)


def serve(
    arrivals: list[list[int]], rows: int = 0, *, slots: int = 5, buckets: Sequence[int] = (), device: str = "cpu"
) -> dict[int, Take]:
    """Ticks of an engine that acts one step late: a stream that ended rides along once more."""
    prefills = PREFILLS if buckets else ()
    rig = SpeechRig(
        voice(device), num_slots=slots + 1, num_pages=400, buckets=buckets, prefills=prefills, device=device
    )
    takes: dict[int, Take] = {}
    running: dict[int, int] = {}
    free, waiting, overrun = list(range(1, slots + 1)), [], []
    for tick in range(30):
        waiting += arrivals[tick] if tick < len(arrivals) else []
        new = {free.pop(): waiting.pop(0) for _ in range(min(len(free), len(waiting)))}
        takes |= {number: Take() for number in new.values()}
        for slot, number in new.items():
            rig.admit(slot, request(number))
        slots = [*running, *overrun]
        if new and len(slots) < 3:
            # Few rows are part of the ragged pass. More of them step behind a pass over prompts alone, with the first
            # patches or without.
            slots, conditioning = rig.prefill(dict.fromkeys(new, -1), slots)
            out = rig.tail(slots, conditioning, rows)
        elif new:
            ready, conditioning = rig.prefill(dict.fromkeys(new, -1))
            if tick % 2:
                rig.condition(ready, conditioning)
                slots = [*slots, *ready]
                out = rig.decode(slots, rows)
            else:
                first, rest = rig.tail(ready, conditioning, rows), rig.decode(slots, rows)
                out = {name: torch.cat((rest[name], first[name])) for name in first}
                slots = [*slots, *ready]
        elif slots:
            out = rig.decode(slots, rows)
        else:
            continue
        audio = rig.vae(slots, out, rows)
        free += overrun
        running |= new
        ended = []
        for row, slot in enumerate(slots):
            if slot in overrun:
                assert not out["finished"][row]
                assert not audio[row].any()
                continue
            takes[running[slot]].patches.append(out["patch"][row].clone())
            takes[running[slot]].audio.append(audio[row].clone())
            if out["finished"][row]:
                ended.append(slot)
        for slot in ended:
            del running[slot]
        overrun = ended
    assert not running and not waiting
    return takes


def check(takes: dict[int, Take], device: str = "cpu") -> None:
    for number, take in takes.items():
        patches, audio = alone(number, device)
        torch.testing.assert_close(torch.stack(take.patches), patches, **TOLERANCE)
        torch.testing.assert_close(torch.cat(take.audio), audio, **TOLERANCE)
