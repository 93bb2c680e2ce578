"""Qwen2-VL's golden prompts through the engine: together, replayed and eager, with prefix hits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from models.media import Prompt
from models.qwen2_vl.model import load_model
from models.qwen2_vl.pictures import VideoLimits
from models.qwen2_vl.processor import load_processor
from service.engine.chat_runner import Launched
from service.engine.scheduler import Step
from tests.support.chat_golden import GOLDEN, golden_messages, golden_prompt, largest_difference
from tests.support.inline_engine import InlineEngine
from tests.support.prompts import prompt_of

DIRECTORY = GOLDEN / "qwen2_vl"
PROMPTS = {"text": False, "images": True, "video": False, "long_video": False}
TOKENS = 16


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@cache
def expected() -> dict[str, Tensor]:
    return load_file(DIRECTORY / "expected.safetensors")


@cache
def processor() -> Any:
    return load_processor(DIRECTORY, video_limits=VideoLimits(3136, 9408, 10**9))


@cache
def prompt(name: str) -> Prompt:
    return golden_prompt(processor(), DIRECTORY, name, add_vision_id=PROMPTS[name])


class RecordedEngine(InlineEngine):
    """Keeps the raw logits behind every token of requests that ask for logprobs."""

    def __init__(self, **settings: Any) -> None:
        settings = {"num_pages": 128, "max_step_tokens": 512, **settings}
        super().__init__(load_model(DIRECTORY, "cpu", torch.float32), processor(), **settings)
        self.logits: dict[str, list[Tensor]] = {}
        runner = self.worker._runner
        launch, results = runner.launch, runner._results
        self.step: Step | None = None

        def recorded_launch(step: Step, embeds: Any) -> Launched:
            self.step = step
            return launch(step, embeds)

        def recorded_results(outputs: Mapping[str, Tensor], rows: int, logprobs: int | None) -> Any:
            assert self.step is not None
            ends = (chunk.sequence for chunk in self.step.chunks if chunk.is_last)
            for row, sequence in enumerate((*self.step.sequences, *ends)):
                if "logits" in outputs:
                    rows_of = self.logits.setdefault(sequence.request.request_id, [])
                    rows_of.append(outputs["logits"][row].clone())
            return results(outputs, rows, logprobs)

        runner.launch, runner._results = recorded_launch, recorded_results  # type: ignore[method-assign]

    def difference(self, name: str, golden: str) -> float:
        """Largest logit error over the golden's tokens, rows past the tokenizer's vocabulary left out."""
        rows = torch.stack(self.logits[name][:TOKENS])
        return largest_difference(rows, expected()[f"prompt.{golden}.generated_logits"][:, : rows.shape[1]])


def golden_tokens(name: str) -> list[int]:
    return expected()[f"prompt.{name}.generated_ids"].tolist()


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("max_step_tokens", [512, 37])
def test_golden_tokens_and_logits_in_company(graphs: bool, max_step_tokens: int) -> None:
    engine = RecordedEngine(graphs=graphs, max_step_tokens=max_step_tokens)
    for name in PROMPTS:
        engine.submit(name, prompt(name), max_tokens=TOKENS, logprobs=2)
    engine.run()
    assert not engine.failures()
    for name in PROMPTS:
        assert engine.tokens(name) == golden_tokens(name)
        assert engine.difference(name, name) <= 1e-4
    routes = {(kind, route) for kind, route, _ in engine.steps()}
    assert (("decode", "replay") in routes) == graphs
    assert (("encoder", "replay") in routes) == graphs
    engine.assert_nothing_left()


def test_the_plain_variant_generates_the_golden_tokens() -> None:
    engine = RecordedEngine()
    for name in PROMPTS:
        engine.submit(name, prompt(name), max_tokens=TOKENS)
    engine.run()
    assert {name: engine.tokens(name) for name in PROMPTS} == {name: golden_tokens(name) for name in PROMPTS}
    assert not engine.logits


def test_a_prefix_hit_gives_the_same_logits() -> None:
    engine = RecordedEngine()
    for turn in range(2):
        for name in PROMPTS:
            engine.submit(f"{name}{turn}", prompt(name), max_tokens=TOKENS, logprobs=0)
        engine.run()
    for name in PROMPTS:
        assert engine.tokens(f"{name}1") == golden_tokens(name)
        assert engine.difference(f"{name}1", name) <= 1e-4
    cached = {d.request_id: d.cached_tokens for outputs in engine.channel.outputs for d in outputs.chat}
    # The prompts share their beginning, so some hit it in the first turn; in the second the items hit as well.
    for name in PROMPTS:
        last_item = max((span.start + span.length for span in prompt(name).spans), default=8)
        assert cached[f"{name}0"] < last_item <= cached[f"{name}1"]
    assert engine.counter("prefix_cache_hit_tokens_total") == sum(cached.values())


def test_the_same_text_with_another_image_misses() -> None:
    engine = RecordedEngine()
    messages, items = golden_messages(processor(), DIRECTORY, "images")
    pixels = np.asarray(Image.open(DIRECTORY / "images" / _first_picture()).convert("RGB"))[::-1, ::-1]
    first = processor().image(Image.fromarray(np.ascontiguousarray(pixels)))
    assert first.num_embeds == items[0].num_embeds and first.digest != items[0].digest
    other = prompt_of(processor(), messages, [first, *items[1:]], options={"add_vision_id": True})
    original = prompt("images")
    assert (other.token_ids == original.token_ids).all() and (other.positions == original.positions).all()
    engine.submit("warm", original, max_tokens=TOKENS, logprobs=0)
    engine.run()
    engine.submit("other", other, max_tokens=TOKENS, logprobs=0)
    engine.run()
    cached = {d.request_id: d.cached_tokens for outputs in engine.channel.outputs for d in outputs.chat}
    assert cached["other"] <= original.spans[0].start
    alone = RecordedEngine()
    alone.submit("other", other, max_tokens=TOKENS, logprobs=0)
    alone.run()
    assert engine.tokens("other") == alone.tokens("other")
    assert largest_difference(torch.stack(engine.logits["other"]), torch.stack(alone.logits["other"])) <= 1e-4
    # And it is another answer, so reuse of the first image's keys would have shown.
    assert largest_difference(torch.stack(engine.logits["other"]), torch.stack(engine.logits["warm"])) > 1e-2


def _first_picture() -> str:
    prompts = json.loads((DIRECTORY / "inputs.json").read_text())["prompts"]
    content = [part for message in prompts["images"]["messages"] for part in message["content"]]
    return next(part["image"] for part in content if isinstance(part, dict) and "image" in part).rsplit("/", 1)[-1]


def test_preemptions_do_not_change_the_answers() -> None:
    engine = RecordedEngine(num_pages=64, encoder_cache_bytes=1)
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
    engine = RecordedEngine()
    moved = replace(prompt("images"), positions=prompt("images").positions * np.array([[1], [1], [2]], np.int32))
    engine.submit("moved", moved, max_tokens=2, logprobs=0)
    engine.run()
    assert not torch.allclose(
        engine.logits["moved"][0], expected()["prompt.images.generated_logits"][0, : len(engine.logits["moved"][0])]
    )
