"""How large chunks are beside rows that decode: costs that are learned, gaps that hold, prompts that go on."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from service.engine.chat.chunk_budget import ChunkBudget
from service.engine.chat.costs import ChatCosts, PrefillCost
from service.engine.chat.itl_budget import Gaps
from service.engine.chat.pacing import MIN_CHUNK_TOKENS, ChunkWork, Pacing
from service.engine.chat.replay_choice import CACHED_PREFILL_TOKENS
from service.engine.chat.scheduler import Scheduler
from service.engine.chat.sequence import ChatSequence
from service.engine.core.pages import PagePool
from service.engine.core.slots import SlotPool
from service.link.messages import ChatRequest, SamplingParams
from tests.support.tiny_chat import tiny_prompt

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


def test_nothing_measured_costs_nothing_and_one_measurement_gives_the_scale() -> None:
    cost = PrefillCost()
    assert cost.seconds(2048, 10**7) == 0.0
    cost.observe(512, 0, 0.0)
    assert not cost.known
    cost.observe(512, 0, 0.064)
    assert cost.seconds(512, 0) == pytest.approx(0.064)
    assert 0.064 < cost.seconds(1024, 0) < 0.128 and cost.seconds(512, 512 * 10_000) > 0.1


@pytest.mark.parametrize("times", [20, 200, 2000])
def test_a_first_measurement_that_was_held_up_is_forgotten(times: float) -> None:
    cost = PrefillCost()
    cost.observe(512, 0, times * true_seconds(512, 0))
    for _ in range(400):
        for tokens, context in CASES:
            cost.observe(tokens, tokens * context, true_seconds(tokens, tokens * context))
    assert max(map(abs, relative_errors(cost))) < 0.05


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


def test_coefficients_stay_positive_and_finite_whatever_is_measured() -> None:
    cost, dice = PrefillCost(), random.Random(3)
    for _ in range(2000):
        cost.observe(dice.choice((1, 64, 2048)), dice.choice((0, 10**8)), dice.choice((0.0, 1e-6, 1e-3, 10.0)))
        assert all(0 < coefficient < math.inf for coefficient in cost.coefficients)


def test_a_start_from_captures_replaces_the_usual_shape() -> None:
    cost = PrefillCost()
    cost.start(LAUNCH, TOKEN, PAIR)
    assert cost.seconds(1024, 1024 * 8_000) == pytest.approx(true_seconds(1024, 1024 * 8_000))
    lost_in_noise = PrefillCost()
    lost_in_noise.start(0.0, TOKEN, 0.0)
    assert all(coefficient > 0 for coefficient in lost_in_noise.coefficients)


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


def test_a_chunk_behind_a_long_context_is_shorter() -> None:
    fresh, behind = budget(room=0.008).affords(0), budget(room=0.008).affords(30_000)
    assert true_seconds(fresh, 0) == pytest.approx(0.008, rel=0.01)
    assert true_seconds(behind, behind * 30_000) == pytest.approx(0.008, rel=0.01)
    assert behind < fresh / 2


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


def test_a_bucket_that_is_mostly_padding_is_replayed_only_where_a_second_step_costs_more() -> None:
    """Before all buckets are captured, the next larger one may be far."""
    made = budget()
    made.sizes = (64, 2048)
    made.spend(1100, 0)
    assert made.excess(finished=True) == 0  # 64 tokens at a time would take longer
    made.sizes = (128, 1024, 2048)
    assert made.excess(finished=True) == 76


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


@pytest.mark.parametrize(("target", "decode_seconds"), [(None, 0.002), (0.015, 0.0)], ids=["no target", "no rows"])
def test_nothing_is_due_without_rows_or_a_target(target: float | None, decode_seconds: float) -> None:
    gaps = Gaps(target)
    gaps.others_launched(0.02)
    gaps.close(decode_seconds, put_off=True)
    assert not gaps.due and gaps.free


def sequence(name: str, length: int, *, arrival: float = 0.0, max_tokens: int = 100_000) -> ChatSequence:
    prompt = tiny_prompt([[len(name)] * length])
    return ChatSequence(ChatRequest(name, "m", prompt, SamplingParams(max_tokens=max_tokens), arrival), max_tokens, 16)


Truth = Callable[[int, int], float]


class Simulation:
    """The scheduler and its pacing over a clock that every step moves by what it costs in truth."""

    def __init__(
        self, decode: float, *, token: float = TOKEN, target: float | None = 0.015, true: Truth | None = None
    ) -> None:
        """true: seconds of a launch of so many tokens and pairs; by default linear in both."""
        self.decode = decode
        self.true = true or (lambda tokens, pairs: LAUNCH + token * tokens + PAIR * pairs)
        self.chunks: list[int] = []
        """Tokens of each step's chunks beside rows."""
        self.pacing = Pacing(target, 2048)
        self.scheduler = Scheduler(PagePool(8192, 16), SlotPool(64), 2048)
        self.now = 0.0
        if true is not None:  # as captures measure it, without cached keys
            captured = {size: true(size, 0) for size in SIZES}
            token, launch = np.polyfit(SIZES, list(captured.values()), 1).tolist()
            pair = (true(2048, 2048 * 8_000) - true(2048, 0)) / (2048 * 8_000)
            self.pacing.costs.prefill.start(launch, token, pair, captured)
        self.gaps: list[float] = []
        self.first_token: dict[str, float] = {}
        self.dice = random.Random(5)

    def step(self) -> None:
        rows = len(self.scheduler.rows.slots)
        made = None
        if self.scheduler.has_prefills():
            made = self.pacing.chunk_budget(rows, math.inf, SIZES, must=False)
        step = self.scheduler.schedule(lambda sequence: True, made)
        assert step is not None
        seconds, work = self.decode if rows else 0.0, None
        if step.chunks:
            assert made is not None
            tokens, pairs = made.padded(made.used), made.pairs
            seconds += self.true(tokens, pairs) * self.dice.uniform(0.97, 1.05)
            work = ChunkWork(tokens, pairs, self.pacing.decode_seconds(rows))
            self.pacing.spend(rows, made.predicted)
        self.pacing.gaps.close(self.pacing.decode_seconds(rows))
        self.scheduler.launched(step)
        self.pacing.observe("decode" if work is None else "mixed", rows, work, seconds)
        self.now += seconds
        if rows:
            self.gaps.append(seconds)
            self.chunks += [made.used] if made is not None and step.chunks else []
        for chunk in step.chunks:
            if chunk.is_last:
                self.first_token[chunk.sequence.request_id] = self.now


