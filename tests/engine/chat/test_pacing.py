"""Chunks and passes keep the target of time between tokens: the prices, and a worker that keeps to them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from service.api.structured.grammar import regex_grammar
from service.engine.chat.encoder import Encoded, Part
from service.engine.chat.graphs import CACHED_PREFILL_TOKENS
from service.engine.chat.guided import guidance
from service.engine.chat.pacing import ChatCosts, ChunkBudget, Pacing, PrefillCost
from service.engine.chat.sequence import Step
from tests.engine.chat.test_prefix_index import alone
from tests.support.inference import no_gradients as no_gradients
from tests.support.inline_engine import InlineEngine
from tests.support.slow import slow
from tests.support.tiny_chat import END_TOKEN, tiny_item, tiny_prompt

SIZES = CACHED_PREFILL_TOKENS["cuda"]
GPU_LAUNCH, GPU_TOKEN, GPU_PAIR = 1.5e-3, 6e-6, 4e-10
"""Seconds, as a model of two billion parameters takes them on a large GPU."""


def true_seconds(tokens: int, pairs: int) -> float:
    return GPU_LAUNCH + GPU_TOKEN * tokens + GPU_PAIR * pairs


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


def test_a_launch_that_was_held_up_moves_a_mean_little_and_a_change_all_the_way() -> None:
    costs = ChatCosts()
    for seconds, count, mean in ((0.002, 10, 0.002), (30.0, 1, 0.004), (0.2, 20, 0.2), (0.002, 40, 0.002)):
        for _ in range(count):
            costs.observe("decode", 32, seconds)
        assert costs.mean("decode", 32) == pytest.approx(mean, rel=0.05)


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


def test_a_size_takes_no_longer_than_a_larger_one_did() -> None:
    cost = PrefillCost()
    cost.start({128: 0.009, 512: 0.008, 2048: 0.02}, GPU_PAIR)
    assert cost.seconds(64, 0) == cost.seconds(256, 0) == cost.seconds(512, 0) == 0.008
    assert cost.seconds(1280, 0) == pytest.approx(0.014) and cost.seconds(4096, 0) == pytest.approx(0.04)
    assert cost.seconds(512, 512 * 8_000) == pytest.approx(0.008 + GPU_PAIR * 512 * 8_000)


def budget(
    seconds: float = math.inf, *, room: float = math.inf, min_tokens: int = 0, tokens: int = 2048
) -> ChunkBudget:
    cost = PrefillCost()
    cost.start({size: true_seconds(size, 0) for size in SIZES}, GPU_PAIR)
    return ChunkBudget(tokens, seconds, room, min_tokens, cost, SIZES)


def test_a_gap_with_little_room_is_left_to_the_rows() -> None:
    """min_tokens exceed the room, but not the allowance."""
    little = true_seconds(20, 0)
    for room in (0.0, little):
        assert budget(room=room).affords(0) == 0 and budget(room=room).crowded
        assert budget(room=room, min_tokens=128).affords(0) == 128
    assert budget(room=true_seconds(100, 0), min_tokens=128).affords(0) == 64
    assert budget(room=0.0, min_tokens=128).affords(30_000) == 128
    assert budget(0.0, room=0.0, min_tokens=128).affords(0) == 0
    assert budget(room=0.0, min_tokens=128, tokens=50).affords(0) == 50
    made = budget(room=0.0, min_tokens=128)
    made.spend(100, 0)
    assert made.affords(0) == 28


@pytest.mark.parametrize("used", [0, 20])
def test_chunks_fill_the_captured_prefills_that_a_gap_has_room_for(used: int) -> None:
    def fill(room: float, context: int) -> ChunkBudget:
        made = budget(room=room, tokens=2000)
        made.spend(used, 0)
        made.spend(made.affords(context), context)
        return made

    assert fill(math.inf, 8_000).used == fill(1.0, 0).used == 2000
    assert fill(0.0081, 0).used == 1024
    for context in (8_000, 30_000):
        made = fill(0.0081, context)
        assert 256 < made.used < 1024 and made.predicted <= 0.0081
        made.spend(1, context)
        assert made.predicted > 0.0081


def test_a_gap_has_room_up_to_the_target_and_the_minimum_decode_rate() -> None:
    assert Pacing(None, 2048).room(0.002) == math.inf
    assert Pacing(0.015, 2048).room(0.0) == pytest.approx(0.0135)
    assert Pacing(0.015, 2048).room(0.003) == pytest.approx(0.0135 - 0.003)
    assert Pacing(0.015, 2048).room(0.001) == pytest.approx(0.001 / 0.15 - 0.001)
    assert Pacing(0.015, 2048).room(0.018) == pytest.approx(0.009)  # rows that leave no time share theirs


def test_work_over_the_room_is_paid_back_before_more_comes() -> None:
    gaps = Pacing(0.015, 2048)
    whole = gaps.room(0.002)
    gaps.spend(1, 0.028)
    assert gaps.room(0.002) == 0 and not gaps.free
    closed = 0
    while not gaps.free:
        gaps.close(0.002)
        closed += 1
        assert gaps.room(0.002) <= whole
    assert closed == math.ceil(0.028 / whole)
    gaps.spend(1, 0.5)
    gaps.close(0.0)  # the rows have ended
    assert gaps.free


TARGET = 0.015
DECODE, LAUNCH, TOKEN, PAIR, PATCH = 0.002, 0.001, 1e-4, 1e-6, 2e-4


class PacedEngine(InlineEngine):
    """Launches are over when they return, as on a CPU. gaps: between tokens of the rows; launched: what ran, in order:
    decode rows or chunk tokens of a step, patches of a pass."""

    def __init__(self, *, token: float = TOKEN, **settings: Any) -> None:
        """token: seconds that each token of a chunk takes."""
        super().__init__(overlapped=False, itl_target=TARGET, **settings)
        self.token = token
        self.now = 1000.0
        self.gaps: list[float] = []
        self.launched: list[tuple[str, int, int]] = []
        self.token_at = self.now
        worker: Any = self.worker
        object.__setattr__(worker._context, "clock", lambda: self.now)
        self.engine._clock = lambda: self.now
        self.run_step, self.run_pass = worker._runner.launch, worker._vision.launch
        worker._runner.launch, worker._vision.launch = self.step, self.encode

    def step(self, step: Step, embeds: Any) -> Any:
        rows, tokens = len(step.slots), sum(chunk.length for chunk in step.chunks)
        pairs = sum(chunk.length * chunk.start for chunk in step.chunks)
        computed = next((size for size in self.worker._runner.prefill_sizes if size >= tokens), tokens)
        self.now += (DECODE if rows else 0) + (LAUNCH + self.token * computed + PAIR * pairs if tokens else 0)
        if rows:
            self.gaps.append(self.now - self.token_at)
            self.token_at = self.now
        self.launched.append(("step", rows, tokens))
        return self.run_step(step, embeds)

    def encode(self, parts: list[Part]) -> Encoded | None:
        patches = self.worker._vision.patches(parts)
        self.now += PATCH * patches
        self.launched.append(("encode", len(self.worker._scheduler.rows.slots), patches))
        return self.run_pass(parts)

    def streams(self, count: int) -> None:
        """Rows that decode for long; what chunks and passes cost is known, as on a GPU from captures."""
        while any(runner.capture_next(idle=True) for runner in self.worker.graph_runners):
            pass
        self.worker._pacing.costs.prefill.start({16: LAUNCH + 16 * self.token, 64: LAUNCH + 64 * self.token}, PAIR)
        for patches in (16, 32, 96):
            self.worker._pacing.costs.observe("encoder", patches, PATCH * patches)
        for index in range(count):
            self.submit(f"stream {index}", tiny_prompt([[index + 1] * 5]), max_tokens=150)
        while len(self.worker._scheduler.rows.slots) < count:
            self.turn()
        for _ in range(5):
            self.turn()
        self.gaps, self.launched = [], []


def until(engine: InlineEngine, name: str) -> None:
    for _ in range(500):
        if engine.tokens(name):
            return
        engine.turn()
    raise AssertionError(f"{name} has no token")


@pytest.mark.parametrize("graphs", [True, slow(False)])
def test_a_long_prompt_comes_in_chunks_that_keep_the_gaps(graphs: bool) -> None:
    engine = PacedEngine(graphs=graphs, max_step_tokens=200, num_pages=200)
    engine.streams(3)
    prompt = tiny_prompt([[token % 50 for token in range(220)]])
    engine.submit("long", prompt)
    until(engine, "long")
    chunks = [tokens for kind, _, tokens in engine.launched if kind == "step" and tokens]
    assert len(chunks) > 2 and sum(chunks) == 220
    assert max(engine.gaps[:-1]) <= TARGET
    engine.run()
    engine.assert_nothing_left()
    assert engine.tokens("long") == alone(prompt)


def test_a_first_token_waits_for_its_own_chunks_and_rows_for_one_step_of_chunks() -> None:
    engine = PacedEngine(max_step_tokens=200, num_pages=200)
    engine.streams(2)
    begun, prompt = engine.now, tiny_prompt([[token % 50 for token in range(220)]])
    engine.submit("short", tiny_prompt([[7] * 16]))
    until(engine, "short")
    assert engine.now - begun == pytest.approx(LAUNCH + TOKEN * 16)
    engine.submit("long", prompt)
    while len(engine.launched) < 5:
        engine.turn()
    assert [(rows, tokens > 0) for _, rows, tokens in engine.launched] == [(0, True), (3, False)] * 2 + [(0, True)]
    for name in ("stream 0", "stream 1", "short"):
        engine.abort(name)  # The next step would have been theirs.
    engine.run()
    engine.assert_nothing_left()
    assert engine.tokens("long") == alone(prompt)


def test_a_prompt_whose_smallest_chunk_fits_no_gap_goes_on_and_leaves_the_rows_their_share() -> None:
    engine = PacedEngine(token=1e-3, max_step_tokens=200, num_pages=400)
    engine.streams(3)
    engine.submit("long", tiny_prompt([[7] * 220]), max_tokens=1)
    until(engine, "long")
    chunks = [tokens for kind, _, tokens in engine.launched if kind == "step" and tokens]
    assert len(chunks) >= 2 and max(chunks) <= 128 and sum(chunks) == 220
    begin = engine.gaps.index(max(engine.gaps))
    owed = engine.gaps[begin:-1]
    assert len(owed) * DECODE >= 0.15 * 0.95 * sum(owed)
    engine.run()
    engine.assert_nothing_left()


def test_pictures_are_encoded_within_the_gaps() -> None:
    """Eight pictures of 48 patches would take 77 ms at once; a pass of one takes 9.6."""
    engine = PacedEngine(max_step_tokens=200, num_pages=400, max_running=6)
    engine.streams(3)
    pictures = [tiny_item(seed, [24, 24]) for seed in range(8)]
    prompt = tiny_prompt([[1], *pictures, [2]])
    engine.submit("pictures", prompt)
    until(engine, "pictures")
    passes = [patches for kind, _, patches in engine.launched if kind == "encode"]
    assert passes == [48] * 8
    assert max(engine.gaps) <= TARGET
    engine.run()
    engine.assert_nothing_left()
    assert engine.tokens("pictures") == alone(prompt)


@pytest.mark.slow
def test_prefills_and_encoder_passes_take_turns_in_crowded_gaps() -> None:
    """Neither waits for the other's queue to end."""
    engine = PacedEngine(max_step_tokens=200, num_pages=800, max_running=12)
    engine.streams(2)
    for seed in range(9):
        engine.submit(f"large {seed}", tiny_prompt([[1], tiny_item(seed, [96]), [2]]), max_tokens=1)
    engine.submit("long", tiny_prompt([[9] * 200]), max_tokens=1)
    until(engine, "long")
    assert 3 < [kind for kind, *_ in engine.launched].count("encode") < 9
    engine.run()
    assert all(len(engine.tokens(f"large {seed}")) == 1 for seed in range(9))
    engine.assert_nothing_left()


