"""Qwen2-VL's golden prompts through the engine: together, replayed and eager, with prefix hits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.models.qwen2_vl.golden import (
    DIRECTORY,
    INPUTS,
    PROMPTS,
    TOKENS,
    expected,
    golden_tokens,
    model,
    processor,
    prompt,
)
from tests.support.chat_golden import golden_messages, largest_difference
from tests.support.devices import DEVICES
from tests.support.golden import media_files, with_most
from tests.support.inference import no_gradients as no_gradients
from tests.support.inline_engine import InlineEngine
from tests.support.logits_engine import LogitsEngine
from tests.support.prompts import prompt_of
from tests.support.routes import replayed_if_captured as replayed_if_captured

PICTURES = with_most(DIRECTORY)


class CapturedEngine(LogitsEngine):
    def __init__(self, device: str = "cpu", **settings: Any) -> None:
        super().__init__(model(device), processor(), device=device, **settings)

    def difference(self, name: str, golden: str) -> float:
        """Largest logit error over the golden's tokens, rows past the tokenizer's vocabulary left out."""
        rows = self.rows(name, TOKENS)
        return largest_difference(rows, expected()[f"prompt.{golden}.generated_logits"][:, : rows.shape[1]])


@pytest.mark.usefixtures("replayed_if_captured")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("max_step_tokens", [512, 37])
def test_golden_tokens_and_logits_in_a_batch(device: str, graphs: bool, max_step_tokens: int) -> None:
    engine = CapturedEngine(device, graphs=graphs, max_step_tokens=max_step_tokens)
    for name in PROMPTS:
        engine.submit(name, prompt(name), max_tokens=TOKENS, logprobs=2)
    engine.run()
    assert not engine.failures()
    for name in PROMPTS:
        assert engine.tokens(name) == golden_tokens(name)
        assert engine.difference(name, name) <= 1e-4
    routes = engine.routes()
    assert (("decode", "replay") in routes) == graphs
    assert (("encoder", "replay") in routes) == graphs
    if graphs and max_step_tokens == 37:  # Nearly every chunk has cached context, and all fit a captured prefill.
        assert ("cached_prefill", "replay") in routes and not {("prefill", "eager"), ("mixed", "eager")} & routes
    engine.assert_nothing_left()


def test_the_plain_variant_generates_the_golden_tokens() -> None:
    engine = CapturedEngine()
    for name in PROMPTS:
        engine.submit(name, prompt(name), max_tokens=TOKENS)
    engine.run()
    assert {name: engine.tokens(name) for name in PROMPTS} == {name: golden_tokens(name) for name in PROMPTS}
    assert not engine.logits


def test_a_prefix_hit_gives_the_same_logits() -> None:
    engine = CapturedEngine()
    for turn in range(2):
        for name in PROMPTS:
            engine.submit(f"{name}{turn}", prompt(name), max_tokens=TOKENS, logprobs=0)
        engine.run()
    for name in PROMPTS:
        assert engine.tokens(f"{name}1") == golden_tokens(name)
        assert engine.difference(f"{name}1", name) <= 1e-4
    cached = engine.cached_tokens()
    # The prompts share their beginning, so some hit it in the first turn; in the second the items hit as well.
    for name in PROMPTS:
        last_item = max((run.start + run.length for run in prompt(name).placeholders), default=8)
        assert cached[f"{name}0"] < last_item <= cached[f"{name}1"]
    assert engine.counter("prefix_cache_hit_tokens_total") == sum(cached.values())


def test_the_same_text_with_another_image_misses() -> None:
    engine = CapturedEngine()
    messages, items = golden_messages(processor(), DIRECTORY, PICTURES)
    pixels = np.asarray(Image.open(DIRECTORY / media_files(DIRECTORY, PICTURES)[0]).convert("RGB"))[::-1, ::-1]
    first = processor().image(Image.fromarray(np.ascontiguousarray(pixels)))
    assert first.num_embeds == items[0].num_embeds and first.digest != items[0].digest
    other = prompt_of(
        processor(),
        messages,
        [first, *items[1:]],
        options={"add_vision_id": INPUTS["prompts"][PICTURES]["add_vision_id"]},
    )
    original = prompt(PICTURES)
    assert (other.token_ids == original.token_ids).all() and (other.positions == original.positions).all()
    engine.submit("warm", original, max_tokens=TOKENS, logprobs=0)
    engine.run()
    engine.submit("other", other, max_tokens=TOKENS, logprobs=0)
    engine.run()
    cached = engine.cached_tokens()
    assert cached["other"] <= original.placeholders[0].start
    alone = CapturedEngine()
    alone.submit("other", other, max_tokens=TOKENS, logprobs=0)
    alone.run()
    assert engine.tokens("other") == alone.tokens("other")
    assert largest_difference(torch.stack(engine.logits["other"]), torch.stack(alone.logits["other"])) <= 1e-4
    # And it is another answer, so reuse of the first image's keys would have shown.
    assert largest_difference(torch.stack(engine.logits["other"]), torch.stack(engine.logits["warm"])) > 1e-2


def test_preemptions_do_not_change_the_answers() -> None:
    engine = CapturedEngine(num_pages=64, encoder_cache=1)
    for name in PROMPTS:
        engine.submit(name, prompt(name), max_tokens=TOKENS)
    preempted = set()
    for _ in range(400):
        engine.turn()
        rows = list(engine.worker._scheduler.rows.members.values())
        fresh = [s for s in rows if len(s.generated) > 3 and s.request.request_id not in preempted]
        if fresh:
            engine.worker._scheduler.preempt(fresh[0])
            engine.worker._pages.allocate(engine.worker._pages.num_available)  # Evicts what its prefix left behind.
            engine.worker._pages.release(
                [p for p in range(1, 64) if engine.worker._pages._holders[p] and not _held(engine, p)]
            )
            preempted.add(fresh[0].request.request_id)
    engine.run()
    assert preempted == set(PROMPTS)
    assert {name: engine.tokens(name) for name in PROMPTS} == {name: golden_tokens(name) for name in PROMPTS}
    assert engine.counter("encoder_cache_misses_total") > sum(len(prompt(name).items) for name in PROMPTS)
    engine.assert_nothing_left()


def _held(engine: InlineEngine, page: int) -> bool:
    return any(page in sequence.pages for sequence in engine.worker._scheduler.running.values())


def test_positions_of_the_prompt_matter() -> None:
    """The engine feeds the prompt's own positions: shifting an axis changes the logits."""
    engine = CapturedEngine()
    moved = replace(prompt(PICTURES), positions=prompt(PICTURES).positions * np.array([[1], [1], [2]], np.int32))
    engine.submit("moved", moved, max_tokens=2, logprobs=0)
    engine.run()
    assert not torch.allclose(
        engine.logits["moved"][0],
        expected()[f"prompt.{PICTURES}.generated_logits"][0, : len(engine.logits["moved"][0])],
    )
