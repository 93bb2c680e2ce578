"""One request cannot harm another, and the loop outlives every one of them."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from typing import Any

import pytest
import torch

from service.engine.engine import HEARTBEAT, MISSES_BEFORE_CAPTURE, Engine
from service.graphs.runner import GraphRunner
from service.link.messages import ChatDelta, ChatRequest, SpeechAppend, Stop
from service.link.sampling import SamplingParams
from tests.engine.chat.test_guided_rows import GRAMMAR
from tests.support.audit import audit
from tests.support.devices import DEVICES
from tests.support.inference import no_gradients as no_gradients
from tests.support.inline_engine import InlineEngine
from tests.support.slow import slow
from tests.support.tiny_chat import CONTEXT, VOCABULARY, tiny_item, tiny_prompt

TEXT = tiny_prompt([[1, 2, 3, 4, 5]])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("graphs", [True, slow(False)])
def test_answers_in_a_batch_are_the_answers_alone(device: str, graphs: bool) -> None:
    prompts = {
        "text": TEXT,
        "image": tiny_prompt([[1, 2], tiny_item(1, [8, 6]), [3]]),
        "mixed": tiny_prompt([[1], tiny_item(2, [30]), [4, 5], tiny_item(1, [8, 6]), [6]]),
        "large": tiny_prompt([[7], tiny_item(3, [60, 60]), [8, 9]]),
    }
    samplings: dict[str, dict[str, Any]] = {
        "greedy": {},
        "seeded": {"temperature": 1.0, "seed": 3},
        "full": {"temperature": 1.0, "seed": 3, "top_k": 30, "top_p": 0.95, "repetition_penalty": 1.2},
    }
    together = InlineEngine(device=device, graphs=graphs, max_running=8)
    for kind, sampling in samplings.items():
        for name, prompt in prompts.items():
            together.submit(f"{name} {kind}", prompt, max_tokens=24, **sampling)
            together.turn()
    together.run()
    together.assert_nothing_left()
    for kind, sampling in samplings.items():
        for name, prompt in prompts.items():
            alone = InlineEngine(device=device, graphs=False)
            alone.submit("it", prompt, max_tokens=24, **sampling)
            alone.run()
            assert together.tokens(f"{name} {kind}") == alone.tokens("it"), (name, kind)


@pytest.mark.parametrize("graphs", [True, False])
def test_the_last_delta_says_how_a_request_was_computed(graphs: bool) -> None:
    """Of pictures that are the same one is encoded."""
    engine, picture = InlineEngine(graphs=graphs), tiny_item(1, [8])
    for name, token in (("first", 1), ("second", 2)):
        engine.submit(name, tiny_prompt([[token], picture, picture, [3]]), max_tokens=6)
    engine.run()
    deltas = [delta for outputs in engine.channel.outputs for delta in outputs.chat]
    assert all((delta.steps is not None) == (delta.finish_reason is not None) for delta in deltas)
    counts = {delta.request_id: delta.steps for delta in deltas if delta.steps is not None}
    for steps in counts.values():
        assert steps.steps == 6 and steps.rows == 12  # both in every batch
        assert 5 <= steps.replayed <= 6 if graphs else steps.replayed == 0
    assert [counts[name].encoded_media for name in ("first", "second")] == [1, 0]


def test_the_first_delta_says_when_its_phases_were() -> None:
    """Also where the sequence was preempted later, and where the first token is the last."""
    picture = tiny_prompt([[1, 2], tiny_item(1, [8, 6]), [3]])
    engine = InlineEngine(num_pages=14)
    began = time.monotonic()
    for name, length in (("first", 20), ("second", 20), ("short", 1)):
        engine.submit(name, picture, max_tokens=length)
    engine.run()
    assert engine.counter("preemptions_total"), "the pages are too few for all of them"
    engine.submit("cached", picture, max_tokens=2)
    engine.run()
    deltas: dict[str, list[ChatDelta]] = defaultdict(list)
    for outputs in engine.channel.outputs:
        for delta in outputs.chat:
            deltas[delta.request_id].append(delta)
    for name, (first, *others) in deltas.items():
        assert first.times is not None and not any(delta.times for delta in others)
        assert began <= first.times.scheduled <= first.times.computed <= time.monotonic()
        if name == "cached":
            assert first.times.encoder is None
        else:
            assert first.times.encoder is not None
            begin, end = first.times.encoder
            assert began <= begin <= end <= first.times.computed


def test_without_overlap_a_turn_sends_what_it_computed() -> None:
    """As on a CPU: a launch has run when it returns, so its token need not wait until the next has run, too."""
    prompt = tiny_prompt([[1, 2], tiny_item(1, [8, 6]), [3]])
    engine = InlineEngine(overlapped=False)
    engine.submit("it", prompt, max_tokens=6)
    engine.turn()
    assert engine.counter("vision_encode_duration_seconds") > 0 and not engine.tokens("it")
    for count in range(1, 7):
        engine.turn()
        assert len(engine.tokens("it")) == count
    assert engine.finish_reason("it") == "length" and not engine.turn()
    engine.assert_nothing_left()


def test_a_stop_token_ends_the_answer_and_is_not_delivered() -> None:
    engine = InlineEngine()
    engine.submit("free", TEXT, max_tokens=12)
    engine.run()
    free = engine.tokens("free")
    stop = free[5]
    first = free.index(stop)
    engine.submit("stopped", TEXT, max_tokens=12, stop_token_ids=(stop,))
    engine.run()
    assert engine.tokens("stopped") == free[:first] and engine.finish_reason("stopped") == "stop"
    engine.submit("later", TEXT, max_tokens=12, stop_token_ids=(stop,), min_tokens=first + 1)
    engine.run()
    assert len(engine.tokens("later")) > first and engine.tokens("later")[:first] == free[:first]
    engine.assert_nothing_left()


def test_a_stop_token_that_the_model_cannot_sample_does_nothing() -> None:
    """generation_config.json may name ids that the output layer does not have."""
    engine = InlineEngine()
    engine.submit("free", TEXT)
    engine.submit("odd", TEXT, stop_token_ids=(VOCABULARY + 5,), min_tokens=3)
    engine.run()
    assert engine.tokens("odd") == engine.tokens("free") and len(engine.tokens("odd")) == 8
    engine.assert_nothing_left()


@pytest.mark.slow
def test_lengths_end_at_the_context_and_the_pages() -> None:
    engine = InlineEngine(num_pages=32)
    engine.submit("pages", TEXT, max_tokens=10_000)
    engine.run()
    assert engine.finish_reason("pages") == "length"
    assert len(engine.tokens("pages")) == 31 * 4 - 5 + 1
    roomy = InlineEngine(num_pages=200)
    roomy.submit("context", TEXT, max_tokens=10_000)
    roomy.run()
    assert len(roomy.tokens("context")) == CONTEXT - 5


REFUSED: dict[str, list[dict[str, Any]]] = {
    "max_tokens": [{"max_tokens": 0}],
    "stop_token_ids": [{"stop_token_ids": tuple(range(40))}],
    "logit_bias": [
        {"logit_bias": {VOCABULARY: 1.0}},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {1: -1e300}},
        {"logit_bias": dict.fromkeys(range(VOCABULARY), 1.0) | {-1: 1.0}},
    ],
    "top_logprobs": [{"logprobs": 21}],
    "temperature": [{"temperature": -1.0}, {"temperature": math.nan}],
    "top_p": [{"top_p": 1.5}],
    "min_p": [{"min_p": -0.1}],
    "top_k": [{"top_k": -2}],
    "repetition_penalty": [{"repetition_penalty": 0.0}, {"repetition_penalty": 1e-40}],
    "presence_penalty": [{"presence_penalty": math.inf}],
    "frequency_penalty": [{"frequency_penalty": math.nan}],
}


def test_values_that_the_sampler_cannot_take_are_refused_by_name() -> None:
    engine = InlineEngine(graphs=False)
    engine.submit("good", TEXT)
    for field, samplings in REFUSED.items():
        for number, sampling in enumerate(samplings):
            engine.submit(f"{field} {number}", TEXT, **sampling)
    engine.run()
    failures = engine.failures()
    assert {name: (one.status, one.field) for name, one in failures.items()} == {
        f"{field} {number}": (400, field) for field, samplings in REFUSED.items() for number in range(len(samplings))
    }
    assert len(engine.tokens("good")) == 8
    engine.assert_nothing_left()


def test_prompts_over_context_or_pages_and_empty_ones_are_refused() -> None:
    engine = InlineEngine(graphs=False, num_pages=8)
    engine.submit("long", tiny_prompt([[1] * 29]))
    engine.submit("longer", tiny_prompt([[1] * 300]))
    engine.submit("empty", tiny_prompt([[]]))
    engine.submit("fits", tiny_prompt([[1] * 28]))
    engine.run()
    assert {name: f.code for name, f in engine.failures().items()} == {
        "long": "context_length_exceeded",
        "longer": "context_length_exceeded",
        "empty": "invalid_prompt",
    }
    assert len(engine.tokens("fits")) == 1


def test_over_the_queue_limit_requests_are_turned_away_with_a_time_to_retry() -> None:
    engine = InlineEngine(graphs=False, max_waiting=3)
    for index in range(6):
        engine.submit(str(index), TEXT)
    engine.run()
    assert {f.status for f in engine.failures().values()} == {503} and len(engine.failures()) == 3
    assert all(f.retry_after for f in engine.failures().values())
    assert [len(engine.tokens(str(index))) for index in range(3)] == [8] * 3


def test_a_bad_item_fails_its_own_request_and_not_those_packed_with_it() -> None:
    engine = InlineEngine()
    good, bad = tiny_item(1, [8]), tiny_item(2, [8])
    engine.model.encoder.fail_on = bad.digest
    engine.submit("good", tiny_prompt([[1], good, [2]]))
    engine.submit("bad", tiny_prompt([[1], bad, [2]]))
    engine.submit("both", tiny_prompt([[1], good, bad, [2]]))
    engine.submit("text", TEXT)
    engine.run()
    assert set(engine.failures()) == {"bad", "both"}
    assert {failure.status for failure in engine.failures().values()} == {500}
    assert "bad item" not in engine.failures()["bad"].message
    assert len(engine.tokens("good")) == len(engine.tokens("text")) == 8
    engine.assert_nothing_left()


@pytest.mark.parametrize("device", DEVICES)
def test_a_request_whose_logits_are_nan_fails_alone(device: str) -> None:
    """With plain sampling, with filters and with a grammar; at its first token, and at a later one."""
    alone = InlineEngine(device=device)
    alone.submit("good", TEXT, max_tokens=12)
    alone.run()
    engine = InlineEngine(device=device, max_running=8)
    engine.model.decoder.embed_tokens.weight[70] = torch.nan  # An embedding that only some prompts read.
    nan = tiny_prompt([[1, 70, 3]])
    engine.submit("good", TEXT, max_tokens=12)
    engine.submit("plain", nan)
    engine.submit("filtered", nan, temperature=1.0, top_k=5, repetition_penalty=1.5)
    engine.submit("guided", nan, grammar=GRAMMAR)
    engine.submit("later", TEXT, logit_bias={70: 100.0})
    engine.run()
    failures = engine.failures()
    assert {(name, failed.status, failed.code) for name, failed in failures.items()} == {
        (name, 500, "engine_error") for name in ("plain", "filtered", "guided", "later")
    }
    assert "not finite" in failures["plain"].message and engine.counter("corrupted_requests_total") == 4
    assert engine.tokens("later") == [70] and engine.tokens("good") == alone.tokens("good")
    engine.assert_nothing_left()


def test_an_item_over_every_bucket_runs_eagerly_and_is_counted() -> None:
    engine = InlineEngine(max_step_tokens=64)
    engine.submit("huge", tiny_prompt([[1], tiny_item(1, [120]), [2]]))
    engine.run()
    assert engine.steps()["encoder", "eager", "no_bucket"] == 1 and len(engine.tokens("huge")) == 8
    engine.submit("parts", tiny_prompt([[1], tiny_item(1, [60, 60, 60]), [2]]))
    engine.run()
    assert engine.steps()["encoder", "replay", "captured"] == 3
    engine.assert_nothing_left()


def test_where_graphs_have_little_room_the_encoder_gets_it_last() -> None:
    every = InlineEngine()
    graphs, encoder = every.worker._runner.graphs, every.worker._vision.runner
    assert encoder.captured and graphs.prefill.captured and graphs.cached_prefill.captured
    few = InlineEngine(graph_memory=every.pool.num_bytes // 5)
    for full, runner in graphs.decode.items():
        assert few.worker._runner.graphs.decode[full].captured == runner.captured
    assert not few.worker._vision.runner.captured
    without_encoder = InlineEngine(graph_memory=every.pool.num_bytes - 1)
    assert len(without_encoder.worker._vision.runner.captured) < len(encoder.captured)
    for runner, small in zip(graphs.runners, without_encoder.worker._runner.graphs.runners, strict=True):
        assert small.captured == runner.captured


def test_idle_time_is_used_for_captures_and_the_state_is_a_heartbeat() -> None:
    engine = InlineEngine(max_running=16)
    captured = [len(runner.captured) for runner in engine.worker.graph_runners]
    assert engine.engine._phase == "ready"
    clock = [time.monotonic()]
    engine.engine._clock = lambda: clock[0]
    for _ in range(60):
        clock[0] += 0.3
        engine.turn()
    after = [len(runner.captured) for runner in engine.worker.graph_runners]
    assert sum(after) > sum(captured)
    states = [outputs.state for outputs in engine.channel.outputs if outputs.state]
    assert len(states) >= 60 * 0.3 / HEARTBEAT / 2
    assert states[-1].phase == "ready" and states[-1].graph_bytes == engine.pool.num_bytes
    assert states[-1].models[0].pages_total == 63


def without_captures(engine: InlineEngine) -> GraphRunner:
    """The decode step of plain rows, as if it had never been captured."""
    runner = engine.worker._runner.graphs.decode[False]
    runner._graphs.clear()
    runner._choices.clear()
    return runner


def test_a_busy_engine_makes_the_captured_graph_that_it_misses() -> None:
    engine = InlineEngine(page_size=128)
    runner = without_captures(engine)
    engine.submit("it", TEXT, max_tokens=MISSES_BEFORE_CAPTURE + 40)
    engine.run()
    steps = engine.steps()
    assert steps["decode", "eager", "no_bucket"] == MISSES_BEFORE_CAPTURE
    assert steps["decode", "replay", "captured"] >= 39 and len(runner.captured) == 1
    eager = InlineEngine(graphs=False)
    eager.submit("it", TEXT, max_tokens=MISSES_BEFORE_CAPTURE + 40)
    eager.run()
    assert engine.tokens("it") == eager.tokens("it")
    engine.assert_nothing_left()


def test_requests_for_another_model_are_refused_and_stop_ends_the_engine() -> None:
    engine = InlineEngine()
    engine.submit("running", TEXT)
    engine.channel.commands.append(SpeechAppend("nobody", (), True))
    engine.channel.commands.append(
        ChatRequest("elsewhere", "other", TEXT, SamplingParams(max_tokens=1), time.monotonic())
    )
    engine.run()
    assert len(engine.tokens("running")) == 8
    assert {n: (f.status, f.code) for n, f in engine.failures().items()} == {"elsewhere": (404, "model_not_found")}
    engine.channel.commands.append(Stop())
    engine.engine.run()
    assert isinstance(engine.engine, Engine)


def test_a_step_that_must_be_made_beside_listeners_is_a_small_one() -> None:
    engine = InlineEngine(graphs=False, max_step_tokens=512)
    engine.submit("long", tiny_prompt([[1] * 200]), max_tokens=1)
    engine.engine._receive(0.0)
    worker = engine.engine.workers["tiny"]
    worker._pacing.costs.prefill.observe(512, 0, 10.0)
    assert not worker.tick(0.0, 0.0)
    assert worker.tick(0.0, 0.0, must=True) and worker._in_flight[-1].size == 128
    engine.run()
    assert len(engine.tokens("long")) == 1
    engine.assert_nothing_left()


def test_logprobs_are_reported_where_asked() -> None:
    engine = InlineEngine()
    engine.submit("two", TEXT, logprobs=2)
    engine.submit("none", TEXT)
    engine.submit("chosen", TEXT, logprobs=0)
    engine.run()
    infos = {
        name: [info for o in engine.channel.outputs for d in o.chat if d.request_id == name for info in d.infos]
        for name in ("two", "none", "chosen")
    }
    assert [len(infos[name]) for name in ("two", "none", "chosen")] == [8, 0, 8]
    for token, info in zip(engine.tokens("two"), infos["two"], strict=True):
        assert info.top[0] == (token, pytest.approx(info.logprob)) and len(info.top) == 2 and info.logprob < 0
    assert all(info.top == () for info in infos["chosen"])


@pytest.mark.slow
def test_every_captured_step_passes_the_audit() -> None:
    engine = InlineEngine(graphs=False)
    for runner in engine.worker.graph_runners:
        if not runner.bucket_list:
            continue  # steps with drafts, of which there are none
        bucket = runner.bucket_list[0]
        rows = next(iter(bucket.values()))
        assert {spec.shape[0] for spec in audit(runner.capturable, bucket).values()} <= {rows, rows // 2}


def test_a_request_that_waits_too_long_in_the_queue_is_answered_503() -> None:
    """From when the engine has it: a large upload before does not count."""
    engine = InlineEngine(max_running=1, queue_timeout=60.0)
    engine.submit("first", TEXT, max_tokens=40)
    for _ in range(4):
        engine.turn()
    now, sampling = time.monotonic(), SamplingParams(max_tokens=4, temperature=0.0)
    engine.channel.commands.append(ChatRequest("late", "tiny", TEXT, sampling, now - 100))
    engine.turn()
    engine.worker.fail_timed_out(now + 30)
    assert len(engine.worker._requests._sequences) == 2
    engine.worker.fail_timed_out(time.monotonic() + 61)
    engine.run()
    failed = engine.failures()
    assert set(failed) == {"late"} and failed["late"].retry_after
    assert (failed["late"].status, failed["late"].code) == (503, "queue_timeout")
    assert len(engine.tokens("first")) == 40
    engine.assert_nothing_left()
