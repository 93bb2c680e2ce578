"""What launches of speech cost, as measured."""

from __future__ import annotations

import pytest

from service.engine.speech.costs import SpeechCosts
from service.engine.speech.stream import eager_cost_key
from tests.engine.speech.simulator import measured_costs


def test_a_first_launch_of_a_size_that_was_held_up_counts_little() -> None:
    costs = measured_costs()
    kind, size = eager_cost_key(1300)
    before = costs.mean(kind, 0, size)
    costs.observe(kind, 0, size, 0.8)
    assert costs.mean(kind, 0, size) == pytest.approx(3 * before)


def test_a_launch_of_a_known_size_that_was_held_up_counts_little_and_a_change_all_the_way() -> None:
    costs = measured_costs()
    before = costs.mean("decode", 10, 8)
    costs.observe("decode", 10, 8, 30.0)
    assert costs.mean("decode", 10, 8) < 1.5 * before
    for _ in range(40):
        costs.observe("decode", 10, 8, 20 * before)
    assert costs.mean("decode", 10, 8) == pytest.approx(20 * before, rel=0.01)


def test_the_first_measurement_of_a_kind_counts_as_it_is() -> None:
    costs = SpeechCosts()
    for solver_steps, seconds in ((4, 0.001), (64, 0.5)):
        costs.observe("decode", solver_steps, 8, seconds)
        assert costs.mean("decode", solver_steps, 8) == seconds


def test_eager_prefills_have_few_sizes_which_hold_their_tokens() -> None:
    sizes = [eager_cost_key(tokens)[1] for tokens in range(1, 4097)]
    assert len(set(sizes)) < 48
    assert all(tokens <= size < 1.25 * tokens + 1 for tokens, size in enumerate(sizes, start=1))
