"""The golden prompts through the engine: in a batch, replayed and eager, with the sampling that the checkpoint asks
for, with prefix hits, and videos of one content at two rates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from models.interfaces.media import Prompt
from tests.models.qwen2_5_vl.golden import (
    DIRECTORY,
    PROMPTS,
    TOKENS,
    VIDEO_PROMPT,
    expected,
    golden_tokens,
    model,
    processor,
    prompt,
)
from tests.support.chat_golden import golden_messages, golden_video
from tests.support.devices import DEVICES
from tests.support.golden import inputs, media_files
from tests.support.inference import no_gradients as no_gradients
from tests.support.inline_engine import InlineEngine
from tests.support.prompts import prompt_of
from tests.support.routes import replayed_if_captured as replayed_if_captured


def engine(device: str = "cpu", **settings: object) -> InlineEngine:
    settings = {"num_pages": 512, "max_step_tokens": 512, "max_running": 6, **settings}
    return InlineEngine(model(device), processor(), device=device, **settings)


def golden_log_probabilities(name: str) -> np.ndarray:
    logits = expected()[f"prompt.{name}.generated_logits"][:, : processor().vocab_size].double().log_softmax(-1)
    return logits.gather(1, torch.tensor(golden_tokens(name))[:, None]).squeeze(1).numpy()


@pytest.mark.usefixtures("replayed_if_captured")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("max_step_tokens", [512, 37])
def test_golden_tokens_in_a_batch(device: str, graphs: bool, max_step_tokens: int) -> None:
    """Whole prompts, and chunks that cut pictures."""
    made = engine(device, graphs=graphs, max_step_tokens=max_step_tokens)
    for name in PROMPTS:
        made.submit(name, prompt(name), max_tokens=TOKENS, logprobs=2)
    made.run()
    assert not made.failures()
    for name in PROMPTS:
        assert made.tokens(name) == golden_tokens(name)
        assert np.abs(made.log_probabilities(name) - golden_log_probabilities(name)).max() <= 1e-4
    routes = made.routes()
    for kind in ("decode", "encoder"):
        assert (kind, "replay" if graphs else "eager") in routes
        assert (kind, "eager" if graphs else "replay") not in routes
    if graphs and max_step_tokens == 37:  # Nearly every chunk has cached context, and all fit a captured prefill.
        assert ("cached_prefill", "replay") in routes and not {("prefill", "eager"), ("mixed", "eager")} & routes
    made.assert_nothing_left()


def test_the_published_sampling_penalises_tokens_of_prompt_and_answer() -> None:
    """Temperature 1e-6, which is greedy, and a repetition penalty of 1.05, in replayed steps."""
    defaults = processor().generation_defaults
    assert defaults["temperature"] == 1e-6 and defaults["repetition_penalty"] == 1.05
    names = [name for name in PROMPTS if f"prompt.{name}.penalised_ids" in expected()]
    made = engine()
    for name in names:
        made.submit(name, prompt(name), max_tokens=TOKENS, **defaults)
    made.run()
    for name in names:
        assert made.tokens(name) == expected()[f"prompt.{name}.penalised_ids"].tolist()
    assert {route for kind, route, _ in made.steps() if kind == "decode"} == {"replay"}


def test_a_prefix_hit_gives_the_golden_tokens() -> None:
    made = engine()
    for turn in range(2):
        for name in PROMPTS:
            made.submit(f"{name} {turn}", prompt(name), max_tokens=TOKENS, logprobs=0)
        made.run()
    cached = made.cached_tokens()
    for name in PROMPTS:
        assert made.tokens(f"{name} 1") == golden_tokens(name)
        assert np.abs(made.log_probabilities(f"{name} 1") - golden_log_probabilities(name)).max() <= 1e-4
        assert cached[f"{name} 0"] < cached[f"{name} 1"]
    made.assert_nothing_left()


def at_another_rate(factor: float) -> Prompt:
    """VIDEO_PROMPT with its videos as many times as fast."""
    messages, items = golden_messages(processor(), DIRECTORY, VIDEO_PROMPT)
    files = iter(media_files(DIRECTORY, VIDEO_PROMPT, "video"))
    faster = [
        item if item.kind == "image" else processor().video(golden_video(DIRECTORY, next(files), fps=1.3 * factor))
        for item in items
    ]
    options = {"add_vision_id": inputs(DIRECTORY)["prompts"][VIDEO_PROMPT]["add_vision_id"]}
    return prompt_of(processor(), messages, faster, options=options)


def test_the_same_frames_at_another_rate_share_embeddings_and_no_keys() -> None:
    slow, fast = at_another_rate(1), at_another_rate(4)
    assert (slow.token_ids == fast.token_ids).all()
    assert [item.digest for item in slow.items] == [item.digest for item in fast.items]
    video = slow.placeholders[0]
    assert (slow.positions[0] != fast.positions[0])[video.start : video.start + video.length].any()
    made = engine()
    for name, one in (("slow", slow), ("fast", fast)):
        made.submit(name, one, max_tokens=TOKENS, logprobs=0)
        made.run()
    assert made.cached_tokens()["fast"] < video.start + video.length
    assert made.counter("encoder_cache_misses_total") == len(slow.items)
    alone = engine()
    alone.submit("fast", fast, max_tokens=TOKENS, logprobs=0)
    alone.run()
    assert made.tokens("fast") == alone.tokens("fast")
    assert np.abs(made.log_probabilities("fast") - alone.log_probabilities("fast")).max() <= 1e-4
    # The rate changes the answer, so keys of the other rate would have shown.
    assert np.abs(made.log_probabilities("fast") - made.log_probabilities("slow")).max() > 1e-2


def test_positions_of_a_sparse_video_may_exceed_its_length() -> None:
    """Four frames of an hour: the answer goes on behind position 3600."""
    messages, items = golden_messages(processor(), DIRECTORY, VIDEO_PROMPT)
    files = media_files(DIRECTORY, VIDEO_PROMPT, "video")[0][:4]
    clip = golden_video(DIRECTORY, files)
    hour = replace(clip, metadata=replace(clip.metadata, num_frames=3600 * 25, fps=25.0, duration=3600.0))
    sparse = prompt_of(processor(), messages, [processor().video(hour), *items[1:]])
    assert sparse.next_position > 3600 > len(sparse.token_ids)
    made = engine()
    made.submit("hour", sparse, max_tokens=4)
    made.run()
    assert len(made.tokens("hour")) == 4
