"""Requests that wait too long for a place are told so, and leave nothing; those that run are left alone."""

from __future__ import annotations

import time

import torch

from service.link.messages import ChatRequest, SamplingParams
from tests.support.inline_engine import InlineEngine
from tests.support.tiny_chat import tiny_prompt


def test_a_chat_request_that_waits_too_long_is_answered_503() -> None:
    with torch.inference_mode():
        engine = InlineEngine(max_running=1, queue_timeout=60.0)
        engine.submit("first", tiny_prompt([[1, 2, 3]]), max_tokens=40)
        for _ in range(4):
            engine.turn()
        engine.submit("second", tiny_prompt([[4, 5, 6]]))
        engine.turn()
        worker = engine.worker
        worker.fail_timed_out(time.monotonic() + 30)
        assert len(worker._requests) == 2
        worker.fail_timed_out(time.monotonic() + 61)
        engine.run()
        failed = engine.failures()
        assert set(failed) == {"second"}
        assert (failed["second"].status, failed["second"].code) == (503, "queue_timeout")
        assert failed["second"].retry_after
        assert len(engine.tokens("first")) == 40
        assert engine.counter("prefix_cache_query_tokens_total") == 3, "the second was never looked up"
        engine.assert_nothing_left()


def test_what_came_before_the_queue_does_not_count() -> None:
    """A large upload, or a video that was decoded for long."""
    with torch.inference_mode():
        engine = InlineEngine(max_running=1, queue_timeout=60.0)
        arrival = time.monotonic() - 100
        prompt, sampling = tiny_prompt([[1, 2, 3]]), SamplingParams(max_tokens=4, temperature=0.0)
        engine.channel.commands.append(ChatRequest("late", "tiny", prompt, sampling, arrival))
        engine.engine._receive(timeout=0.0)
        engine.worker.fail_timed_out(time.monotonic())
        engine.run()
        assert not engine.failures() and len(engine.tokens("late")) == 4
        observed = [event for outputs in engine.channel.outputs for event in outputs.observations]
        (waited,) = (event.value for event in observed if event.name == "queue_duration_seconds")
        assert waited < time.monotonic() - arrival - 100
