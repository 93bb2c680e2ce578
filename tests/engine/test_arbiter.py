"""Who launches: turns by default, the listener's deadline first, nobody starves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine.arbiter import AHEAD, AHEAD_SHARE, CPU_SHARE, SHARE, Arbiter
from service.engine.core.worker import UNNOTICED, ModelWorker


@dataclass
class FakeWorker:
    """Units of a known cost; a live one's slack shrinks with time and grows with every step."""

    name: str
    cost: float
    deadline: float = math.inf
    gain: float = 0.0
    work: bool = True
    waiting: float = 0.0
    wants_next: bool = False
    longest_wait: float = UNNOTICED
    taken: float = 0.0
    stuck: bool = False
    launches: list[float] = field(default_factory=list)

    def has_work(self) -> bool:
        return self.work

    def slack(self, now: float) -> float:
        return self.deadline - now

    def backlog(self, now: float) -> float:
        return self.waiting

    def smallest_launch(self) -> float:
        return self.cost

    def due(self) -> bool:
        return self.wants_next

    def can_wait(self, now: float, seconds: float) -> bool:
        return seconds <= self.longest_wait

    def others_launched(self, seconds: float) -> None:
        self.taken += seconds

    def oldest_launch(self) -> float | None:
        return 0.0 if self.waiting else None

    def tick(self, now: float, allowance: float, *, must: bool = False) -> bool:
        if (self.cost > allowance and not must) or not self.work or self.stuck:
            return False
        self.launches.append(now)
        self.deadline += self.gain
        return True


@dataclass
class Launcher:
    """Follows the candidates of an arbiter, as the engine does."""

    arbiter: Arbiter

    def launch(self, now: float) -> bool:
        for candidate in self.arbiter.candidates(now):
            if candidate.worker.tick(now, candidate.allowance, must=candidate.must):
                self.arbiter.launched(candidate.worker, now, candidate.worker.smallest_launch())
                return True
        return False


def arbiter(*workers: FakeWorker, **options: float) -> Launcher:
    made: list[ModelWorker] = list(workers)  # type: ignore[arg-type]
    return Launcher(Arbiter(made, **options))


def shares(both: Launcher, seconds: float, *workers: FakeWorker) -> list[float]:
    """Of the time that each worker gets, if one launch follows the other for so many seconds."""
    now = 0.0
    while now < seconds:
        before = [len(worker.launches) for worker in workers]
        assert both.launch(now)
        now += sum(worker.cost * (len(worker.launches) - count) for worker, count in zip(workers, before, strict=True))
    return [len(worker.launches) * worker.cost / now for worker in workers]


def test_without_listeners_workers_take_turns() -> None:
    a, b = FakeWorker("a", 0.5), FakeWorker("b", 0.001)
    both = arbiter(a, b)
    for turn in range(10):
        assert both.launch(float(turn))
    assert len(a.launches) == len(b.launches) == 5


def test_launched_work_counts_against_the_slack() -> None:
    chat, speech = FakeWorker("chat", 0.05), FakeWorker("speech", 0.01, deadline=0.1, gain=0.0)
    speech.waiting = 0.06
    both = arbiter(chat, speech)
    both.launch(0.0)
    assert speech.launches and not chat.launches


def test_a_listener_without_slack_whose_step_is_running_comes_next() -> None:
    """On a GPU a TTS model asks for its next step shortly before the last one ends: nothing is put in between."""
    chat, speech = FakeWorker("chat", 0.005), FakeWorker("speech", 0.02, deadline=0.01, work=False, waiting=0.015)
    both = arbiter(chat, speech)
    assert not both.launch(0.0)
    speech.work, speech.waiting = True, 0.004
    assert both.launch(0.011) and speech.launches == [0.011]
    speech.work, speech.waiting = False, 0.02
    assert not both.launch(0.04)
    assert both.launch(0.06) and chat.launches == [0.06]


def test_who_is_due_goes_next_if_the_others_can_wait() -> None:
    chat, speech = FakeWorker("chat", 0.005, wants_next=True), FakeWorker("speech", 0.01)
    both = arbiter(speech, chat)
    assert both.launch(0.0) and both.launch(0.01)
    assert chat.launches == [0.0, 0.01] and not speech.launches
    assert (chat.taken, speech.taken) == (0.0, 0.01)
    chat.wants_next = False
    assert both.launch(0.02) and speech.launches == [0.02]
    assert chat.taken == 0.01
    chat.wants_next, speech.longest_wait = True, 0.004
    assert both.launch(0.03) and both.launch(0.04)
    assert len(speech.launches) == 2 and len(chat.launches) == 3


