"""A pass that runs out of memory is launched once more, and nobody notices; if it fails again, its requests fail."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from service.engine.chat import runner as chat_runner
from service.engine.chat.guided.masks import MaskJob
from service.engine.core import oom_retry as second_try
from tests.engine.chat.test_guided_rows import GRAMMAR
from tests.support.inference import no_gradients as no_gradients
from tests.support.inline_engine import InlineEngine
from tests.support.out_of_memory import MESSAGE, OutOfMemory, retries
from tests.support.tiny_chat import END_TOKEN, tiny_item, tiny_prompt
from tests.support.waiting import wait

TEXT = tiny_prompt([[1, 2, 3, 4, 5]])
PICTURE = tiny_item(1, [8, 6])
OTHER = tiny_item(2, [8])
PROMPTS = {
    "text": TEXT,
    "picture": tiny_prompt([[1, 2], PICTURE, [3]]),
    "long": tiny_prompt([list(range(60)), OTHER, list(range(40))]),
    "after a prefix": tiny_prompt([list(range(60)), OTHER, [7]]),
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 3},
    "full": {"temperature": 1.2, "seed": 5, "top_k": 20, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "logprobs": {"temperature": 1.0, "seed": 7, "logprobs": 2},
}
GUIDED: dict[str, Any] = {"grammar": GRAMMAR, "temperature": 1.0, "seed": 9, "stop_token_ids": (END_TOKEN,)}


def counted(engine: InlineEngine) -> dict[tuple[str, str], int]:
    return retries(event for outputs in engine.channel.outputs for event in outputs.observations)


def answers(engine: InlineEngine, *, guided: bool) -> dict[str, list[int]]:
    """Of requests that come one after the other, so that prompts are computed beside decode rows."""
    names = []
    for kind, sampling in SAMPLINGS.items():
        for name, prompt in PROMPTS.items():
            names.append(f"{name} {kind}")
            engine.submit(names[-1], prompt, max_tokens=20, **sampling)
            engine.turn()
        if guided:
            names.append(f"guided {kind}")
            engine.submit(names[-1], TEXT, max_tokens=60, **GUIDED)
            engine.turn()
    engine.run()
    engine.assert_nothing_left()
    assert not engine.failures()
    return {name: engine.tokens(name) for name in names}


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"max_running": 8},
        {"max_running": 8, "graphs": False},
        {"max_running": 8, "mixed_route": "eager"},
        {"max_running": 8, "num_pages": 60},
    ],
    ids=["replayed", "eager", "mixed", "preempted"],
)
def test_no_answer_changes_if_every_pass_runs_out_of_memory_at_first(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], guided: bool
) -> None:
    expected = answers(InlineEngine(**settings), guided=guided)
    engine = InlineEngine(**settings)
    runner, vision = engine.worker._runner, engine.worker._vision
    faults = (
        OutOfMemory(monkeypatch, runner, "_backbone").at_first_tries_of(runner, "_launch_on_route"),
        OutOfMemory(monkeypatch, vision, "_store").at_first_tries_of(vision, "_launch_pass"),
    )
    assert answers(engine, guided=guided) == expected
    found = counted(engine)
    assert {outcome for _, outcome in found} == {"succeeded"}
    assert {kind for kind, _ in found} == {"encoder", "prefill", "mixed"}
    assert sum(found.values()) == sum(fault.failed for fault in faults) > 10
    if "num_pages" in settings:
        assert engine.counter("preemptions_total")


def test_nor_if_a_replayed_prefill_runs_out_of_memory_behind_its_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside decode rows, which are replayed after it: its rows are sampled a second time."""
    expected, engine = answers(InlineEngine(max_running=8), guided=False), InlineEngine(max_running=8)
    runner = engine.worker._runner

    def beside(step: Any, hidden: Tensor, route: str, kind: str) -> bool:
        return kind == "mixed" and not len(step.slots)

    fault = OutOfMemory(monkeypatch, runner, "_sample_or_hold", chosen=beside).at_first_tries_of(
        runner, "_launch_on_route"
    )
    assert answers(engine, guided=False) == expected
    assert counted(engine) == {("mixed", "succeeded"): fault.failed} and fault.failed > 5


@pytest.mark.parametrize("graphs", [True, False])
def test_a_prefill_that_runs_out_of_memory_twice_fails_alone(
    monkeypatch: pytest.MonkeyPatch, graphs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = InlineEngine(graphs=graphs)
    engine.submit("running", TEXT, max_tokens=20)
    for _ in range(4):
        engine.turn()
    with monkeypatch.context() as patched:
        fault = OutOfMemory(patched, engine.worker._runner, "_backbone", chosen=lambda step, *rest: bool(step.chunks))
        engine.submit("unlucky", PROMPTS["picture"])
        with caplog.at_level(logging.WARNING):
            for _ in range(6):
                engine.turn()
    engine.submit("after", TEXT)
    engine.run()
    assert fault.failed == 2 and counted(engine) == {("mixed", "failed"): 1}
    assert {name: (f.status, f.code) for name, f in engine.failures().items()} == {"unlucky": (503, "out_of_memory")}
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"a launch of tiny (mixed) is tried once more: {MESSAGE}", "1 requests of tiny fail"]
    alone = InlineEngine(graphs=False)
    alone.submit("running", TEXT, max_tokens=20)
    alone.run()
    assert engine.tokens("running") == alone.tokens("running") and len(engine.tokens("after")) == 8
    engine.assert_nothing_left()


