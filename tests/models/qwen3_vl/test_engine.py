"""The golden prompts through the engine: together, replayed and eager, in chunks that cut pictures, after prefix hits
that end inside one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import service.engine.chat.graphs as graphs_module
from models.interfaces.media import Prompt
from tests.models.qwen3_vl.golden import BOTH, DENSE, Golden
from tests.support.chat_golden import largest_difference
from tests.support.inference import no_gradients as no_gradients
from tests.support.logits_engine import LogitsEngine

EITHER = [pytest.param(golden, id=kind) for kind, golden in BOTH.items()]
TOLERANCE = 1e-4
PAGE = 4


def engine_of(golden: Golden, **settings: object) -> LogitsEngine:
    return LogitsEngine(golden.model, golden.processor, **{"num_pages": 1024, "page_size": PAGE, **settings})


def check(engine: LogitsEngine, golden: Golden, name: str, request: str) -> None:
    expected = golden.expected[f"prompt.{name}.generated_logits"]
    assert engine.tokens(request) == golden.expected[f"prompt.{name}.generated_ids"].tolist()
    rows = engine.rows(request, len(expected))
    assert largest_difference(rows, expected[:, : rows.shape[1]]) <= TOLERANCE


@pytest.mark.parametrize(("max_step_tokens", "graphs"), [(512, True), (13, True), (13, False)])
@pytest.mark.parametrize("golden", EITHER)
def test_golden_tokens_and_logits_in_a_batch(golden: Golden, max_step_tokens: int, graphs: bool) -> None:
    engine = engine_of(golden, graphs=graphs, max_step_tokens=max_step_tokens)
    for name in golden.prompts:
        engine.submit(name, golden.prompt(name), max_tokens=golden.inputs["max_new_tokens"], logprobs=2)
    engine.run()
    assert not engine.failures()
    for name in golden.prompts:
        check(engine, golden, name, name)
    routes = engine.routes()
    assert (("decode", "replay") in routes) == graphs
    assert (("encoder", "replay") in routes) == graphs
    if graphs and max_step_tokens == 13:
        check_chunks_were_replayed(engine)
    engine.assert_nothing_left()


def check_chunks_were_replayed(engine: LogitsEngine) -> None:
    """Those with cached context, too."""
    routes = engine.routes()
    assert ("cached_prefill", "replay") in routes
    assert not {("prefill", "eager"), ("cached_prefill", "eager"), ("mixed", "eager")} & routes


@pytest.mark.parametrize("golden", EITHER)
def test_replayed_chunks_of_a_single_row(golden: Golden) -> None:
    name = min(
        (name for name in golden.prompts if golden.prompt(name).items),
        key=lambda name: len(golden.prompt(name).token_ids),
    )
    engine = engine_of(golden, max_step_tokens=1)
    engine.submit(name, golden.prompt(name), max_tokens=golden.inputs["max_new_tokens"], logprobs=0)
    engine.run()
    check(engine, golden, name, name)
    check_chunks_were_replayed(engine)
    assert engine.steps()["cached_prefill", "replay", "captured"] == len(golden.prompt(name).token_ids) - 1


@pytest.mark.parametrize("golden", EITHER)
def test_replayed_prefills(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each the static buffers, which last held another prompt's features, are filled with NaN. Text is replayed
    from a bucket with features, and once an idle engine has captured it from one without."""
    longest = max(len(golden.prompt(name).token_ids) for name in golden.prompts)
    monkeypatch.setattr(graphs_module, "PREFILL_TOKENS", {"cpu": (longest + 7,)})
    monkeypatch.setattr(graphs_module, "CACHED_PREFILL_TOKENS", {"cpu": ()})
    engine = engine_of(golden, max_step_tokens=longest + 7)
    prefill, levels = engine.worker._runner.graphs.prefill, golden.model.decoder.feature_levels
    tokens = golden.inputs["max_new_tokens"]
    text = [name for name in golden.prompts if not golden.prompt(name).items]
    assert [bucket["levels"] for bucket in prefill.captured] == [levels]
    for name in (*golden.prompts[::-1], *text):
        if name in text and {bucket["levels"] for bucket in prefill.captured} == {levels}:
            replay(engine, golden, name, "with features", tokens)
            while prefill.capture_next(idle=True):
                pass
        replay(engine, golden, name, "", tokens)
    assert {bucket["levels"] for bucket in prefill.captured} == ({0, levels} if text else {levels})
    kinds = engine.steps()
    assert kinds["prefill", "replay", "captured"] == len(golden.prompts) + 2 * len(text)
    assert not any(count for (kind, route, _), count in kinds.items() if (kind, route) == ("prefill", "eager"))


