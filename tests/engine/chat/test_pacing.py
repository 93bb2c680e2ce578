"""How large chunks are beside rows that decode: learned costs, and the seconds that are left between tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from service.engine.chat.graphs import CACHED_PREFILL_TOKENS
from service.engine.chat.pacing import ChatCosts, ChunkBudget, Gaps, PrefillCost

SIZES = CACHED_PREFILL_TOKENS["cuda"]
LAUNCH, TOKEN, PAIR = 1.5e-3, 6e-6, 4e-10
"""Seconds, as a model of two billion parameters takes them on a large GPU."""


def true_seconds(tokens: int, pairs: int) -> float:
    return LAUNCH + TOKEN * tokens + PAIR * pairs


def learned(noise: Callable[[], float] = lambda: 1.0, steps: int = 200) -> PrefillCost:
    cost, dice = PrefillCost(), random.Random(1)
    for _ in range(steps):
        tokens, context = dice.choice(SIZES), dice.choice((0, 500, 4_000, 30_000))
        cost.observe(tokens, tokens * context, true_seconds(tokens, tokens * context) * noise())
    return cost


CASES = [(128, 0), (2048, 0), (512, 8_000), (1024, 30_000)]


def relative_errors(cost: PrefillCost) -> list[float]:
    return [
        cost.seconds(tokens, tokens * context) / true_seconds(tokens, tokens * context) - 1 for tokens, context in CASES
    ]


def test_the_cost_of_a_chunk_is_learned_with_its_context() -> None:
    assert max(map(abs, relative_errors(learned()))) < 0.05
    dice = random.Random(2)
    noisy = relative_errors(learned(lambda: dice.uniform(0.9, 1.1)))
    assert max(map(abs, noisy)) < 0.15
    behind = learned().seconds(1024, 1024 * 30_000) / learned().seconds(1024, 0)
    assert 2 < behind < 3


@pytest.mark.parametrize("kind", ["decode", "encoder"])
def test_a_launch_that_was_held_up_moves_a_mean_little_and_a_change_all_the_way(kind: str) -> None:
    costs = ChatCosts()
    for _ in range(10):
        costs.observe(kind, 32, 0.002)
    costs.observe(kind, 32, 30.0)
    assert costs.mean(kind, 32) <= 2 * 0.002
    for _ in range(20):
        costs.observe(kind, 32, 0.2)
    assert costs.mean(kind, 32) == pytest.approx(0.2, rel=0.01)
    for _ in range(40):
        costs.observe(kind, 32, 0.002)
    assert costs.mean(kind, 32) == pytest.approx(0.002, rel=0.05)


def test_an_outlier_moves_the_cost_little_and_a_change_moves_it_all_the_way() -> None:
    cost = learned()
    before = cost.seconds(512, 0)
    cost.observe(512, 0, 100 * before)
    assert before <= cost.seconds(512, 0) < 1.2 * before
    cost.observe(512, 0, 0.0)
    assert cost.seconds(512, 0) > 0.8 * before
    for _ in range(60):
        cost.observe(512, 0, 3 * before)
    assert cost.seconds(512, 0) == pytest.approx(3 * before, rel=0.05)
    for _ in range(120):
        cost.observe(512, 0, before)
    assert cost.seconds(512, 0) == pytest.approx(before, rel=0.1)


def test_a_size_costs_what_it_took_lately_and_after_that_what_the_coefficients_say() -> None:
    cost = PrefillCost()
    cost.start(LAUNCH, TOKEN, PAIR, {128: 0.009, 512: 0.009})
    assert cost.seconds(512, 0) == cost.seconds(128, 0) == 0.009
    assert cost.seconds(256, 0) == pytest.approx(LAUNCH + 256 * TOKEN)
    longer = cost.seconds(512, 512 * 8_000) / cost.seconds(512, 0)
    assert longer == pytest.approx(true_seconds(512, 512 * 8_000) / true_seconds(512, 0))
    for _ in range(60):
        cost.observe(2048, 0, true_seconds(2048, 0))
    assert not cost.measured_lately(512) and cost.measured_lately(2048)
    assert cost.seconds(512, 0) == pytest.approx(true_seconds(512, 0), rel=0.05)


def budget(
    seconds: float = math.inf, *, room: float = math.inf, min_tokens: int = 0, tokens: int = 2048
) -> ChunkBudget:
    cost = PrefillCost()
    cost.start(LAUNCH, TOKEN, PAIR)
    return ChunkBudget(tokens, seconds, room, min_tokens, cost, SIZES)


def test_a_gap_with_little_room_is_left_to_the_rows() -> None:
    little = true_seconds(20, 0)
    assert budget(room=little).affords(0) == 0 and budget(room=little).crowded
    assert budget(room=little, min_tokens=128).affords(0) == 128
    assert budget(room=true_seconds(100, 0), min_tokens=128).affords(0) == pytest.approx(100, abs=1)


def test_min_tokens_exceed_the_room_but_not_the_allowance() -> None:
    assert budget(room=0.0).affords(0) == 0 and budget(room=0.0).crowded
    assert budget(room=0.0, min_tokens=128).affords(30_000) == 128
    assert budget(0.0, room=0.0, min_tokens=128).affords(0) == 0
    assert budget(room=0.0, min_tokens=128, tokens=50).affords(0) == 50
    made = budget(room=0.0, min_tokens=128)
    made.spend(100, 0)
    assert made.affords(0) == 28


@pytest.mark.parametrize(
    ("used", "finished", "room", "kept"),
    [
        (1024, False, math.inf, 1024),
        (2016, False, math.inf, 2016),  # the budget beside 32 rows: little padding
        (1100, False, math.inf, 1024),  # 1280 computed for 1100
        (260, True, math.inf, 260),  # another step costs more than the padding
        (1100, True, 0.0081, 1024),  # 1280 would take too long
        (20, False, 0.0001, 20),  # nothing smaller is captured
        (5000, False, math.inf, 5000),  # nothing larger is captured
    ],
)
def test_chunks_fill_captured_prefills(used: int, finished: bool, room: float, kept: int) -> None:
    made = budget(room=room, tokens=8192)
    made.spend(used, 0)
    assert used - made.excess(finished=finished) == kept


def test_a_gap_has_room_up_to_the_target_and_the_minimum_decode_rate() -> None:
    assert Gaps(None).room(0.002) == math.inf
    assert Gaps(0.015).room(0.0) == pytest.approx(0.0135)
    assert Gaps(0.015).room(0.003) == pytest.approx(0.0135 - 0.003)
    assert Gaps(0.015).room(0.001) == pytest.approx(0.001 / 0.15 - 0.001)
    assert Gaps(0.015).room(0.018) == pytest.approx(0.009)  # rows that leave no time share theirs


def test_work_over_the_room_is_paid_back_before_more_comes() -> None:
    gaps = Gaps(0.015)
    whole = gaps.room(0.002)
    gaps.spend(0.028)
    assert gaps.room(0.002) == 0 and not gaps.free
    closed = 0
    while not gaps.free:
        gaps.close(0.002)
        closed += 1
        assert gaps.room(0.002) <= whole
    assert closed == math.ceil(0.028 / whole)
    gaps.spend(0.5)
    gaps.close(0.0)  # the rows have ended
    assert gaps.free


def test_what_others_take_of_a_gap_leaves_less_room_and_makes_what_is_put_off_due() -> None:
    gaps = Gaps(0.015)
    whole = gaps.room(0.002)
    gaps.others_launched(0.004)
    assert gaps.room(0.002) == pytest.approx(whole - 0.004) and not gaps.free
    gaps.close(0.002)
    assert not gaps.due and gaps.free and gaps.room(0.002) == whole
    gaps.others_launched(0.02)
    assert gaps.room(0.002) == 0
    gaps.close(0.002, put_off=True)
    assert gaps.due
    for _ in range(2):  # By one that cannot wait.
        gaps.others_launched(0.02)
        assert gaps.room(0.002) == 0 and not gaps.free
        gaps.close(0.002, put_off=True)
        assert gaps.due
    gaps.others_launched(0.02)
    assert gaps.room(0.002) == whole and gaps.free
    gaps.spend(0.003)
    assert gaps.room(0.002) == pytest.approx(whole - 0.003) and not gaps.free
    gaps.close(0.002)
    assert not gaps.due and gaps.free
    gaps.spend(0.001)
    assert gaps.due  # Until the rows have their tokens.
    gaps.close(0.002)
    assert not gaps.due
