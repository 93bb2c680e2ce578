"""The golden prompts through the engine: in a batch, replayed and eager, with prefix hits and padded vocabularies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file

from models.interfaces.media import Prompt
from models.kimi_vl.model import load_model
from tests.models.kimi_vl.golden import (
    DIRECTORY,
    MULTI,
    PROMPTS,
    SINGLE,
    TOKENS,
    expected,
    golden_tokens,
    item,
    model,
    processor,
    prompt,
    write_config,
)
from tests.support.chat_golden import generate, golden_messages
from tests.support.devices import DEVICES
from tests.support.golden import fact_of_own_fixture, media_files
from tests.support.inference import no_gradients as no_gradients
from tests.support.inline_engine import InlineEngine
from tests.support.prompts import prompt_of
from tests.support.routes import replayed_if_captured as replayed_if_captured

BUCKETS = (64, 160)


def engine(device: str = "cpu", **settings: object) -> InlineEngine:
    settings = {"num_pages": 128, "encoder_buckets": BUCKETS, "max_step_tokens": 256, **settings}
    return InlineEngine(model(device), processor(), device=device, **settings)


def golden_log_probabilities(name: str) -> np.ndarray:
    logits = expected()[f"prompt.{name}.generated_logits"].double().log_softmax(-1)
    return logits.gather(1, torch.tensor(golden_tokens(name))[:, None]).squeeze(1).numpy()


@pytest.mark.usefixtures("replayed_if_captured")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("max_step_tokens", [256, 19])
def test_golden_tokens_in_a_batch(device: str, graphs: bool, max_step_tokens: int) -> None:
    """Whole prompts, and chunks that cut pictures."""
    made = engine(device, graphs=graphs, max_step_tokens=max_step_tokens)
    for name in PROMPTS:
        made.submit(name, prompt(name), max_tokens=TOKENS, logprobs=2)
        made.submit(f"plain {name}", prompt(name), max_tokens=TOKENS)
    made.run()
    assert not made.failures()
    for name in PROMPTS:
        assert made.tokens(name) == made.tokens(f"plain {name}") == golden_tokens(name)
        assert np.abs(made.log_probabilities(name) - golden_log_probabilities(name)).max() <= 1e-4
    routes = made.routes()
    for kind in ("decode", "encoder"):
        assert (kind, "replay" if graphs else "eager") in routes
        assert (kind, "eager" if graphs else "replay") not in routes
    if graphs and max_step_tokens == 19:  # Nearly every chunk has cached context, and all fit a captured prefill.
        assert ("cached_prefill", "replay") in routes and not {("prefill", "eager"), ("mixed", "eager")} & routes
    made.assert_nothing_left()


@fact_of_own_fixture
def test_a_special_id_is_among_the_golden_tokens() -> None:
    """So the tests here see what an answer with one does."""
    assert processor().config.media_placeholder_token_id in golden_tokens("text")


@pytest.mark.parametrize("page_size", [4, 16])
def test_a_prefix_hit_gives_the_golden_tokens(page_size: int) -> None:
    made = engine(page_size=page_size)
    for turn in range(2):
        for name in PROMPTS:
            made.submit(f"{name} {turn}", prompt(name), max_tokens=TOKENS, logprobs=0)
        made.run()
    cached = made.cached_tokens()
    for name in PROMPTS:
        assert made.tokens(f"{name} 1") == golden_tokens(name)
        assert np.abs(made.log_probabilities(f"{name} 1") - golden_log_probabilities(name)).max() <= 1e-4
        assert cached[f"{name} 0"] < cached[f"{name} 1"]
    # A hit spares the first picture of the conversation.
    assert cached[f"{MULTI} 1"] >= prompt(MULTI).placeholders[0].start + prompt(MULTI).placeholders[0].length
    made.assert_nothing_left()


def mirrored() -> Prompt:
    """The conversation MULTI with its second picture mirrored."""
    messages, items = golden_messages(processor(), DIRECTORY, MULTI)
    picture = Image.open(DIRECTORY / media_files(DIRECTORY, MULTI)[1]).convert("RGB")
    other = processor().image(ImageOps.mirror(picture))
    assert other.num_embeds == items[1].num_embeds and other.digest != items[1].digest
    return prompt_of(processor(), messages, [items[0], other, *items[2:]])


def test_another_picture_at_the_same_place_misses() -> None:
    other, original = mirrored(), prompt(MULTI)
    assert np.array_equal(other.token_ids, original.token_ids)
    made = engine()
    for name, one in (("original", original), ("other", other)):
        made.submit(name, one, max_tokens=TOKENS, logprobs=0)
        made.run()
    first, second = original.placeholders[:2]
    assert first.start + first.length <= made.cached_tokens()["other"] <= second.start
    alone = engine()
    alone.submit("other", other, max_tokens=TOKENS, logprobs=0)
    alone.run()
    assert made.tokens("other") == alone.tokens("other")
    assert np.abs(made.log_probabilities("other") - alone.log_probabilities("other")).max() <= 1e-4
    # Keys of the original picture would have given the original answer.
    assert made.tokens("other") != golden_tokens(MULTI)


def test_a_preempted_answer_goes_on_as_it_was() -> None:
    made = engine(num_pages=64)
    for name in PROMPTS:
        made.submit(name, prompt(name), max_tokens=TOKENS)
    preempted: set[str] = set()
    for _ in range(400):
        made.turn()
        for sequence in list(made.worker._scheduler.rows.members.values()):
            if len(sequence.generated) > 3 and sequence.request.request_id not in preempted:
                made.worker._scheduler.preempt(sequence)
                preempted.add(sequence.request.request_id)
    made.run()
    assert preempted == set(PROMPTS)
    assert {name: made.tokens(name) for name in PROMPTS} == {name: golden_tokens(name) for name in PROMPTS}
    made.assert_nothing_left()


def test_a_picture_that_fills_the_budget_a_larger_one_and_a_video_in_parts() -> None:
    """One is replayed whole, the video frame by frame in replays; what no captured graph holds runs eagerly,
    counted."""
    items = {"full": item([(10, 16)]), "video": item([(8, 8)] * 5, 1), "over": item([(12, 16)], 2)}
    tokens: dict[bool, dict[str, list[int]]] = {}
    for graphs in (True, False):
        made = engine(graphs=graphs)
        for name, one in items.items():
            words = np.array(prompt(SINGLE).token_ids[:8])
            ids = np.concatenate((words, np.full(one.num_embeds, 321), words)).astype(np.int32)
            run = replace(prompt(SINGLE).placeholders[0], start=len(words), length=one.num_embeds)
            positions = np.arange(len(ids), dtype=np.int32)[None]
            made.submit(name, Prompt(ids, positions, len(ids), (one,), (run,)), max_tokens=4)
            made.run()
        assert not made.failures()
        tokens[graphs] = {name: made.tokens(name) for name in items}
        encoder = {(route, reason): n for (kind, route, reason), n in made.steps().items() if kind == "encoder"}
        if graphs:
            assert encoder == {("replay", "captured"): 4, ("eager", "no_bucket"): 1}
    assert tokens[True] == tokens[False]


@pytest.mark.parametrize("full", [False, True])
def test_padding_rows_of_the_vocabulary_are_never_generated(tmp_path: Path, full: bool) -> None:
    """Rows of the output layer past the reserved ids, made to win every choice."""
    config = json.loads((write_config(tmp_path, text={"vocab_size": 576}) / "config.json").read_text())
    assert config["text_config"]["vocab_size"] == processor().vocab_size + 20
    tensors = load_file(DIRECTORY / "model.safetensors")
    for name in ("model.embed_tokens", "lm_head"):
        rows = tensors[f"language_model.{name}.weight"]
        best = rows[golden_tokens(SINGLE)[0]]
        tensors[f"language_model.{name}.weight"] = torch.cat((rows, 100 * best.expand(20, -1))).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    padded = load_model(tmp_path, torch.device("cpu"), torch.float32)
    assert generate(padded, prompt(SINGLE), 1)[2][0] >= processor().vocab_size
    made = InlineEngine(padded, processor(), num_pages=128, encoder_buckets=BUCKETS, max_step_tokens=256)
    for name in PROMPTS:
        made.submit(name, prompt(name), max_tokens=TOKENS, logprobs=2 if full else None)
    made.submit("warm", prompt(SINGLE), max_tokens=64, temperature=2.0, seed=3, logprobs=2 if full else None)
    made.run()
    assert {name: made.tokens(name) for name in PROMPTS} == {name: golden_tokens(name) for name in PROMPTS}
    assert max(made.tokens("warm")) < processor().vocab_size
    for outputs in made.channel.outputs:
        for delta in outputs.chat:
            assert all(token < processor().vocab_size for info in delta.infos for token, _ in info.top)
