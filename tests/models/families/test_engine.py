"""The golden prompts through the engine: together, replayed and eager, in chunks, behind prefix hits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import service.engine.chat.graphs as graphs_module
from models.interfaces.media import Prompt
from models.layers.kv_cache import STATE_INTERVAL
from service.engine.chat.states import PROMPT_TAIL
from tests.models.families.family import FAMILIES, HEARING, Family, families
from tests.support.chat_golden import generate
from tests.support.devices import DEVICES
from tests.support.golden import copy_checkpoint
from tests.support.inference import no_gradients as no_gradients
from tests.support.inline_engine import InlineEngine
from tests.support.slow import slow

TOLERANCE = 1e-4
PAGE = 4
WITH_FEATURES = ("qwen3_vl", "qwen3_vl_moe")


def engine_of(family: Family, device: str = "cpu", model: Any = None, **settings: Any) -> InlineEngine:
    settings = {"num_pages": 1024, "page_size": PAGE, "max_step_tokens": 512, **family.engine, **settings}
    return InlineEngine(model or family.on(device), family.processor, device=device, **settings)


def check(engine: InlineEngine, family: Family, name: str, request: str) -> None:
    """Tokens of the reference, with its log probabilities."""
    tokens = family.golden_tokens(name)
    assert engine.tokens(request) == tokens
    logits = family.of(name, "generated_logits")[:, : family.processor.vocab_size].double().log_softmax(-1)
    expected = logits.gather(1, torch.tensor(tokens)[:, None]).squeeze(1).numpy()
    assert np.abs(engine.log_probabilities(request) - expected).max() <= TOLERANCE


def prefills(engine: InlineEngine) -> set[tuple[str, str]]:
    return {(kind, route) for kind, route in engine.routes() if kind in ("prefill", "cached_prefill")}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("chunks", "graphs"), [slow(False, True), (True, True), slow(True, False)])
@pytest.mark.parametrize("family", [*families(), HEARING])
def test_golden_tokens_in_a_batch(family: Family, chunks: bool, graphs: bool, device: str) -> None:
    """Requests that ask for log probabilities beside others; then all of them again, from the prefix cache."""
    made = engine_of(family, device, graphs=graphs, max_step_tokens=family.chunk if chunks else 512)
    for turn in range(2):
        for name in family.prompts:
            length = len(family.golden_tokens(name))
            made.submit(f"{name} {turn}", family.prompt(name), max_tokens=length, logprobs=2)
            made.submit(f"plain {name} {turn}", family.prompt(name), max_tokens=length)
        made.run()
    assert not made.failures()
    for name in family.prompts:
        for turn in range(2):
            check(made, family, name, f"{name} {turn}")
            assert made.tokens(f"plain {name} {turn}") == family.golden_tokens(name)
        last = max((run.start + run.length for run in family.prompt(name).placeholders), default=PAGE)
        if made.worker.state_rows:  # Hits end where a state is kept.
            last = (len(family.prompt(name).token_ids) - PROMPT_TAIL) // STATE_INTERVAL * STATE_INTERVAL
        assert made.cached_tokens()[f"{name} 1"] >= last
    assert (("decode", "replay") in made.routes()) == graphs
    assert {route for kind, route in made.routes() if kind == "encoder"} == {"replay" if graphs else "eager"}
    if graphs and chunks:  # Nearly every chunk has cached context, and all fit a captured prefill.
        assert ("cached_prefill", "replay") in prefills(made)
        assert not any(route == "eager" for _, route in prefills(made))
    made.assert_nothing_left()


def keep_pages(engine: InlineEngine, count: int) -> None:
    """Evict all cached pages but the first of the prompt that was computed last."""
    pages = engine.worker._pages
    pages.release(pages.allocate(pages.num_available - count))


def cut_inside(prompt: Prompt) -> int:
    """A position inside the largest span that a page ends at."""
    span = max(prompt.placeholders, key=lambda span: span.length)
    cut = -(-(span.start + span.length // 2) // PAGE) * PAGE
    assert span.start < cut < span.start + span.length
    return cut


@pytest.mark.parametrize("cached", [pytest.param(True, id="from the encoder cache"), slow(False, id="encoded again")])
@pytest.mark.parametrize("family", families(*WITH_FEATURES))
def test_a_prefix_hit_that_ends_inside_a_picture(family: Family, cached: bool) -> None:
    """The rest of the picture brings its embeddings and features. Static buffers are filled with NaN before."""
    engine = engine_of(family, **({} if cached else {"encoder_cache": 1}))
    prefill = engine.worker._runner.graphs.cached_prefill
    for name in family.pictured:
        prompt = family.prompt(name)
        cut = cut_inside(prompt)
        engine.submit(f"{name} first", prompt, max_tokens=1)
        engine.run()
        keep_pages(engine, cut // PAGE)
        prefill._static.device.fill_(255)  # NaN in every float
        engine.submit(name, prompt, max_tokens=family.tokens, logprobs=0)
        engine.run()
        assert engine.cached_tokens()[name] == cut
        check(engine, family, name, name)
    assert ("cached_prefill", "replay") in prefills(engine)


@pytest.mark.parametrize("family", families(*WITH_FEATURES))
def test_replayed_prefills(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each the static buffers, which last held another prompt's features, are filled with NaN. Text is replayed
    from a bucket with features, and once an idle engine has captured it from one without."""
    longest = max(len(family.prompt(name).token_ids) for name in family.prompts)
    monkeypatch.setattr(graphs_module, "PREFILL_TOKENS", {"cpu": (longest + 7,)})
    monkeypatch.setattr(graphs_module, "CACHED_PREFILL_TOKENS", {"cpu": ()})
    engine = engine_of(family, max_step_tokens=longest + 7)
    prefill, levels = engine.worker._runner.graphs.prefill, family.model.decoder.feature_levels
    text = [name for name in family.prompts if name not in family.pictured]
    assert [bucket["levels"] for bucket in prefill.captured] == [levels]
    asked = [*family.prompts[::-1], None, *text]  # None: the engine is idle.
    for number, name in enumerate(asked):
        if name is None:
            while prefill.capture_next(idle=True):
                pass
            continue
        prefill._static.device.fill_(255)  # NaN in every float
        keep_pages(engine, 0)
        engine.submit(f"{number}", family.prompt(name), max_tokens=family.tokens, logprobs=0)
        engine.run()
        check(engine, family, name, f"{number}")
    assert {bucket["levels"] for bucket in prefill.captured} == {0, levels}
    assert engine.steps()["prefill", "replay", "captured"] == len(asked) - 1
    assert ("prefill", "eager") not in engine.routes()