def replay(engine: LogitsEngine, golden: Golden, name: str, how: str, tokens: int) -> None:
    prefill = engine.worker._runner.graphs.prefill
    assert prefill._static is not None
    prefill._static.device.fill_(255)  # NaN in every float
    keep_pages(engine, 0)
    request = f"{name} {how} {len(engine.logits)}"
    engine.submit(request, golden.prompt(name), max_tokens=tokens, logprobs=0)
    engine.run()
    check(engine, golden, name, request)


def keep_pages(engine: LogitsEngine, count: int) -> None:
    """Evicts all cached pages but the first of the prompt that was computed last."""
    pages = engine.worker._pages
    pages.release(pages.allocate(pages.num_available - count))


def cut_inside(prompt: Prompt) -> int:
    """A position inside the largest span that a page ends at."""
    span = max(prompt.placeholders, key=lambda span: span.length)
    cut = -(-(span.start + span.length // 2) // PAGE) * PAGE
    assert span.start < cut < span.start + span.length
    return cut


@pytest.mark.parametrize("cached", [True, False], ids=["from the encoder cache", "encoded again"])
@pytest.mark.parametrize("golden", EITHER)
def test_a_prefix_hit_that_ends_inside_a_picture(golden: Golden, cached: bool) -> None:
    engine = engine_of(golden, **({} if cached else {"encoder_cache": 1}))
    for name in (name for name in golden.prompts if golden.prompt(name).items):
        prompt = golden.prompt(name)
        cut = cut_inside(prompt)
        engine.submit(f"{name} first", prompt, max_tokens=1)
        engine.run()
        keep_pages(engine, cut // PAGE)
        engine.submit(name, prompt, max_tokens=golden.inputs["max_new_tokens"], logprobs=0)
        engine.run()
        assert engine.cached_tokens()[name] == cut
        check(engine, golden, name, name)


@pytest.mark.parametrize("golden", EITHER)
def test_a_replay_behind_a_prefix_hit_that_ends_inside_a_picture(
    golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the picture brings its features. Before each replay the static buffers are filled with NaN."""
    pictured = [name for name in golden.prompts if golden.prompt(name).items]
    longest = max(len(golden.prompt(name).token_ids) for name in pictured)
    monkeypatch.setattr(graphs_module, "CACHED_PREFILL_TOKENS", {"cpu": (longest,)})
    engine = engine_of(golden, max_step_tokens=longest)
    prefill, levels = engine.worker._runner.graphs.cached_prefill, golden.model.decoder.feature_levels
    assert prefill._static is not None and [bucket["levels"] for bucket in prefill.captured] == [levels]
    for name in pictured:
        prompt = golden.prompt(name)
        cut = cut_inside(prompt)
        engine.submit(f"{name} first", prompt, max_tokens=1)
        engine.run()
        keep_pages(engine, cut // PAGE)
        replays = engine.steps()["cached_prefill", "replay", "captured"]
        prefill._static.device.fill_(255)  # NaN in every float
        engine.submit(name, prompt, max_tokens=golden.inputs["max_new_tokens"], logprobs=0)
        engine.run()
        assert engine.cached_tokens()[name] == cut
        assert engine.steps()["cached_prefill", "replay", "captured"] == replays + 1
        check(engine, golden, name, name)


def test_dropped_features_would_show() -> None:
    """The answers above depend on them: without, logits move by far more than the tolerance."""
    name = next(name for name in DENSE.prompts if DENSE.prompt(name).items)
    engine = engine_of(DENSE)
    embeds = engine.worker._vision.embeds

    def without(sequence: object, item: int) -> torch.Tensor:
        rows = embeds(sequence, item).clone()  # type: ignore[arg-type]
        rows[:, rows.shape[1] // (1 + DENSE.model.decoder.feature_levels) :] = 0
        return rows

    engine.worker._vision.embeds = without  # type: ignore[method-assign, assignment]
    engine.submit("one", DENSE.prompt(name), max_tokens=2, logprobs=0)
    engine.run()
    expected = DENSE.expected[f"prompt.{name}.generated_logits"][:1]
    rows = engine.rows("one", 1)
    assert largest_difference(rows, expected[:, : rows.shape[1]]) > 100 * TOLERANCE
    assert not np.isnan(rows.numpy()).any()
