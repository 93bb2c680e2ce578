"""The prefix index names pages only for keys that launches write to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from models.interfaces.media import Prompt
from service.engine.chat.pacing import ChunkBudget, Gaps, Pacing
from service.engine.chat.sequence import Step
from tests.support.devices import DEVICES
from tests.support.inference import no_gradients as no_gradients
from tests.support.inline_engine import InlineEngine
from tests.support.slow import slow
from tests.support.tiny_chat import tiny_item, tiny_prompt

TEXT = tiny_prompt([list(np.random.default_rng(1).integers(0, 80, 100))])
PICTURE = tiny_prompt([[1, 2, 3], tiny_item(1, [30, 30]), list(range(40))])


def alone(prompt: Prompt, **fields: Any) -> list[int]:
    engine = InlineEngine(graphs=False)
    engine.submit("it", prompt, **fields)
    engine.run()
    return engine.tokens("it")


def launched(engine: InlineEngine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Lengths of the chunks of each step that is launched from now on, where there are any."""
    steps: list[list[int]] = []
    real = engine.worker._scheduler.launched

    def recorded(step: Step) -> None:
        if step.chunks:
            steps.append([chunk.length for chunk in step.chunks])
        real(step)

    monkeypatch.setattr(engine.worker._scheduler, "launched", recorded)
    return steps


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("prompt", "settings"),
    [
        (TEXT, {"max_step_tokens": 512}),
        slow(TEXT, {"graphs": False}),
        (PICTURE, {"max_step_tokens": 24}),
        slow(PICTURE, {"graphs": False}),
        slow(PICTURE, {"max_step_tokens": 512}),
    ],
    ids=["replayed", "eager", "picture in chunks", "picture, eager", "picture, replayed"],
)
def test_one_prompt_is_computed_once_for_all_that_come_together(
    device: str, settings: dict[str, Any], prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a row that decodes, and behind what was cached before."""
    engine = InlineEngine(device=device, num_pages=200, max_running=8, **{"max_step_tokens": 200, **settings})
    engine.submit("before", tiny_prompt([[9] * 6]), max_tokens=40)
    pacing = engine.worker._pacing
    pacing.gaps = Gaps(None)
    pacing.costs.prefill.start({100: 1e-7}, 1e-12)
    monkeypatch.setattr(engine.worker, "_learn", lambda *_: None)  # Steps must not depend on the machine.
    for _ in range(4):
        engine.turn()
    steps = launched(engine, monkeypatch)
    for index in range(5):
        engine.submit(str(index), prompt, temperature=1.0, seed=index)
    engine.run()
    length = len(prompt.token_ids)
    hit = (length - 1) // 4 * 4
    assert engine.cached_tokens() == {"before": 0, "0": 0, **{str(index): hit for index in range(1, 5)}}
    assert engine.counter("prefix_cache_hit_tokens_total") == 4 * hit
    assert sum(map(sum, steps)) == length + 4 * (length - hit)
    if engine.config.max_step_tokens > 24:
        assert steps == [[length], [length - hit] * 4]
    engine.assert_nothing_left()
    for index in range(5):
        assert engine.tokens(str(index)) == alone(prompt, temperature=1.0, seed=index)


@pytest.mark.parametrize("prompt", [TEXT, PICTURE], ids=["text", "picture"])
def test_prompts_of_other_salts_are_not_found(prompt: Prompt) -> None:
    engine = InlineEngine(num_pages=200, max_running=8, max_step_tokens=200)
    for name, found in {
        "none": prompt,
        "a": prompt.salted("a"),
        "b": prompt.salted("b"),
        "a2": prompt.salted("a"),
    }.items():
        engine.submit(name, found)
        engine.run()
    hit = (len(prompt.token_ids) - 1) // 4 * 4
    assert engine.cached_tokens() == {"none": 0, "a": 0, "b": 0, "a2": hit}
    assert engine.counter("encoder_cache_misses_total") == 3 * len(prompt.items)
    assert len({tuple(engine.tokens(name)) for name in ("none", "a", "b", "a2")}) == 1


def test_a_chunk_of_before_a_preemption_does_not_index_pages_of_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is preempted while a chunk is in flight, its pages are given away, and it begins again with a shorter
    chunk. Then it is aborted, and comes again."""
    budgets = iter([96, 9])
    monkeypatch.setattr(Pacing, "chunk_budget", lambda *_, **__: ChunkBudget(next(budgets, 100)))
    engine = InlineEngine(num_pages=64, max_step_tokens=100)
    engine.submit("it", TEXT)
    engine.engine._receive(0.0)
    worker = engine.worker
    scheduler, pages = worker._scheduler, worker._pages
    assert worker.tick(0.0, 1.0)
    (sequence,) = scheduler.running.values()
    scheduler.preempt(sequence)
    pages.release(pages.allocate(pages.num_available))
    assert worker.tick(0.0, 1.0) and sequence.num_prefilled == 9
    while worker._in_flight:
        worker._in_flight.wait()
        worker._read()
    assert pages.match(sequence.digests) == 2
    engine.abort("it")
    engine.submit("again", TEXT)
    engine.run()
    assert engine.tokens("again") == alone(TEXT) and engine.cached_tokens()["again"] == 8
