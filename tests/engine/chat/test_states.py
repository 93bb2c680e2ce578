"""Recurrent state: a cached prefix answers as a computed one, and no token is added twice, lost or another's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from models.interfaces.media import Prompt
from models.layers.kv_cache import STATE_INTERVAL
from service.engine import memory
from service.engine.chat import states as chat_states
from tests.models.families.family import FAMILIES
from tests.support.inference import no_gradients as no_gradients
from tests.support.inline_engine import InlineEngine
from tests.support.recurrent_chat import recurrent_model
from tests.support.slow import slow
from tests.support.tiny_chat import tiny_prompt

MODEL = recurrent_model()
TEXT = [(7 * place * place + 3 * place) % 80 + 1 for place in range(400)]


def engine(family: str | None = None, **settings: Any) -> InlineEngine:
    """Of the golden checkpoint of a family, or of the miniature."""
    model = (MODEL, None) if family is None else (FAMILIES[family].on("cpu"), FAMILIES[family].processor)
    sizes = {"page_size": 16, "num_pages": 128, "max_step_tokens": STATE_INTERVAL, "max_running": 4}
    return InlineEngine(*model, **{**sizes, **settings})


def text(length: int, *own: int) -> Prompt:
    return tiny_prompt([TEXT[:length], own])


def answer(made: InlineEngine, name: str, prompt: Prompt, **sampling: Any) -> list[int]:
    made.submit(name, prompt, **sampling)
    made.run()
    return made.tokens(name)


@pytest.mark.parametrize(("graphs", "length"), [(True, 200), (False, 232), slow(True, 232), slow(False, 200)])
@pytest.mark.parametrize("family", [None, slow("qwen3_5"), slow("qwen3_5_moe")])
def test_a_hit_gives_the_bits_of_the_uncached_prompt(family: str | None, graphs: bool, length: int) -> None:
    """At every boundary, the last one twice; the rest takes the bucket of 16 tokens or that of 64. Both compute pieces
    of STATE_INTERVAL tokens: other numbers of rows may take other GEMMs."""
    asked = {"max_tokens": 8, "logprobs": 0}
    alone = engine(family, graphs=graphs)
    expected = answer(alone, "it", text(length), **asked)
    last = (length - 1) // STATE_INTERVAL * STATE_INTERVAL
    for hit in (0, 64, 128, 192):
        made = engine(family, graphs=graphs)
        if hit:
            answer(made, "before", text(hit + chat_states.PROMPT_TAIL, 85), max_tokens=1)
        for name, cached in (("it", hit), ("again", last)):
            assert answer(made, name, text(length), **asked) == expected, (name, hit)
            np.testing.assert_array_equal(made.log_probabilities(name), alone.log_probabilities("it"))
            assert made.cached_tokens()[name] == cached
        made.assert_nothing_left()


def test_where_prompts_part_a_snapshot_is_left() -> None:
    """The second one to share a beginning leaves it, also while the first is computed; the others wait for it."""
    made = engine(max_step_tokens=256)
    for name, own in (("first", 81), ("second", 82), ("third", 83), ("fourth", 84)):
        made.submit(name, text(150, *[own] * 60))
    made.run()
    assert made.cached_tokens() == {"first": 0, "second": 0, "third": 128, "fourth": 128}
    for name, own in (("first", 81), ("second", 82), ("third", 83), ("fourth", 84)):
        assert made.tokens(name) == answer(engine(graphs=False), "it", text(150, *[own] * 60)), name
    answer(made, "second again", text(150, *[82] * 60))
    assert made.cached_tokens()["second again"] == 192, "it left one near its end, too"
    made.assert_nothing_left()


def test_a_chunk_that_ends_at_a_snapshot_leaves_the_one_inside_it_to_another_chunk() -> None:
    """Two are planned, at 64, where the prompts part, and at 128, where the chunk would end."""
    made = engine(max_step_tokens=128)
    answer(made, "first", text(80, *[81] * 70))
    answer(made, "second", text(80, *[82] * 70))
    answer(made, "again", text(80, *[82] * 70))
    answer(made, "third", text(80, *[83] * 70))
    assert made.cached_tokens() == {"first": 0, "second": 0, "again": 128, "third": 64}
    assert made.tokens("again") == made.tokens("second")


@pytest.mark.parametrize("ended", [slow("length"), "stop", slow("abort"), "preempted"])
def test_an_answer_leaves_the_state_at_its_last_boundary(ended: str) -> None:
    alone = answer(engine(graphs=False), "it", text(100), max_tokens=60)
    made = engine()
    stops = [alone[40]] if ended == "stop" else []
    made.submit("it", text(100), max_tokens=40 if ended == "length" else 60, stop_token_ids=stops)
    while len(made.tokens("it")) < 35 and made.finish_reason("it") is None:
        made.turn()
    if ended == "abort":
        made.abort("it")
    elif ended == "preempted":
        scheduler = made.worker._scheduler
        (sequence,) = scheduler.running.values()
        scheduler.preempt(sequence)
        assert sequence.hit_pages * sequence.page_size == 128
    made.run()
    told = made.tokens("it")
    if ended == "preempted":
        assert told == alone
    following = tiny_prompt([TEXT[:100], told, [5] * 10])
    got = answer(made, "next", following)
    assert made.cached_tokens()["next"] == (100 + len(told)) // STATE_INTERVAL * STATE_INTERVAL >= 128
    assert got == answer(engine(graphs=False), "it", following)
    made.assert_nothing_left()


def test_slots_follow_from_the_memory_of_states(monkeypatch: pytest.MonkeyPatch) -> None:
    row = 2 * 32 * 4
    monkeypatch.setattr(memory, "CPU_STATE_BYTES", 11 * row)
    worker = engine(max_running=8).worker
    assert (worker.state_row_bytes, worker.state_rows, worker.slots) == (row, 12, 3)
    assert worker._scheduler.slots.num_slots == 3 and worker.max_pages == 1 + 3 * 16
    assert engine(max_running=2).worker.slots == 2
