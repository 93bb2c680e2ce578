"""Qwen2-VL's golden prompts through the engine: together, replayed and eager, with prefix hits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.qwen2_vl.golden import (
    PROMPTS,
    TOKENS,
    expected,
    golden_tokens,
    model,
    processor,
    prompt,
)
from tests.support.chat_golden import largest_difference
from tests.support.devices import DEVICES
from tests.support.inference import no_gradients as no_gradients
from tests.support.logits_engine import LogitsEngine
from tests.support.routes import replayed_if_captured as replayed_if_captured
from tests.support.slow import slow


class CapturedEngine(LogitsEngine):
    def __init__(self, device: str = "cpu", **settings: Any) -> None:
        super().__init__(model(device), processor(), device=device, **settings)

    def difference(self, name: str, golden: str) -> float:
        """Largest logit error over the golden's tokens, rows past the tokenizer's vocabulary left out."""
        rows = self.rows(name, TOKENS)
        return largest_difference(rows, expected()[f"prompt.{golden}.generated_logits"][:, : rows.shape[1]])


@pytest.mark.usefixtures("replayed_if_captured")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("graphs", "max_step_tokens"),
    [(True, 512), (True, 37), *(slow(False, size) for size in (512, 37))],
)
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