@pytest.mark.parametrize("graphs", [True, False])
def test_a_picture_whose_pass_runs_out_of_memory_twice_fails_alone(
    monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    engine = InlineEngine(graphs=graphs)

    def with_other(parts: Any, embeds: Tensor) -> bool:
        return any(part.digest == OTHER.digest for part in parts)

    fault = OutOfMemory(monkeypatch, engine.worker._vision, "_store", chosen=with_other)
    engine.submit("running", TEXT, max_tokens=20)
    engine.turn()
    engine.submit("good", tiny_prompt([[1], PICTURE, [2]]))
    engine.submit("bad", tiny_prompt([[1], OTHER, [2]]))
    engine.run()
    assert {name: (f.status, f.code) for name, f in engine.failures().items()} == {"bad": (503, "out_of_memory")}
    assert fault.failed == 4 and counted(engine) == {("encoder", "failed"): 2}, "together, then alone"
    assert len(engine.tokens("running")) == 20 and len(engine.tokens("good")) == 8
    engine.assert_nothing_left()


def test_a_pass_that_has_a_second_try_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that no captured graph holds, as misses too: those are captured in service. Its forward is what fails."""
    prompt = tiny_prompt([[1, 2], tiny_item(1, [100]), [3] * 30])
    expected, engine = InlineEngine(max_step_tokens=100), InlineEngine(max_step_tokens=100)
    faults = [
        OutOfMemory(monkeypatch, engine.worker._vision.runner, "_forward", times=1),
        OutOfMemory(monkeypatch, engine.worker._runner, "_backbone", times=1),
    ]
    for one in (expected, engine):
        one.submit("it", prompt)
        one.run()
    assert [fault.failed for fault in faults] == [1, 1]
    assert counted(engine) == {("encoder", "succeeded"): 1, ("prefill", "succeeded"): 1}
    steps = engine.steps()
    assert steps["encoder", "eager", "no_bucket"] == steps["prefill", "eager", "no_bucket"] == 1
    assert steps == expected.steps() and engine.tokens("it") == expected.tokens("it")
    for runner, other in zip(engine.worker.graph_runners, expected.worker.graph_runners, strict=True):
        assert (runner.misses, runner._demand._calls) == (other.misses, other._demand._calls)


def test_an_encoder_pass_has_a_second_try_while_a_guided_step_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = InlineEngine()
    fault = OutOfMemory(monkeypatch, engine.worker._vision, "_store", times=1)
    engine.submit("guided", TEXT, max_tokens=60, **GUIDED)
    with monkeypatch.context() as patched:
        patched.setattr(MaskJob, "done", False)
        wait(lambda: bool(engine.turn() and engine.worker._in_flight.held), what="a step is held")
        engine.submit("picture", PROMPTS["picture"])
        engine.turn()
        assert fault.failed == 1 and engine.worker._in_flight.held is not None
    engine.run()
    for name, prompt, fields in (("guided", TEXT, {"max_tokens": 60, **GUIDED}), ("picture", PROMPTS["picture"], {})):
        alone = InlineEngine(graphs=False)
        alone.submit(name, prompt, **fields)
        alone.run()
        assert engine.tokens(name) == alone.tokens(name) != []
    assert counted(engine) == {("encoder", "succeeded"): 1}
    engine.assert_nothing_left()


@pytest.mark.parametrize("method", ["_launch_decode", "sample"])
def test_steps_whose_rows_may_have_advanced_are_not_launched_again(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    engine = InlineEngine()
    fault = OutOfMemory(monkeypatch, engine.worker._runner, method, times=1)
    engine.submit("it", TEXT, max_tokens=20, **(GUIDED if method == "sample" else {}))
    engine.run()
    assert fault.failed == 1 and set(engine.failures()) == {"it"} and not counted(engine)
    engine.assert_nothing_left()


@pytest.mark.parametrize("graphs", [True, False])
def test_sampling_behind_an_eager_pass_is_not_launched_again(monkeypatch: pytest.MonkeyPatch, graphs: bool) -> None:
    engine = InlineEngine(graphs=graphs, mixed_route="eager")
    fault = OutOfMemory(monkeypatch, chat_runner, "log_probabilities", times=1)
    engine.submit("it", TEXT, logprobs=1)
    engine.run()
    assert fault.failed == 1 and set(engine.failures()) == {"it"} and not counted(engine)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["prefill", "encoder"])
def test_the_memory_of_the_first_try_is_free_before_the_second(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    engine = InlineEngine(graphs=False)
    owner, method = {
        "prefill": (engine.model.decoder, "forward"),
        "encoder": (engine.model.encoder, "forward"),
    }[kind]
    real, held, seen = getattr(owner, method), list[weakref.ref[Tensor]](), list[bool]()

    def forward(*args: Any) -> Any:
        if not held:
            large = torch.zeros(1000)
            held.append(weakref.ref(large))
            raise torch.OutOfMemoryError(MESSAGE)
        return real(*args)

    monkeypatch.setattr(owner, method, forward)
    monkeypatch.setattr(second_try, "release_cached", lambda device: seen.append(held[0]() is None))
    engine.submit("it", PROMPTS["picture"])
    with no_garbage_collection():
        engine.run()
    assert seen == [True] and len(engine.tokens("it")) == 8