def beside_streams(decode: float, length: int, *, token: float = TOKEN, true: Truth | None = None) -> Simulation:
    """32 streams that decode, and then a prompt of this length, until its first token."""
    made = Simulation(decode, token=token, true=true)
    for index in range(32):
        made.scheduler.add(sequence("s" * (index + 1), 100))
    while len(made.scheduler.rows.slots) < 32 or len(made.gaps) < 50:
        made.step()
    made.gaps, made.chunks, made.now = [], [], 0.0
    made.scheduler.add(sequence("long", length))
    while "long" not in made.first_token:
        made.step()
    return made


@pytest.mark.parametrize(("length", "within"), [(8_000, 0.25), (30_000, 1.5)])
def test_long_prompts_leave_the_streams_their_gaps_and_come_in_time(length: int, within: float) -> None:
    made = beside_streams(0.0021, length)
    gaps = sorted(made.gaps)
    assert gaps[int(0.99 * len(gaps))] <= 0.015 and gaps[-1] <= 0.025
    assert made.first_token["long"] <= within
    assert len(gaps) * 0.0021 / made.now >= 0.15 * 0.95


FLAT = 512
"""Tokens up to which a launch takes no less time: they do not fill the GPU."""


def flat_launches(tokens: int, pairs: int) -> float:
    return 7.5e-3 + TOKEN * max(tokens, FLAT) + PAIR * pairs / 100


def flat_attention(tokens: int, pairs: int) -> float:
    """Each query block reads all cached keys, and all blocks of up to FLAT queries run at once."""
    return LAUNCH + TOKEN * tokens + PAIR * (pairs / tokens) * max(tokens, FLAT)


@pytest.mark.parametrize("true", [flat_launches, flat_attention])
@pytest.mark.parametrize("length", [8_000, 30_000])
def test_chunks_do_not_shrink_where_smaller_ones_take_as_long(true: Truth, length: int) -> None:
    made = beside_streams(0.0021, length, true=true)
    gaps = sorted(made.gaps)
    assert gaps[int(0.99 * len(gaps))] <= 0.015
    assert min(made.chunks[:-1]) >= FLAT


def test_streams_that_leave_no_time_share_it_with_the_prompt() -> None:
    """The target is missed anyway; the prompt gets a third of the time, less what captured sizes leave of it."""
    made = beside_streams(0.016, 8_000)
    assert 0.65 <= len(made.gaps) * 0.016 / made.now <= 0.75


def test_a_slow_device_makes_progress_by_the_smallest_chunk() -> None:
    """128 tokens take longer than a gap may; they come every few gaps, and the streams keep their share."""
    made = beside_streams(0.004, 2_000, token=4e-4)
    assert made.first_token["long"] < 3 * 2_000 * 4e-4 * 4
    assert sum(gap > 0.04 for gap in made.gaps) == pytest.approx(2_000 / MIN_CHUNK_TOKENS, abs=4)
    assert len(made.gaps) * 0.004 / made.now >= 0.15


def test_a_short_prompt_overtakes_the_rest_of_a_long_one() -> None:
    made = Simulation(0.0021)
    made.scheduler.add(sequence("long", 30_000))
    for _ in range(3):
        made.step()
    made.scheduler.add(sequence("short", 400, arrival=made.now))
    arrived = made.now
    while "short" not in made.first_token:
        made.step()
    assert made.first_token["short"] - arrived < 0.05 and "long" not in made.first_token
    while "long" not in made.first_token:
        made.step()


def test_without_a_target_a_step_takes_its_whole_token_budget() -> None:
    made = Simulation(0.0021, target=None)
    made.scheduler.add(sequence("a", 100))
    made.step()
    made.scheduler.add(sequence("long", 9_000))
    steps = 0
    while "long" not in made.first_token:
        made.step()
        steps += 1
    assert steps == math.ceil(9_000 / 2047)
