"""The worker on a GPU: real graphs, real events, the same audio; and what its own timing says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.voxcpm2.model import VoxCPM2
from tests.engine.speech.rig import Heard, WorkerRig, same, same_audio, same_patches
from tests.engine.speech.test_voices import spoken
from tests.engine.speech.test_worker import PROMPTS, golden_request, replayed_as_eagerly, request, segment, streams
from tests.models.voxcpm2 import golden

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_products")]


@pytest.fixture(scope="module")
def model() -> VoxCPM2:
    return golden.never_stopping("cuda")


@pytest.mark.parametrize("buckets", [(), (4,), (1, 16)], ids=["eager", "replayed", "replayed_more"])
def test_the_four_modes_equal_the_reference(buckets: tuple[int, ...]) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        rig = WorkerRig(
            golden.model(torch.float32, "cuda"),
            graphs=bool(buckets),
            buckets=buckets or (4,),
            device="cuda",
            capture_all=True,
        )
        heard = rig.run({0: [golden_request(mode) for mode in golden.MODES]})
    for mode in golden.MODES:
        same_patches(heard[mode].latents, golden.expected()[f"{mode}.patches"].numpy())
    same_audio(heard["zero_shot"].audio, golden.expected()["zero_shot.audio"][0].numpy())
    rig.assert_clean()


@pytest.fixture(scope="module")
def alone(model: VoxCPM2) -> dict[str, Heard]:
    rig = WorkerRig(model, graphs=False, device="cuda")
    for one in streams(33):
        rig.alone(one)
    return dict(rig.heard)


@pytest.mark.parametrize("tail", [True, False], ids=["tail", "rows"])
@pytest.mark.parametrize("count, buckets", [(1, (1,)), (2, (2,)), (7, (1, 4, 8)), (16, (4, 16)), (33, (8, 24, 48))])
def test_streams_that_come_and_go_equal_themselves_alone(
    model: VoxCPM2, alone: dict[str, Heard], count: int, buckets: tuple[int, ...], tail: bool
) -> None:
    """tail: what makes the first patches; otherwise they are rows of decode steps."""
    with torch.cuda.stream(torch.cuda.Stream()):
        rig = WorkerRig(
            model, max_running=count, buckets=buckets, tokens=8192, step_tokens=48, device="cuda", capture_all=True
        )
        rig.first_patches_in_rows(lambda: not tail)
        rig.observations.drain()  # Of captures and of measuring costs, which run tails.
        arrivals, a_turn = streams(count), 1 + count // 8
        heard = rig.run({i: arrivals[a_turn * i : a_turn * (i + 1)] for i in range(-(-count // a_turn))})
    assert len(heard) == count
    for name, got in heard.items():
        same(got, alone[name])
    rig.assert_clean()
    routes = rig.routes()
    assert {("prefill", "replay"), ("decode", "replay"), ("vae", "replay")} <= routes
    assert (("tail", "replay") in routes) == tail
    assert ("decode", "eager") not in routes and ("vae", "eager") not in routes


@pytest.mark.parametrize("prompts", PROMPTS, ids=str)
def test_prompts_around_the_sizes_of_captured_prefills(model: VoxCPM2, prompts: list[tuple[int, int]]) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        replayed_as_eagerly(model, prompts, "cuda")


def test_predicted_step_times_are_close_to_measured_ones(model: VoxCPM2) -> None:
    """From the second stream on; the cost model learns from events on the device."""
    with torch.cuda.stream(torch.cuda.Stream()):
        rig = WorkerRig(model, buckets=(1, 4), device="cuda")
        rig.alone(request("warm", segment("Two red boats.", 30)))
        rig.observations.drain()
        rig.alone(request("measured", segment("Two red boats.", 60)))
    ratios = [event.value for event in rig.events("step_prediction_ratio") if event.labels["kind"] == "decode"]
    assert len(ratios) > 50
    assert 0.7 < float(np.median(ratios)) < 1.4


def test_streams_that_share_a_voice_equal_themselves_alone(model: VoxCPM2) -> None:
    """Over a cache that is too small for all; prompts behind shared pages are replayed."""
    requests = [spoken(number, voice) for number, voice in enumerate((3, 3, 2, 3, 0, 2, 1, 3, 3, 2))]
    alone = [WorkerRig(model, graphs=False, device="cuda").alone(one) for one in requests]
    with torch.cuda.stream(torch.cuda.Stream()):
        rig = WorkerRig(model, tokens=24 * 16, device="cuda", capture_all=True)
        rig.observations.drain()
        heard = rig.run({3 * turn: requests[2 * turn : 2 * turn + 2] for turn in range(5)})
    for one, expected in zip(requests, alone, strict=True):
        same(heard[one.request_id], expected)
    rig.assert_clean()
    events = rig.observations.drain()
    assert sum(event.value for event in events if event.name == "prefix_cache_hit_tokens_total") >= 32
    routes = {e.labels["route"] for e in events if e.name == "steps_total" and e.labels["kind"] == "prefill"}
    assert routes == {"replay"}
