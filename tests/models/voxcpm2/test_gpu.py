"""The golden reference and streams in company through the CUDA kernels and real graphs."""

from __future__ import annotations

import pytest
import torch

from tests.models.voxcpm2.company import check, serve
from tests.models.voxcpm2.golden import MODES, expected, model, utterance
from tests.support.speech import SpeechRig

pytestmark = pytest.mark.gpu

TF32 = 2e-3
"""Relative error of the codec, whose products run as the published code runs them on CUDA."""


@pytest.mark.parametrize("buckets", [(), (4,), (1, 16)], ids=["eager", "replayed", "replayed_more"])
def test_free_running(buckets: tuple[int, ...]) -> None:
    rig = SpeechRig(model(torch.float32, "cuda"), device="cuda", buckets=buckets)
    slots = dict(zip((3, 1, 6, 2), MODES, strict=True))
    patches, audio = rig.speak({slot: utterance(mode) for slot, mode in slots.items()})
    for slot, mode in slots.items():
        torch.testing.assert_close(patches[slot].cpu(), expected()[f"{mode}.patches"], atol=1e-4, rtol=0)
    recorded = expected()["zero_shot.audio"][0]
    assert (audio[3].cpu() - recorded).norm() / recorded.norm() < TF32


@pytest.mark.parametrize("count", [1, 2, 7, 16, 33])
def test_streams_in_company(count: int) -> None:
    arrivals: list[list[int]] = [[] for _ in range(5)]
    for number in range(count):
        arrivals[number * number % 5].append(number)
    takes = serve(arrivals, seats=33, buckets=(1, 2, 4, 8, 16, 32, 40), device="cuda")
    assert len(takes) == count
    check(takes, "cuda")


@pytest.mark.parametrize("solver_steps", [10, 4, 6, 16])
def test_bfloat16_replay_equals_eager(solver_steps: int) -> None:
    results = []
    for buckets in ((), (8,)):
        rig = SpeechRig(model(torch.bfloat16, "cuda"), device="cuda", buckets=buckets)
        for slot, mode in enumerate(MODES, start=1):
            rig.seat(slot, utterance(mode))
        slots, conditioning = rig.prefill(dict.fromkeys(range(1, 5), -1))
        first = rig.tail(slots, conditioning, steps=solver_steps)["patch"].clone()
        # Both routes go on from the same patch: bfloat16 trajectories drift apart.
        for slot in slots:
            rig.state["last_patch"][slot] = expected()[f"{MODES[slot - 1]}.patches"][0].to("cuda")
        second = rig.decode(slots, steps=solver_steps)["patch"].clone()
        results.append(torch.stack((first, second)).float())
    assert results[0].isfinite().all()
    torch.testing.assert_close(results[0], results[1], atol=0.15, rtol=0)
