"""Answers with drafts are those without, and what the steps leave behind is that of accepted tokens alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from models.qwen_vl.v3_5.model import load_model
from service.engine.chat import drafts as drafts_module
from service.engine.chat.drafts import MAX_ROWS, NOT_ACCEPTED, NOT_DRAFTED, DraftLength, accept, drafted_state, look_up
from service.engine.chat.pacing import ChatCosts
from service.engine.chat.sampler import apply_penalties_and_filters
from service.engine.chat.slot_state import IntColumn, SlotState
from service.engine.chat.steps import sample_tokens
from service.link.sampling import FloatColumn
from tests.engine.chat.test_guided_rows import GRAMMAR
from tests.models.families.family import FAMILIES
from tests.support.inference import no_gradients as no_gradients
from tests.support.inline_engine import InlineEngine
from tests.support.recurrent_chat import recurrent_model
from tests.support.slow import slow
from tests.support.tiny_chat import TinyChat, tiny_model, tiny_prompt

CPU = torch.device("cpu")
TWO_TOKENS = {"logit_bias": {5: 50.0, 6: 50.0}}
"""Answers of two tokens repeat what they said, so that many drafts are accepted."""
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": TWO_TOKENS,
    "seeded": {"temperature": 1.0, "seed": 3, "logprobs": 2, **TWO_TOKENS},
    "penalised": {"temperature": 1.0, "seed": 5, "frequency_penalty": 1.9, "repetition_penalty": 1.3, **TWO_TOKENS},
    "stopped": {"stop_token_ids": (7,), "min_tokens": 30, "logit_bias": {5: 50.0, 6: 50.0, 7: 99.0}},
}


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps have drafts whatever they cost here."""
    monkeypatch.setattr(DraftLength, "choose", lambda self, rows, costs: self._most if rows else 0)


@pytest.mark.parametrize("make", [tiny_model, slow(recurrent_model)])
def test_answers_and_what_later_turns_find_in_the_cache_are_those_without_drafts(make: Callable[[], TinyChat]) -> None:
    engines = [InlineEngine(make(), drafts=drafts, num_pages=90, page_size=16, max_step_tokens=64) for drafts in DRAFTS]
    for plain_or_not in engines:
        for number, (name, sampling) in enumerate(SAMPLING.items()):
            plain_or_not.submit(name, tiny_prompt([[1 + number, 2, 3, 4, 5] * 8]), max_tokens=66, **sampling)
        plain_or_not.run()
        for number, (name, sampling) in enumerate(SAMPLING.items()):
            answer = plain_or_not.tokens(name)
            prompt = tiny_prompt([[1 + number, 2, 3, 4, 5] * 8 + answer + [8, 9]])
            plain_or_not.submit(f"{name} again", prompt, max_tokens=20, **sampling)
        plain_or_not.run()
        plain_or_not.assert_nothing_left()
    plain, drafted = engines
    for name in plain.cached_tokens():
        assert drafted.tokens(name) == plain.tokens(name), name
        assert drafted.finish_reason(name) == plain.finish_reason(name)
        assert np.allclose(drafted.log_probabilities(name), plain.log_probabilities(name), atol=1e-3)
    assert drafted.cached_tokens() == plain.cached_tokens()
    assert plain.finish_reason("stopped") == "stop" and plain.cached_tokens()["greedy again"] >= 64
    steps = [sum(n for (kind, *_), n in engine.steps().items() if kind in KINDS) for engine in engines]
    assert steps[1] < 0.8 * steps[0]
    assert drafted.counter("accepted_tokens_total") > 0.3 * drafted.counter("drafted_tokens_total") > 0


DRAFTS = ("off", "lookup")
KINDS = ("decode", "verify")


def test_deltas_count_drafts() -> None:
    """All behind the first draft: a stop string, which the engine does not see, may end the answer anywhere."""
    engine = InlineEngine(drafts="lookup")
    engine.submit("it", tiny_prompt([[1, 2, 3]]), max_tokens=40, **SAMPLING["seeded"])
    engine.run()
    counts = [delta.steps for outputs in engine.channel.outputs for delta in outputs.chat]
    first = next(place for place, steps in enumerate(counts) if steps is not None)
    assert None not in counts[first:] and first < 5
    steps = counts[-1]
    assert steps is not None
    assert steps.drafted == engine.counter("drafted_tokens_total") > 0
    assert steps.accepted == engine.counter("accepted_tokens_total") == 40 - steps.steps > 0