def test_while_the_launches_of_who_is_due_run_nothing_is_put_in_front_of_its_next() -> None:
    chat, speech = FakeWorker("chat", 0.005, work=False, waiting=0.002, wants_next=True), FakeWorker("speech", 0.01)
    both = arbiter(speech, chat)
    assert not both.launch(0.0)
    speech.longest_wait = 0.006
    assert both.launch(0.0) and speech.launches == [0.0]
    speech.longest_wait, chat.waiting = math.inf, 0.0
    assert both.launch(0.01) and len(speech.launches) == 2  # Nothing will come of the other one.


def test_two_that_are_due_take_turns_and_who_waited_for_long_goes_anyway() -> None:
    a, b = FakeWorker("a", 0.01, wants_next=True), FakeWorker("b", 0.01, wants_next=True)
    both = arbiter(a, b)
    for turn in range(6):
        assert both.launch(0.01 * turn)
    assert len(a.launches) == len(b.launches) == 3
    a.wants_next = False
    for turn in range(100):
        assert both.launch(1.0 + 0.01 * turn)
    assert len(a.launches) == pytest.approx(3 + 100 * SHARE, abs=3)


def chat_and_speech(audio: float, **fields: Any) -> tuple[FakeWorker, FakeWorker, Launcher]:
    """Clients wait for tokens; listeners have so many seconds of audio."""
    chat = FakeWorker("chat", 0.002, longest_wait=UNNOTICED, **fields)
    speech = FakeWorker("speech", 0.01, deadline=100.0, longest_wait=audio)
    return chat, speech, arbiter(chat, speech)


@pytest.mark.parametrize(("audio", "share"), [(AHEAD - 0.1, 0.01 / 0.012), (AHEAD + 0.1, AHEAD_SHARE)])
def test_who_is_ahead_gives_way_but_for_its_share(audio: float, share: float) -> None:
    chat, speech, both = chat_and_speech(audio)
    assert shares(both, 10, chat, speech)[1] == pytest.approx(share, rel=0.25)


def test_who_is_ahead_waits_for_a_next_launch_of_the_other_but_not_for_nothing() -> None:
    _, speech, both = chat_and_speech(5.0, work=False, waiting=0.001)
    assert not both.launch(0.0) and not speech.launches
    for nothing_to_launch in ({"work": False}, {"stuck": True}):  # the latter: a grammar is being built
        _, speech, both = chat_and_speech(5.0, **nothing_to_launch)
        assert both.launch(0.0) and speech.launches


def test_overload_slows_everybody_and_starves_nobody() -> None:
    """A tenth of the time, whether the launches are short or long; the longest come once in `MAX_WAIT` seconds."""
    for cost, launches in ((0.002, 500), (0.05, 20), (0.2, 10)):
        chat, speech = FakeWorker("chat", cost), FakeWorker("speech", 0.001, deadline=-10.0)
        shares(arbiter(chat, speech), 10, chat, speech)
        assert len(chat.launches) == pytest.approx(launches, rel=0.2) and len(speech.launches) > 1000


@pytest.mark.parametrize("late", [False, True], ids=["nobody listens", "listeners wait"])
@pytest.mark.parametrize(("token", "step"), [(0.004, 0.05), (0.5, 0.05)])
def test_on_a_cpu_each_model_keeps_a_quarter_of_the_time(token: float, step: float, late: bool) -> None:
    """Whether the launches of chat or those of speech are longer, and though listeners are always late."""
    chat = FakeWorker("chat", token)
    speech = FakeWorker("speech", step, deadline=-1e6 if late else math.inf)
    both = arbiter(chat, speech, fair_share=CPU_SHARE)
    assert min(shares(both, 60, chat, speech)) >= CPU_SHARE - 0.02


@given(chat_cost=st.floats(0.001, 0.1), step=st.floats(0.005, 0.1), seconds=st.integers(2, 6))
@settings(max_examples=40, deadline=None)
def test_a_stream_that_can_be_served_never_runs_dry(chat_cost: float, step: float, seconds: int) -> None:
    """One stream of 160 ms a step beside endless chat work."""
    chat = FakeWorker("chat", chat_cost)
    speech = FakeWorker("speech", step, deadline=0.16 - step, gain=0.16)
    both = arbiter(chat, speech)
    now = 0.0
    while now < seconds:
        launches = len(chat.launches)
        assert both.launch(now)
        if len(chat.launches) > launches:
            now += chat_cost
            assert chat_cost >= 0.16 or speech.deadline >= now - 1e-9 or now - chat_cost > chat_cost / SHARE
        else:
            now += step
    assert len(speech.launches) >= (seconds - 0.5) / 0.16 - 2
