"""Streams whose text is still being written and that have nothing to speak: they keep nobody waiting, lose nothing, and
go on as if nothing had been."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import pytest

from models.voxcpm2.model import VoxCPM2
from service.engine.speech.scheduler import SpeechScheduler
from service.engine.speech.stream import Phase, Stream, VoicePage
from service.link.messages import Abort, SpeechAppend, SpeechRequest
from tests.engine.speech.rig import WorkerRig, same
from tests.engine.speech.test_scheduler import playing, scheduler, stream
from tests.engine.speech.test_worker import TEXTS, request, segment
from tests.models.voxcpm2 import golden
from tests.support.slow import slow

CLIP = np.random.default_rng(4).standard_normal((20, *golden.PATCH_SHAPE)).astype(np.float32)
"""Longer than a page."""


@pytest.fixture(scope="module")
def shared(model: VoxCPM2) -> WorkerRig:
    return WorkerRig(model, max_running=2, buckets=(1, 2))


@pytest.fixture
def rig(shared: WorkerRig) -> Iterator[WorkerRig]:
    shared.heard.clear()
    yield shared
    shared.assert_clean()


def opened(name: str, **changes: object) -> SpeechRequest:
    return request(name, segment(TEXTS[0], 3), open=True, **changes)


def phase(rig: WorkerRig, name: str) -> Phase:
    sequence = rig.worker._requests.get(name)
    assert sequence is not None
    return sequence.stream.phase


def finish(rig: WorkerRig, *names: str) -> None:
    for name in names:
        rig.worker.control(SpeechAppend(name, (), last=True))
    rig.run({})


@pytest.mark.parametrize("voice", ["none", *(slow(one) for one in ("reference", "continued", "retried"))])
def test_a_preempted_stream_goes_on_as_if_nothing_had_been(rig: WorkerRig, voice: str) -> None:
    texts = segment(TEXTS[0], 3), segment(TEXTS[1], 3), segment(TEXTS[4], 2)
    options: dict[str, object] = {
        "none": {},
        "reference": {"reference": CLIP},
        "continued": {"prompt": CLIP[:5], "transcript_ids": texts[0].text_ids},
        "retried": {"live": False, "retries": 1},
    }[voice]
    untouched = rig.alone(request("untouched", *texts, **options))
    rig.worker.submit(opened("mine", **options))
    rig.run({})
    for text in texts[1:]:
        assert phase(rig, "mine") is Phase.IDLE
        for other in ("one", "two"):
            rig.worker.submit(opened(other))
        rig.run({})
        assert phase(rig, "mine") is Phase.PREEMPTED and rig.worker.state().running == 2
        assert rig.events("speech_preemptions_total")
        rig.worker.control(SpeechAppend("mine", (text,), last=False))
        rig.run({})
        finish(rig, "one", "two")
    finish(rig, "mine")
    heard = rig.heard["mine"]
    assert heard.deltas[-1].finished and heard.failed is None
    same(heard, untouched)


def test_a_stream_that_speaks_is_not_preempted(rig: WorkerRig) -> None:
    """Not even one of which every patch is launched and some are not read."""
    for name in ("one", "two"):
        rig.worker.submit(request(name, segment(TEXTS[0], 6), open=True))
    rig.worker.submit(request("late", segment(TEXTS[0], 3)))
    seen = set()
    while rig.worker.state().waiting:
        rig.turn()
        seen |= {phase(rig, name) for name in ("one", "two")}
        preempted = [name for name in ("one", "two") if phase(rig, name) is Phase.PREEMPTED]
        assert all(len(rig.heard[name].deltas) == 6 for name in preempted)
    assert Phase.LAUNCHED in seen
    rig.run({})
    assert rig.heard["late"].deltas[-1].finished
    finish(rig, "one", "two")


def test_a_stream_that_goes_on_is_not_timed_out_and_comes_before_new_ones(rig: WorkerRig) -> None:
    rig.worker.submit(opened("mine"))
    rig.run({})
    long = [request(name, segment(TEXTS[0], 12, 12), arrival=1.0) for name in ("one", "two")]
    for one in long:
        rig.worker.submit(one)
    while phase(rig, "mine") is not Phase.PREEMPTED or rig.worker.state().waiting:
        rig.turn()
    rig.worker.submit(request("new", arrival=2.0))
    rig.worker.control(SpeechAppend("mine", (segment(TEXTS[1], 3),), last=True))
    rig.worker.fail_timed_out(math.inf)
    rig.run({})
    assert rig.heard["new"].failed is not None and rig.heard["new"].failed.code == "queue_timeout"
    assert rig.heard["mine"].failed is None and len(rig.heard["mine"].patches) == 6
    assert all(len(rig.heard[one.request_id].patches) == 12 for one in long)


def test_a_preempted_stream_can_end_and_be_aborted(rig: WorkerRig) -> None:
    for name in ("ended", "aborted"):
        rig.worker.submit(opened(name))
    rig.run({})
    for name in ("one", "two"):
        rig.worker.submit(request(name))
    rig.run({})
    assert phase(rig, "ended") is phase(rig, "aborted") is Phase.PREEMPTED
    rig.worker.control(SpeechAppend("ended", (), last=True))
    rig.worker.control(Abort("aborted"))
    rig.run({})
    assert rig.heard["ended"].deltas[-1].finished
    assert not any(delta.finished for delta in rig.heard["aborted"].deltas)


# Admission


def idle(sched: SpeechScheduler, one: Stream) -> Stream:
    sched.end_segment(one, one.launched)
    return one


def test_idle_streams_are_load_only_while_they_are_heard() -> None:
    sched = scheduler()
    one, _ = playing(sched, 2, slack=3.0)
    both = sched.load(100.0)
    idle(sched, one)
    assert sched.load(100.0) == sched.load(102.9) == both
    assert 0 < sched.load(103.1) < both
    sched.begin_segment(one, 40, 0, 200)
    assert sched.load(103.1) == both


def test_idle_streams_refuse_nobody() -> None:
    sched = scheduler()
    for one in playing(sched, 4, slack=0.0):
        idle(sched, one)
    sched.policy = dataclasses.replace(sched.policy, max_load=0.0, refuse_after=0.0)
    assert sched.submit(stream(arrival=100.0), 100.1) is None
    refusal = sched.submit(stream("next", arrival=100.0), 100.1)
    assert refusal is not None and refusal.reason == "load"


def test_who_has_been_idle_longest_makes_way_first() -> None:
    sched = scheduler(streams=4)
    streams = playing(sched, 4, slack=9.0)
    for one, last_launch in zip(streams, (3.0, 1.0, 2.0, 0.0), strict=True):
        one.last_launch = last_launch
    for one in streams[:3]:
        idle(sched, one)
    sched.submit(new := stream(arrival=100.0), 100.0)
    step = sched.next_step(100.0)
    assert step is not None and [chunk.stream for chunk in step.prefills] == [new]
    assert [one.phase for one in streams] == [Phase.IDLE, Phase.PREEMPTED, Phase.IDLE, Phase.DECODE]
    sched.launch(step, 100.0)
    assert new in sched.running and len(sched.running) == 4


def test_a_longer_segment_takes_pages_of_idle_streams_and_at_last_its_own() -> None:
    sched = scheduler(pages=60)
    one, two, three = playing(sched, 3, slack=1.0)
    one.last_launch, three.last_launch = 1.0, 2.0
    assert not sched.room.reserve(two, 31 * 16), "the others speak"
    idle(sched, one)
    assert sched.room.reserve(two, 31 * 16)
    assert one.phase is Phase.PREEMPTED and len(two.pages) == 31 and not one.pages
    idle(sched, three)
    assert sched.room.reserve(three, 40 * 16) and three.phase is Phase.PREEMPTED and not three.pages
    sched.begin_segment(three, 440, 0, 200)
    assert three.phase is Phase.WAITING and sched.next_step(100.0) is not None
    assert not sched.room.reserve(two, 61 * 16), "that is more than the cache holds"
    assert sched.running == [two]


def test_nobody_is_preempted_in_vain() -> None:
    """A quarter of the slots is kept from streams without a listener, and those who speak have more than the rest."""
    sched = scheduler(streams=8, pages=400)
    mine, *_ = playing(sched, 8, slack=9.0)
    idle(sched, mine)
    sched.submit(stream("batch", live=False), 100.0)
    sched.next_step(100.0)
    assert mine.phase is Phase.IDLE
    assert not sched.room.make_room(1, 400) and mine.phase is Phase.IDLE


def of_one_voice(sched: SpeechScheduler, count: int) -> list[Stream]:
    """Streams of 19 pages that decode; they share the first five."""
    voice = tuple(VoicePage(bytes([index]), 16, 15 + (index > 0)) for index in range(5))
    streams = [dataclasses.replace(stream(f"voice {index}", prompt=90), voice=voice) for index in range(count)]
    for one in streams:  # the later ones find what the first has computed
        sched.submit(one, 0.0)
        while one.phase is not Phase.DECODE:
            step = sched.next_step(0.0)
            assert step is not None
            sched.launch(step, 0.0)
            sched.index_voice_pages(step)
    assert all(len(one.pages) == 19 and one.pages[:5] == streams[0].pages[:5] for one in streams)
    return streams


def test_the_pages_of_a_voice_that_somebody_speaks_with_are_not_counted_on() -> None:
    """Idle streams were preempted for a stream that does not fit without these pages, and it waited all the same."""
    sched = scheduler(pages=52)
    first, second, speaking = of_one_voice(sched, 3)
    for one in (first, second):
        idle(sched, one)
    assert sched.room.missing([stream(prompt=34 * 16 - 200)])[1] == 1
    assert not sched.room.make_room(1, 34)
    assert first.phase is second.phase is Phase.IDLE
    assert sched.room.make_room(1, 33)
    assert first.phase is second.phase is Phase.PREEMPTED and speaking.phase is Phase.DECODE


def test_a_stream_whose_longer_segment_finds_no_pages_is_preempted_once() -> None:
    """It was counted twice, and the other one preempted in vain: the pages of their voice seemed to be enough."""
    sched = scheduler(pages=66)
    preempted: list[int] = []
    sched.room.on_preemption = lambda: preempted.append(1)
    mine, other, *_ = of_one_voice(sched, 4)
    for one in (mine, other):
        idle(sched, one)
    assert sched.room.reserve(mine, 54 * 16)
    assert mine.phase is Phase.PREEMPTED and other.phase is Phase.IDLE and len(preempted) == 1
    assert sched.room.preempted == [mine]
    sched.release(mine)
    assert not sched.room.preempted