@pytest.mark.slow
def test_batches_with_a_grammar_have_no_drafts() -> None:
    engines = [InlineEngine(drafts=drafts) for drafts in DRAFTS]
    for engine in engines:
        engine.submit("plain", tiny_prompt([[1, 2, 3]]), max_tokens=60, **SAMPLING["greedy"])
        engine.submit("guided", tiny_prompt([[4, 5]]), grammar=GRAMMAR, max_tokens=12)
        engine.run()
        engine.assert_nothing_left()
    plain, drafted = engines
    assert all(drafted.tokens(name) == plain.tokens(name) for name in ("plain", "guided"))
    kinds = {kind for kind, *_ in drafted.steps()}
    assert {"guided_layers", "verify"} <= kinds


@pytest.mark.parametrize(
    ("name", "drafts"),
    [slow("qwen3_5", "mtp"), slow("qwen3_5", "lookup"), slow("qwen3_5_moe", "mtp"), ("qwen2_vl", "lookup")],
)
def test_greedy_answers_of_published_models_are_those_of_the_references(name: str, drafts: str) -> None:
    """One by one: batches of other sizes round differently. The draft heads of the fixtures were trained."""
    family = FAMILIES[name]
    model = load_model(family.directory, CPU, torch.float32, drafter=True) if drafts == "mtp" else family.model
    engine = InlineEngine(model, family.processor, drafts=drafts, num_pages=100, page_size=16, max_step_tokens=256)
    for prompt in family.prompts:
        before = engine.counter("accepted_tokens_total")
        ids, trace = family.golden_tokens(prompt), family.expected.get(f"mtp.{prompt}.accepted")
        engine.submit(prompt, family.prompt(prompt), max_tokens=len(ids))
        engine.run()
        assert engine.tokens(prompt) == ids
        if drafts == "mtp" and trace is not None:
            # The trace may go on for a token.
            assert engine.counter("accepted_tokens_total") - before >= int(trace.sum()) - 1


def slot_state(num_slots: int, vocabulary: int, *, drafts: int = 0, history: int = 0, **columns: int) -> SlotState:
    """All slots active, at position 10."""
    state = SlotState(num_slots, 4, vocabulary, CPU, drafts=drafts, history=history)
    values = {"LENGTH": 10, "POSITION": 10, "GENERATED": 2, "ACTIVE": 1, "LIMIT": 1000, **columns}
    for name, value in values.items():
        state.ints[1:, IntColumn[name]] = value
    return state


def test_prompt_lookup_goes_on_as_the_last_occurrence_did() -> None:
    state = slot_state(3, 50, history=32, LENGTH=7)
    state.history[1, :8] = torch.tensor([1, 2, 3, 4, 9, 1, 2, 3])
    state.history[2, :8] = torch.tensor([1, 2, 3, 4, 9, 1, 2, 4])
    state.history[3, :8] = torch.tensor([9, 5, 6, 5, 6, 5, 6, 5])
    drafts = look_up(torch.tensor([1, 2, 3]), state, 4)
    assert drafts.tolist() == [[4, 9, 1, 2], [-1] * 4, [6, 5, 6, 5]]


def test_prompt_lookup_searches_the_last_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    state = slot_state(2, 50, history=32, LENGTH=15)
    state.history[1, :16] = torch.tensor([1, 2, 3, 8, 9, 9, 9, 9, 1, 2, 3, 4, 5, 1, 2, 3])
    state.history[2, :16] = torch.tensor([1, 2, 3, 8, 9, 9, 9, 9, 9, 9, 9, 4, 5, 1, 2, 3])
    slots = torch.tensor([1, 2])
    assert look_up(slots, state, 2).tolist() == [[4, 5], [8, 9]]
    monkeypatch.setattr(drafts_module, "SEARCHED", 8)
    assert look_up(slots, state, 2).tolist() == [[4, 5], [-1, -1]]


