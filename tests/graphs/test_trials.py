"""A bucket takes the route that was measured faster in service, and keeps it until the other is clearly faster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.interfaces.capturable import Bucket
from service.graphs.observations import Observations, Route
from service.graphs.pool import GraphPool, RouteSeconds
from service.graphs.runner import GraphRunner, RouteTrial
from tests.support.tiny_chat import tiny_item, tiny_model

NEAR = RouteSeconds(eager=1.1, replay=1.0)
LARGE = {"patches": 48, "sequences": 6, "max_seqlen": 48}


def serve(trial: RouteTrial, seconds: dict[Route, float], calls: int) -> Counter[Route]:
    taken: Counter[Route] = Counter()
    for _ in range(calls):
        route = trial.route()
        taken[route] += 1
        trial.observe(route, seconds[route])
    return taken


def test_what_was_not_measured_or_is_much_slower_eagerly_is_replayed_without_a_trial() -> None:
    for captured in (None, RouteSeconds(eager=12.5, replay=1.7)):
        assert serve(RouteTrial(captured), {"eager": 0.1, "replay": 1.0}, 300) == {"replay": 300}


@pytest.mark.parametrize("faster", ["eager", "replay"])
def test_both_routes_are_tried_in_turn_and_then_the_faster_one_is_taken(faster: Route) -> None:
    trial = RouteTrial(NEAR)
    seconds: dict[Route, float] = {"eager": 1.0, "replay": 1.0, faster: 0.9}
    first = serve(trial, seconds, 8)
    assert first == {"eager": 4, "replay": 4}
    assert serve(trial, seconds, 100) == {faster: 100}
    later = serve(trial, seconds, 1280)
    assert 1 <= later["eager" if faster == "replay" else "replay"] <= 10


def test_the_first_call_of_a_route_and_one_that_was_held_up_do_not_decide() -> None:
    trial = RouteTrial(NEAR)
    for route, seconds in (("eager", 90.0), ("replay", 0.1), ("eager", 0.8), ("replay", 1.0), ("eager", 50.0)):
        trial.observe(route, seconds)
    for route, seconds in (("replay", 1.0), ("eager", 0.8), ("replay", 1.0)):
        trial.observe(route, seconds)
    assert trial.route() == "eager"


def test_a_route_is_left_only_for_one_that_is_clearly_faster() -> None:
    trial = RouteTrial(NEAR)
    serve(trial, {"eager": 0.99, "replay": 1.0}, 50)
    assert trial.route() == "replay"
    serve(trial, {"eager": 0.9, "replay": 1.0}, 2000)
    assert trial.route() == "eager"
    serve(trial, {"eager": 1.0, "replay": 0.99}, 2000)
    assert trial.route() == "eager"
    serve(trial, {"eager": 1.0, "replay": 0.8}, 2000)
    assert trial.route() == "replay"


def test_a_runner_counts_trials_and_what_they_decide_as_measured() -> None:
    with torch.inference_mode():
        encoder, observations = tiny_model().encoder, Observations()
        pool = GraphPool(torch.device("cpu"), 64 << 20)
        buckets = encoder.default_buckets()
        runner = GraphRunner("tiny", "encoder", encoder, buckets, pool, observations, measured=True)
        while runner.capture_next(idle=False):
            pass
        for key, graph in runner._graphs.items():
            near = NEAR if graph.bucket["patches"] >= 48 else RouteSeconds(eager=12.0, replay=1.0)
            runner._graphs[key] = replace(graph, capture=replace(graph.capture, seconds=near))
        runner._choices.clear()
        observations.drain()
        seconds = {"eager": 0.8, "replay": 1.0}
        expected = None
        for patches in (40, 10) * 30:
            plan = encoder.plan([tiny_item(patches, [patches])])
            run = runner.run(plan)
            assert run.bucket is not None and run.bucket["patches"] == {40: 48, 10: 16}[patches]
            runner.observe(run.bucket, run.route, seconds[run.route])
            if patches == 40:
                embeds = run.outputs["embeds"][:20].clone()
                expected = embeds if expected is None else expected
                torch.testing.assert_close(embeds, expected, atol=1e-5, rtol=1e-5)
    steps = {
        (event.labels["route"], event.labels["reason"]): event.value
        for event in observations.drain()
        if event.name == "steps_total"
    }
    assert steps == {("replay", "captured"): 30 + 4, ("eager", "measured"): 26}


def test_a_trial_that_runs_out_of_memory_is_replayed_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    observations = Observations()
    with torch.inference_mode():
        encoder = tiny_model().encoder
        pool = GraphPool(torch.device("cpu"), 64 << 20)
        runner = GraphRunner("tiny", "encoder", encoder, [LARGE], pool, observations, measured=True)
        runner.capture_next(idle=False)
        for key, graph in runner._graphs.items():
            runner._graphs[key] = replace(graph, capture=replace(graph.capture, seconds=NEAR))
        observations.drain()
        plan, forward, failures = encoder.plan([tiny_item(1, [40])]), encoder.forward, list[Bucket]()
        expected = runner.run(plan).outputs["embeds"][:20].clone()

        def without_memory(buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
            if bucket["patches"] == 40:  # the exact size: the replay is of 48
                failures.append(bucket)
                raise torch.OutOfMemoryError("CUDA out of memory")
            return forward(buffers, bucket)

        monkeypatch.setattr(encoder, "forward", without_memory)
        for _ in range(300):
            run = runner.run(plan)
            assert run.route == "replay" and run.bucket == LARGE
            torch.testing.assert_close(run.outputs["embeds"][:20], expected)
            runner.observe(LARGE, run.route, 1.0)
    steps = {(e.labels["route"], e.labels["reason"]): e.value for e in observations.drain() if e.name == "steps_total"}
    assert len(failures) == 1 and steps == {("replay", "captured"): 301}
