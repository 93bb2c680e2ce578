"""The prefix index names pages only for keys that launches write to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from models.interfaces.media import Prompt
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("graphs", [True, slow(False)])
@pytest.mark.parametrize("prompt", [TEXT, slow(PICTURE)], ids=["text", "picture"])
@pytest.mark.parametrize("max_step_tokens", [24, slow(512)])
def test_one_prompt_is_computed_once_for_all_that_come_together(
    device: str, max_step_tokens: int, prompt: Prompt, graphs: bool
) -> None:
    """Beside a row that decodes."""
    engine = InlineEngine(device=device, graphs=graphs, num_pages=200, max_running=8, max_step_tokens=max_step_tokens)
    engine.submit("before", tiny_prompt([[9] * 6]), max_tokens=40)
    for _ in range(4):
        engine.turn()
    for index in range(5):
        engine.submit(str(index), prompt, temperature=1.0, seed=index)
    engine.run()
    hit = (len(prompt.token_ids) - 1) // 4 * 4
    assert engine.cached_tokens() == {"before": 0, "0": 0, **{str(index): hit for index in range(1, 5)}}
    assert engine.counter("prefix_cache_hit_tokens_total") == 4 * hit
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