def test_the_published_sampling_of_qwen2_5_vl_penalises_tokens_of_prompt_and_answer() -> None:
    """Temperature 1e-6, which is greedy, and a repetition penalty of 1.05, in replayed steps."""
    family = FAMILIES["qwen2_5_vl"]
    defaults = family.processor.generation_defaults
    assert defaults["temperature"] == 1e-6 and defaults["repetition_penalty"] == 1.05
    names = [name for name in family.prompts if f"prompt.{name}.penalised_ids" in family.expected]
    made = engine_of(family)
    for name in names:
        made.submit(name, family.prompt(name), max_tokens=family.tokens, **defaults)
    made.run()
    for name in names:
        assert made.tokens(name) == family.of(name, "penalised_ids").tolist()
    assert {route for kind, route, _ in made.steps() if kind == "decode"} == {"replay"}


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True])
def test_padding_rows_of_the_vocabulary_are_never_generated(tmp_path: Path, full: bool) -> None:
    """Rows of the output layer past the reserved ids, made to win every choice."""
    family = FAMILIES["kimi_vl"]
    size, (single, *_) = family.processor.vocab_size, family.golden_tokens(family.single)
    directory = copy_checkpoint(family.directory, tmp_path / "padded")
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["vocab_size"] = size + 20
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(family.directory / "model.safetensors")
    for name in ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"):
        rows = tensors[name]
        tensors[name] = torch.cat((rows[:size], 100 * rows[single].expand(20, -1))).contiguous()
    save_file(tensors, directory / "model.safetensors")
    padded = family.loaded(directory)
    assert generate(padded, family.prompt(family.single), 1)[2][0] >= size
    made, logprobs = engine_of(family, model=padded), 2 if full else None
    for name in family.prompts:
        made.submit(name, family.prompt(name), max_tokens=family.tokens, logprobs=logprobs)
    warm = {"max_tokens": 64, "temperature": 2.0, "seed": 3, "logprobs": logprobs}
    made.submit("warm", family.prompt(family.single), **warm)
    made.run()
    assert all(made.tokens(name) == family.golden_tokens(name) for name in family.prompts)
    assert max(made.tokens("warm")) < size
    infos = [info for outputs in made.channel.outputs for delta in outputs.chat for info in delta.infos]
    assert all(token < size for info in infos for token, _ in info.top) and bool(infos) == full
