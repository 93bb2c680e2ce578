"""A pass that runs out of memory is launched once more, and nobody notices; if it fails again, its requests fail."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from service.engine.core import faults as second_try
from tests.engine.chat.test_guided_rows import GRAMMAR
from tests.support.inference import no_gradients as no_gradients
from tests.support.inline_engine import InlineEngine
from tests.support.out_of_memory import MESSAGE, OutOfMemory, retries
from tests.support.slow import slow
from tests.support.tiny_chat import END_TOKEN, tiny_item, tiny_prompt

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
    "full": {"temperature": 1.2, "seed": 5, "top_k": 20, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
}
GUIDED: dict[str, Any] = {"grammar": GRAMMAR, "temperature": 1.0, "seed": 9, "stop_token_ids": (END_TOKEN,)}


def counted(engine: InlineEngine) -> dict[tuple[str, str], int]:
    return retries(event for outputs in engine.channel.outputs for event in outputs.observations)


def answers(engine: InlineEngine) -> dict[str, list[int]]:
    """Of requests that come one after the other, so that prompts are computed while others decode."""
    names = []
    for kind, sampling in SAMPLINGS.items():
        asked = {name: {"prompt": prompt, "max_tokens": 20, **sampling} for name, prompt in PROMPTS.items()}
        for name, fields in {**asked, "guided": {"prompt": TEXT, "max_tokens": 60, **GUIDED}}.items():
            names.append(f"{name} {kind}")
            engine.submit(names[-1], **fields)
            engine.turn()
    engine.run()
    engine.assert_nothing_left()
    assert not engine.failures()
    return {name: engine.tokens(name) for name in names}


@pytest.mark.parametrize("graphs", [True, slow(False)])
def test_no_answer_changes_if_every_pass_runs_out_of_memory_at_first(
    monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    expected = answers(InlineEngine(max_running=8, graphs=graphs))
    engine = InlineEngine(max_running=8, graphs=graphs)
    runner, vision = engine.worker._runner, engine.worker._vision
    faults = (
        OutOfMemory(monkeypatch, runner, "_sample_or_hold").at_first_tries_of(runner, "_launch_prefill"),
        OutOfMemory(monkeypatch, vision, "_store").at_first_tries_of(vision, "_launch_pass"),
    )
    assert answers(engine) == expected
    found = counted(engine)
    assert {outcome for _, outcome in found} == {"succeeded"}
    assert {kind for kind, _ in found} == {"encoder", "prefill"}
    assert sum(found.values()) == sum(fault.failed for fault in faults) > 10


@pytest.mark.parametrize("graphs", [True, slow(False)])
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


HOST = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")


@pytest.mark.parametrize(
    ("method", "error", "failed"),
    [
        ("_launch_decode", None, (503, "out_of_memory")),
        ("_launch_decode", HOST, (503, "out_of_memory")),
        ("_launch_decode", MemoryError(), (503, "out_of_memory")),
        ("_launch_decode", OverflowError("int too big"), (500, "engine_error")),
        ("_launch_decode", ValueError("a bug"), (500, "engine_error")),
        ("sample", None, (503, "out_of_memory")),
    ],
)
def test_steps_whose_rows_may_have_advanced_are_not_launched_again(
    monkeypatch: pytest.MonkeyPatch, method: str, error: Exception | None, failed: tuple[int, str]
) -> None:
    engine = InlineEngine()
    fault = OutOfMemory(monkeypatch, engine.worker._runner, method, times=1, error=error)
    engine.submit("it", TEXT, max_tokens=20, **(GUIDED if method == "sample" else {}))
    engine.run()
    assert fault.failed == 1 and not counted(engine)
    (failure,) = engine.failures().values()
    assert (failure.status, failure.code) == failed and (failure.retry_after is None) == (failed[0] == 500)
    assert "tried to allocate" not in failure.message.lower() and "a bug" not in failure.message
    engine.submit("next", TEXT)
    engine.run()
    assert len(engine.tokens("next")) == 8
    engine.assert_nothing_left()


def test_a_prefill_that_fails_otherwise_is_not_launched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = InlineEngine()
    engine.submit("running", TEXT, max_tokens=20)
    for _ in range(4):
        engine.turn()
    fault = OutOfMemory(monkeypatch, engine.worker._runner, "_backbone", error=ValueError("a bug"))
    engine.submit("bad", PROMPTS["long"])
    engine.run()
    assert set(engine.failures()) == {"bad"} and fault.failed == 1
    assert len(engine.tokens("running")) == 20
    engine.assert_nothing_left()


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
    owner, method = {"prefill": (engine.model.decoder, "forward"), "encoder": (engine.model.encoder, "forward")}[kind]
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