@pytest.mark.parametrize(
    ("drafts", "sampled", "columns", "count"),
    [
        ([5, 6, 7], [5, 6, 7, 8], {}, 4),
        ([5, 9, 7], [5, 6, 7, 8], {}, 2),
        ([5, 6, -1], [5, 6, 7, 8], {}, 3),
        ([5, 6, 7], [5, 6, 7, 8], {"LIMIT": 4}, 2),
        ([5, 6, 7], [5, 6, 7, 8], {"ACTIVE": 0}, 0),
        ([5, 3, 7], [5, 3, 7, 8], {}, 2),
    ],
)
def test_drafts_are_accepted_up_to_the_first_that_differs_or_stops(
    drafts: list[int], sampled: list[int], columns: dict[str, int], count: int
) -> None:
    """Token 3 is a stop token."""
    state, slots = slot_state(1, 50, history=32, **columns), torch.tensor([1])
    flags = [int(token == 3 and state.ints[1, IntColumn.ACTIVE] > 0) for token in sampled]
    rows = torch.tensor([sampled, flags]).T[None]
    results, counts = accept(rows, torch.tensor([drafts]), slots, state, full=True)
    assert counts.tolist() == [count]
    assert results[:count].tolist() == rows[0, :count].tolist()
    rest = [NOT_ACCEPTED if drafts[place - 1] >= 0 or not place else NOT_DRAFTED for place in range(count, 4)]
    assert results[count:, 1].tolist() == rest
    ints = state.ints[1]
    assert (ints[IntColumn.LENGTH], ints[IntColumn.GENERATED]) == (10 + count, 2 + count)
    stops = 3 in sampled[:count] or ints[IntColumn.GENERATED] == ints[IntColumn.LIMIT]
    assert bool(ints[IntColumn.ACTIVE]) == (count > 0 and not stops)
    assert state.output_counts[1].sum() == count
    if count:
        assert ints[IntColumn.TOKEN] == sampled[count - 1] == state.history[1, ints[IntColumn.LENGTH]]


def test_a_recurrent_state_is_kept_at_multiples_of_64() -> None:
    state = slot_state(1, 50, LENGTH=62)
    state.states = [{}]
    rows = torch.tensor([[5, 6, 7, 8], [0] * 4]).T[None]
    _, counts = accept(rows, torch.tensor([[5, 6, 7]]), torch.tensor([1]), state, full=False)
    assert counts.tolist() == [2]


@pytest.mark.parametrize("full", [False, True])
def test_accepted_drafts_do_not_change_the_distribution(full: bool) -> None:
    """Counts of 20,000 draws: the first token, and the second one where the draft was right, whose penalties count
    it."""
    draws, vocabulary, draft, penalty = 20_000, 6, 2, 1.5 if full else 0.0
    state = slot_state(draws, vocabulary)
    state.ints[1:, IntColumn.SEED] = torch.arange(draws) * 7919
    state.floats[1:, FloatColumn.TEMPERATURE] = 1.0
    state.floats[1:, FloatColumn.FREQUENCY_PENALTY] = penalty
    logits = torch.randn(2, vocabulary, generator=torch.Generator().manual_seed(1))
    slots, drafts = torch.arange(1, draws + 1), torch.full((draws, 1), draft)
    rows, drafted = drafted_state(slots, drafts, state, full=full)
    candidates = logits.repeat(draws, 1)
    if full:
        candidates = apply_penalties_and_filters(candidates, rows, drafted)
    sampled = sample_tokens(candidates, rows, drafted).unflatten(0, (draws, 2)).long()
    _, counts = accept(sampled, drafts, slots, state, full=full)
    right = counts == 2
    assert torch.equal(right, sampled[:, 0, 0] == draft)
    penalised = logits[1] - penalty * (torch.arange(vocabulary) == draft)
    for tokens, wanted in ((sampled[:, 0, 0], logits[0]), (sampled[right, 1, 0], penalised)):
        expected = wanted.softmax(0) * len(tokens)
        statistic = ((tokens.bincount(minlength=vocabulary) - expected) ** 2 / expected).sum()
        assert statistic < 25.7  # 1e-4 of the chi-squared distribution with 5 degrees of freedom


def test_drafts_are_left_out_where_they_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    length, costs = DraftLength(3), ChatCosts()
    assert (
        length.choose(4, costs) == 3 and not length.choose(MAX_ROWS + 1, costs) and not DraftLength(0).choose(4, costs)
    )
    costs.observe("decode", 4, 0.010)
    costs.observe("verify", 4, 0.015)
    for _ in range(50):
        length.observe(1)
    chosen = [length.choose(4, costs) for _ in range(600)]
    assert chosen.count(0) == 2, "what plain steps cost is measured again"
    for _ in range(50):
        length.observe(0)
    chosen = [length.choose(4, costs) for _ in range(200)]
    assert not any(chosen[4:60]) and 0 < np.count_nonzero(chosen) < 20
    for _ in range(50):
        length.observe(1)
    assert length.choose(4, costs) == 3