def guided(engine: InlineEngine, name: str, **fields: Any) -> None:
    grammar = regex_grammar("[a-z]{4,30}")
    engine.submit(name, tiny_prompt([[1, 2, 3]]), grammar=grammar, stop_token_ids=(END_TOKEN,), **fields)


def hold(engine: InlineEngine) -> None:
    """Turns until a step is held."""
    for _ in range(200):
        engine.turn()
        if engine.worker._in_flight.held is not None:
            return
    raise AssertionError("no step is held")


def test_an_encoder_pass_runs_while_a_step_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks that do not come keep steps waiting, and nothing else."""
    engine = InlineEngine(max_running=4)
    guided(engine, "guided", max_tokens=40, temperature=1.0, seed=4)
    engine.turn()
    picture = tiny_prompt([[1], tiny_item(1, [8, 6]), [2]])
    with monkeypatch.context() as patch:
        patch.setattr(guidance.MaskJob, "done", False)
        hold(engine)
        engine.submit("picture", picture)
        for _ in range(4):
            engine.turn()
        assert engine.steps()["encoder", "replay", "captured"] == 1
        held = engine.worker._in_flight.held
        assert held is not None and not engine.tokens("guided")
        assert not held.timing_valid, "its seconds are not those of a step"
    engine.run()
    engine.assert_nothing_left()
    assert engine.tokens("picture") == alone(picture)
    expected = InlineEngine(graphs=False)
    guided(expected, "guided", max_tokens=40, temperature=1.0, seed=4)
    expected.run()
    assert engine.tokens("guided") == expected.tokens("guided")


def test_a_held_step_whose_requests_are_aborted_lets_the_encoder_go_on() -> None:
    for turns in (0, 3):
        engine = InlineEngine(max_running=4)
        guided(engine, "gone", max_tokens=40)
        hold(engine)
        engine.submit("picture", tiny_prompt([[1], tiny_item(1, [8, 6]), [2]]), max_tokens=3)
        for _ in range(turns):
            engine.turn()
        engine.abort("gone")
        engine.run()
        assert len(engine.tokens("picture")) == 3
        engine.assert_nothing_left()
