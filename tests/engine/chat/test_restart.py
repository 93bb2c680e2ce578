"""A restarted engine is ready with the fewest captures, answers the same with them, and makes the rest later."""

from __future__ import annotations

from typing import Any

import pytest

from service.engine import engine as loop
from service.graphs.buckets import key_of
from tests.support.inference import no_gradients as no_gradients
from tests.support.inline_engine import InlineEngine
from tests.support.tiny_chat import tiny_item, tiny_prompt


def captured(engine: InlineEngine) -> dict[Any, set[Any]]:
    """Keys of captured buckets by computation."""
    runners = engine.worker.graph_runners
    return {index: {key_of(bucket) for bucket in runner.captured} for index, runner in enumerate(runners)}


def answers(engine: InlineEngine) -> dict[str, list[int]]:
    """A long prompt, pictures, sampling with a penalty, four rows at a time."""
    prompts = {
        "long": tiny_prompt([[7] * 60]),
        "picture": tiny_prompt([[1, 2], tiny_item(1, [40]), [3]]),
        "frames": tiny_prompt([[4], tiny_item(2, [8, 8, 8]), [5]]),
    }
    engine.submit("penalty", tiny_prompt([[9, 9, 9]]), presence_penalty=1.5, temperature=0.7, seed=5)
    for name, prompt in prompts.items():
        engine.submit(name, prompt)
    engine.run()
    engine.assert_nothing_left()
    assert not engine.failures()
    return {name: engine.tokens(name) for name in ("penalty", *prompts)}


def idle(engine: InlineEngine, monkeypatch: pytest.MonkeyPatch) -> int:
    """Turns until an idle engine has nothing more to capture; how many captures that took."""
    monkeypatch.setattr(loop, "QUIET_BEFORE_CAPTURE", 0.0)
    engine.engine._may_capture = True
    before = engine.counter("graph_captures_total")
    for turn in range(1000):
        made = engine.counter("graph_captures_total")
        if not engine.turn():
            engine.engine._state_sent = float("-inf")
            engine.engine._send(0.0)
            return int(engine.counter("graph_captures_total") - before)
        engine.engine._state_sent = float("-inf")
        engine.engine._send(0.0)
        assert engine.counter("graph_captures_total") - made <= 1, f"a slice of one capture, turn {turn}"
    raise AssertionError("it captures for ever")


def test_a_restarted_engine_captures_the_smallest_first_and_answers_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, restarted = InlineEngine(), InlineEngine(restarted=True)
    first = captured(restarted)
    assert all(len(buckets) <= 1 for buckets in first.values()) and any(first.values())
    assert sum(map(len, first.values())) < sum(map(len, captured(usual).values()))
    for index, buckets in captured(usual).items():
        assert first[index] == ({min(buckets, key=lambda key: [size for _, size in key])} if buckets else set())
    expected = answers(usual)
    assert answers(restarted) == expected
    steps = restarted.steps()
    assert steps["encoder", "eager", "no_bucket"] and any(route == "replay" for _, route, _ in steps)
    assert {reason for _, route, reason in steps if route == "eager"} == {"no_bucket"}
    assert idle(restarted, monkeypatch) > 0
    idle(usual, monkeypatch)
    lists = {index: {key_of(b) for b in runner.bucket_list} for index, runner in enumerate(usual.worker.graph_runners)}
    for index, buckets in captured(restarted).items():
        assert buckets >= lists[index], "everything that a list has is captured while it idles"
    before = restarted.steps()
    restarted.channel.outputs.clear()
    assert answers(restarted) == expected
    assert before and not any(route == "eager" and reason == "no_bucket" for _, route, reason in restarted.steps())


def test_a_command_interrupts_the_capture_of_an_idle_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = InlineEngine()
    monkeypatch.setattr(loop, "QUIET_BEFORE_CAPTURE", 0.0)

    def capture(*, idle: bool) -> bool:
        arrived = engine.pool.arrived
        assert idle and arrived is not None and not arrived()
        engine.submit("it", tiny_prompt([[9, 9, 9]]))
        assert arrived() and arrived() and not engine.channel.commands
        return True

    monkeypatch.setattr(engine.engine._runners[0], "capture_next", capture)
    assert engine.turn() and not engine.worker._requests._sequences
    assert engine.turn() and engine.pool.arrived is None
    monkeypatch.undo()
    engine.run()
    assert len(engine.tokens("it")) == 8
