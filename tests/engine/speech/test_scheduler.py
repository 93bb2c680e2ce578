"""The scheduler alone, on a virtual clock with measured costs."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine.core.pages import PagePool
from service.engine.speech.forecast import Forecast, Policy, SpeechCosts, eager_cost_key
from service.engine.speech.scheduler import SpeechScheduler, Step
from service.engine.speech.stream import FindCapturedBucket, Phase, PrefillChunk, PrefillSize, Stream, VoicePage
from tests.engine.speech.simulator import (
    BUCKETS,
    FUSED,
    FUSED_BUCKETS,
    MEASURED,
    PATCH_SECONDS,
    Arrival,
    Simulation,
    eager,
    measured_costs,
    predicted_first_audio,
    replayed,
)
from tests.support.slow import slow


def poisson(
    rate: float, seconds: float, seed: int, *, offline: float = 0.0, long_prompts: float = 0.0
) -> list[Arrival]:
    """Live requests at `rate` per second of 4 to 16 s of audio; `offline` per second that nobody listens to."""
    rng = random.Random(seed)
    trace: list[Arrival] = []
    for per_second, live in ((rate, True), (offline, False)):
        time = 0.0
        while per_second and (time := time + rng.expovariate(per_second)) < seconds:
            prompt = 400 if rng.random() < long_prompts else rng.randint(20, 80)
            patches, cap_factor = rng.randint(25, 100), rng.uniform(1.5, 4)
            trace.append(Arrival(time, patches, prompt, live=live, cap_factor=cap_factor))
    return trace


def scheduler(
    streams: int = 64,
    pages: int = 10_000,
    captured: FindCapturedBucket = eager,
    *,
    codec_beside: bool = False,
    **policy: float,
) -> SpeechScheduler:
    settings_ = Policy(buckets=BUCKETS, max_streams=streams, patch_seconds=PATCH_SECONDS, **policy)  # type: ignore[arg-type]
    costs = measured_costs(measured=MEASURED | {"text_prefill": FUSED["text_prefill"]})
    forecast = Forecast(costs, captured, settings_, codec_beside=codec_beside)
    return SpeechScheduler(settings_, forecast, PagePool(pages + 1, page_size=16))


def test_a_codec_beside_the_next_step_takes_no_time_of_the_steps_but_delays_their_audio() -> None:
    between, beside = scheduler(captured=replayed), scheduler(captured=replayed, codec_beside=True)
    decode, vae = MEASURED["decode"][8], MEASURED["vae"][8]
    assert between.forecast.decode(10, 8) == pytest.approx(decode + vae)
    assert beside.forecast.decode(10, 8) == pytest.approx(decode)
    assert beside.forecast.decode_bound(10, 8) == between.forecast.decode_bound(10, 8)
    prompt = PrefillSize.of([PrefillChunk.next(stream(), 40)])
    one = MEASURED["vae"][1]
    assert between.forecast.prefill(prompt) - beside.forecast.prefill(prompt) == pytest.approx(one)
    assert beside.forecast.prefill_bound(prompt) == between.forecast.prefill_bound(prompt)
    first_audio = [predicted_first_audio(one, stream()) for one in (between, beside)]
    assert first_audio[0] == pytest.approx(first_audio[1])


def stream(name: str = "new", *, live: bool = True, prompt: int = 40, arrival: float = 0.0, steps: int = 10) -> Stream:
    return Stream(name, live, arrival, steps, prompt, max_patches=200, positions=prompt + 200)


def chosen(sched: SpeechScheduler, now: float = 0.0) -> Step:
    step = sched.next_step(now)
    assert step is not None
    return step


def launched(sched: SpeechScheduler, now: float = 0.0) -> Step:
    sched.launch(step := chosen(sched, now), now)
    return step


def playing(sched: SpeechScheduler, count: int, slack: float, *, live: bool = True, steps: int = 10) -> list[Stream]:
    """Streams that decode at time 100 with `slack` seconds of audio ahead of their listeners."""
    streams = [stream(f"{slack}-{live}-{steps}-{i}", live=live, steps=steps) for i in range(count)]
    for one in streams:
        sched.submit(one, 0.0)
    while any(one.phase is not Phase.DECODE or one.waits_for_first_patch for one in streams):
        launched(sched)
    for one in streams:
        one.playback.pending = 0.0
        one.playback.started = 100.0
        one.playback.delivered = slack
    return streams


def names(step: Step) -> set[str]:
    return {one.request_id for one in step.decodes}


def begun(step: Step) -> list[str]:
    return [chunk.stream.request_id for chunk in step.prefills]


def short_utterances(rate: float, seconds: float, *, clips: float = 0.0) -> list[Arrival]:
    """An open loop of 5.12 s of audio each; a share `clips` of the prompts has a clip of 3 to 10 s."""
    rng = random.Random(1)
    trace: list[Arrival] = []
    time = 0.0
    while (time := time + rng.expovariate(rate)) < seconds:
        audio = rng.randint(20, 60) if rng.random() < clips else 0
        prompt = audio + rng.randint(20, 40)
        trace.append(Arrival(time, 32, prompt, prompt_audio=audio, cap_factor=rng.uniform(2, 5)))
    return trace


def burst(size: int, every: float, seconds: float) -> list[Arrival]:
    """As many requests at once, again and again, of 2 to 6 s of audio."""
    rng = random.Random(size)
    times = [every * k for k in range(int(seconds / every)) for _ in range(size)]
    return [Arrival(time, rng.randint(12, 38), rng.randint(20, 80)) for time in times]


SERVED: dict[str, Any] = {"slots": 128, "buckets": FUSED_BUCKETS, "costs": FUSED, "captured": replayed}
"""A server on the costs of the fused kernels, with prefills that are replayed."""
LIMITED = {"target": 2.0, "max_load": 0.8}
"""And that refuses what would come too late."""


@pytest.mark.parametrize(
    ("trace", "options", "p95"),
    [
        (poisson(14, 20, seed=2), {}, 0.058),
        slow(poisson(16, 20, seed=4, long_prompts=0.5), {}, 0.065),
        (burst(24, 1.0, 8), SERVED, 0.03),
        slow(poisson(14, 15, seed=3, offline=10), SERVED, 0.018),
        (short_utterances(60, 12), SERVED | LIMITED, 0.03),
        slow(short_utterances(60, 12, clips=0.3), SERVED | LIMITED, 0.03),
        slow(short_utterances(80, 12), SERVED | LIMITED, 0.06),
    ],
    ids=["many", "long clips", "bursts", "offline, replayed", "target rate", "a third with clips", "near the limit"],
)
def test_no_underruns_and_early_first_audio(trace: list[Arrival], options: dict[str, Any], p95: float) -> None:
    """If prefills came before any decode, first audio would take 3 to 40 % longer, and a crowd would hear gaps."""
    outcome = Simulation(trace, **options).run()
    assert outcome.underrun_seconds == 0 and outcome.finished == len(trace) and not outcome.refused
    assert outcome.p95() < p95
    assert not any(step.prefills and step.decodes for step in outcome.steps)


def test_admission_keeps_the_promise_under_overload() -> None:
    trace = poisson(40, 15, seed=9)
    outcome = Simulation(trace, slots=256, target=0.5, max_load=0.8).run()
    assert {refusal.reason for refusal in outcome.refused} <= {"load", "first_audio"}
    assert len(outcome.refused) > 50
    assert all(refusal.retry_after is not None and refusal.retry_after >= 1 for refusal in outcome.refused)
    assert outcome.p95() < 0.5
    assert outcome.underrun_seconds == 0
    assert len(outcome.refused) + outcome.finished == len(trace)


def test_a_prompt_joins_a_pass_only_where_that_stays_replayed() -> None:
    sched = scheduler(captured=replayed)
    for index in range(18):
        sched.submit(stream(f"new {index}"), 0.0)
    first = launched(sched)
    assert len(first.prefills) == 16 and len(chosen(sched).prefills) == 2
    costs = sched.forecast.costs
    assert first.predicted == pytest.approx(
        costs.mean("text_prefill", 0, 768) + costs.mean("tail", 10, 16) + costs.mean("vae", 0, 16)
    )


def voice(name: str, pages: int) -> tuple[VoicePage, ...]:
    """Its pages: a token and 15 patches, then 16 patches each."""
    return tuple(VoicePage(f"{name} {page}".encode(), 16, 16 - (page == 0)) for page in range(pages))


def spoken(name: str, pages: tuple[VoicePage, ...]) -> Stream:
    """A stream whose prompt holds these pages of a voice, 8 more patches and 20 tokens."""
    one = stream(name, prompt=16 * len(pages) + 28)
    one.voice, one.prompt_audio = pages, 16 * len(pages) + 7
    return one


def prefilled(sched: SpeechScheduler) -> list[tuple[int, int, int]]:
    """Launches the next step: start, length and patches of its chunks."""
    sched.index_voice_pages(step := launched(sched))
    return [(chunk.start, chunk.length, chunk.audio) for chunk in step.prefills]


def test_streams_of_a_voice_share_the_pages_of_its_reference() -> None:
    sched = scheduler(captured=replayed)
    nova = voice("nova", 2)
    one, other, last = (spoken(name, nova) for name in ("one", "other", "last"))
    third = spoken("third", voice("echo", 2))
    sched.submit(one, 0.0)
    assert prefilled(sched) == [(0, 60, 39)]
    sched.submit(other, 0.0)
    sched.submit(third, 0.0)
    assert prefilled(sched) == [(32, 28, 8), (0, 60, 39)]
    assert other.pages[:2] == one.pages[:2] and not set(other.pages[2:]) & set(one.pages)
    assert not set(third.pages) & set(one.pages)
    sched.release(one)
    sched.release(other)
    assert sched.room.pages.num_cached == 2
    sched.submit(last, 0.0)
    assert last.prompt_left == 28
    assert prefilled(sched) == [(32, 28, 8)]
    sched.release(last)
    sched.release(third)
    sched.room.pages.check()
    assert sched.room.pages.num_used == 0 and sched.room.pages.num_cached == 4


def test_pages_that_a_stream_found_are_not_evicted_for_one_beside_it() -> None:
    """Both are admitted in one step, the one that needs new pages first. The voice's pages are the oldest."""
    sched = scheduler(pages=2 * 17, captured=replayed)
    nova = voice("nova", 2)
    for pages in (nova, *(voice(name, 2) for name in "abcdefgh")):
        one = spoken("one", pages)
        sched.submit(one, 0.0)
        prefilled(sched)
        sched.release(one)
    assert sched.room.pages.num_cached == 18
    pair = spoken("second", voice("new", 2)), spoken("third", nova)
    for one in pair:
        sched.submit(one, 0.0)
    assert prefilled(sched) == [(0, 60, 39), (32, 28, 8)]
    for one in pair:
        sched.release(one)
    sched.room.pages.check()


def test_a_page_is_shared_once_all_of_it_is_computed() -> None:
    """Of a prompt in chunks; and not before a step is on the GPU."""
    sched = scheduler(prefill_tokens=64)
    nova = voice("nova", 6)
    sched.submit(spoken("first", nova), 0.0)
    assert prefilled(sched) == [(0, 64, 64)]
    other = spoken("second", nova)
    sched.submit(other, 0.0)
    assert other.prefilled == 64
    step = launched(sched)
    third = spoken("third", nova)
    sched.submit(third, 0.0)
    assert third.prefilled == 64
    sched.index_voice_pages(step)
    while any(one.phase is not Phase.DECODE for one in (*sched.running, *sched.waiting)):
        prefilled(sched)
    for one in list(sched.running):
        sched.release(one)
    sched.room.pages.check()
    assert sched.room.pages.num_cached == 6


def fused(rows: int, steps: int = 10) -> SpeechScheduler:
    """On the measured costs of the fused kernels, with `rows` listeners who have a second of audio ahead. A decode step
    was launched last."""
    policy = Policy(buckets=FUSED_BUCKETS, max_streams=256, patch_seconds=PATCH_SECONDS)
    forecast = Forecast(measured_costs(measured=FUSED), replayed, policy)
    sched = SpeechScheduler(policy, forecast, PagePool(10_001, page_size=16))
    playing(sched, rows, slack=1.0, steps=steps)
    if step := sched.next_step(100.0):
        sched.launch(step, 100.0)
    return sched


def test_first_patches_are_rows_of_the_next_step_where_that_is_saturated() -> None:
    sched = fused(128)
    new = [stream(f"new {index}", live=bool(index), arrival=100.0) for index in range(3)]
    for one in new:
        sched.submit(one, 0.0)
    for one in new[1:], new[:1]:  # Listeners come first.
        prefill = launched(sched, 100.0)
        assert not prefill.decodes and not prefill.tail and not prefill.emitting
        assert [chunk.stream for chunk in prefill.prefills] == one
        assert all(each.waits_for_first_patch and each.waits_for_first_audio for each in one if each.live)
        decode = launched(sched, 100.0)
        assert not decode.prefills and set(one) < set(decode.decodes)
        assert not any(each.waits_for_first_patch for each in one)


@pytest.mark.parametrize(
    ("rows", "steps"),
    [(0, 10), (16, 10), (64, 10), (128, 4)],
    ids=["none", "few", "not saturated", "other solver steps"],
)
def test_otherwise_a_tail_makes_them(rows: int, steps: int) -> None:
    sched = fused(rows, steps)
    sched.submit(new := stream(arrival=100.0), 0.0)
    prefill = chosen(sched, 100.0)
    assert prefill.tail and prefill.emitting == [new]


def test_a_stream_that_pauses_before_its_first_patch_holds_nobody_up() -> None:
    sched = fused(128)
    sched.submit(paused := stream("paused", arrival=100.0), 0.0)
    assert not launched(sched, 100.0).tail
    paused.paused = True
    sched.submit(new := stream(arrival=100.0), 0.0)
    steps = [launched(sched, 100.0) for _ in range(3)]
    computed = {name for step in steps for name in (*names(step), *begun(step))}
    assert new.request_id in computed and "paused" not in computed
    paused.paused = False
    assert paused in chosen(sched, 100.0).decodes


def test_the_prediction_of_first_audio_is_close() -> None:
    """Bursts of growing size on a busy GPU: what submit would have said against what came."""
    for burst in (1, 8, 24):
        simulation = Simulation([Arrival(0, 400) for _ in range(16)] + [Arrival(2, 20) for _ in range(burst)])
        predicted: list[float] = []
        submit = simulation.scheduler.submit

        def spy(one: Stream, now: float, submit=submit, simulation=simulation, predicted=predicted):  # type: ignore[no-untyped-def]
            predicted.append(predicted_first_audio(simulation.scheduler, one))
            return submit(one, now)

        simulation.scheduler.submit = spy  # type: ignore[method-assign]
        actual = max(simulation.run().first_audio[16:])
        assert actual / 2 < predicted[-1] < actual * 2


Group = tuple[int, float, dict[str, Any]]
"""Streams that decode: how many, their slack in seconds, and fields."""


@pytest.mark.parametrize(
    ("groups", "prompt", "decoded", "prefilled"),
    [
        ([(4, 0.04, {})], True, [0], False),
        ([(16, 3.0, {})], True, [], True),
        ([(16, 3.0, {}), (2, 0.085, {})], True, [], True),
        ([(33, 0.05, {})], False, [0], False),
        ([(46, 1.0, {})], False, [0], False),
        ([(6, 0.5, {}), (3, 0.0, {"live": False}), (51, 5.0, {})], False, [0, 1, 2], False),
        ([(3, 0.5, {}), (3, 0.4, {"steps": 4})], False, [1], False),
    ],
    ids=[
        "a prefill waits while the least slack does not cover it",
        "streams far ahead yield to the first chunk of a new one",
        "a prefill goes before rows whose slack covers it",
        "nothing near silence is trimmed",
        "nothing is trimmed that pays for its place",
        "offline rows fill what is left",
        "rows with other solver steps go in steps of their own",
    ],
)
def test_who_is_in_the_next_step(groups: list[Group], prompt: bool, decoded: list[int], prefilled: bool) -> None:
    sched = scheduler()
    streams = [playing(sched, count, slack, **fields) for count, slack, fields in groups]
    if prompt:
        sched.submit(stream(arrival=100.0), 0.0)
    step = chosen(sched, 100.0)
    assert names(step) == {one.request_id for index in decoded for one in streams[index]}
    assert begun(step) == ["new"] * prefilled


def test_a_long_prompt_is_prefilled_in_chunks_that_fit() -> None:
    sched = scheduler()
    playing(sched, 2, slack=0.06)
    sched.submit(stream(prompt=1600, arrival=100.0), 0.0)
    first, second = (launched(sched, 100.0).prefills[0] for _ in range(2))
    assert 64 <= first.length < 1600 and not first.is_last
    assert second.start == first.length


def test_a_batch_just_above_a_bucket_is_trimmed_by_those_furthest_ahead() -> None:
    sched = scheduler()
    near, ahead = playing(sched, 32, slack=0.6), playing(sched, 1, slack=0.9)
    for _ in range(2):
        assert names(launched(sched, 100.0)) == {one.request_id for one in near}
    assert ahead[0].request_id in names(chosen(sched, 100.0))


def test_offline_prefills_leave_a_quarter_of_the_slots_to_listeners() -> None:
    sched = scheduler(streams=8)
    for index in range(8):
        sched.submit(stream(f"offline {index}", live=False), 0.0)
    while (step := sched.next_step(0.0)) and step.prefills:
        sched.launch(step, 0.0)
    assert len(sched.running) == 6
    sched.submit(stream("listener"), 0.0)
    assert begun(chosen(sched)) == ["listener"]


def test_a_paused_stream_holds_its_place_and_costs_nothing() -> None:
    sched = scheduler()
    (paused,) = playing(sched, 1, slack=0.01)
    paused.paused = True
    assert sched.next_step(100.0) is None
    assert sched.least_slack(100.0) == math.inf
    assert sched.running == [paused]


def test_the_next_segment_of_a_stream_goes_before_new_streams() -> None:
    sched = scheduler()
    (speaker,) = playing(sched, 1, slack=0.03)
    sched.end_segment(speaker, speaker.launched)
    assert sched.least_slack(100.0) == math.inf
    sched.begin_segment(speaker, prompt_tokens=60, prompt_audio=0, max_patches=100)
    sched.submit(stream(arrival=90.0), 0.0)
    assert chosen(sched, 100.0).prefills[0].stream is speaker


@pytest.mark.parametrize("known", [True, False])
def test_who_listens_faster_is_served_faster(known: bool) -> None:
    """Listeners at double and at half speed, with prompts that come all the time."""
    rng = random.Random(5)
    trace = [Arrival(0.02 * i, 120, speed=2.0 if i % 4 else 0.5, speed_known=known) for i in range(24)]
    for _ in range(120):
        trace.append(Arrival(rng.uniform(1, 9), 4, rng.randint(200, 600), speed=2.0, speed_known=known))
    outcome = Simulation(trace).run()
    assert outcome.finished == len(trace)
    assert (outcome.underrun_seconds == 0) == known


def test_late_audio_counts_as_underrun_and_moves_the_clock() -> None:
    one = stream().playback
    for late in (0.0, 0.1, 0.0):
        one.launch(PATCH_SECONDS)
        one.deliver(10.0 + one.delivered + one.underrun + late, PATCH_SECONDS)
    assert one.underrun == pytest.approx(0.1)
    assert one.end(0.0) == pytest.approx(10.1 + 3 * PATCH_SECONDS)


ARRIVALS = st.builds(
    Arrival,
    time=st.floats(0, 3),
    patches=st.integers(1, 40),
    prompt_tokens=st.integers(1, 700),
    live=st.booleans(),
    solver_steps=st.sampled_from([4, 10]),
    cap_factor=st.floats(1, 4),
)


@pytest.mark.parametrize(("patches", "slots"), [(4, 64), (4, 8)])
def test_at_three_times_capacity_speech_in_the_background_gets_a_fifth_of_the_steps(patches: int, slots: int) -> None:
    """Live requests come at three times the rate of a machine slower than playback, and as many others. A step's work
    is that of its streams in equal parts."""
    rate = 3 * 8 / (patches * 20 * 0.0164)
    live = [Arrival(number / rate, patches) for number in range(80)]
    background = [Arrival(number / rate, patches, live=False) for number in range(80)]
    simulation = Simulation(live + background, slots=slots, scale=20.0, buckets=(1, 2, 4, 8))
    outcome = simulation.run()
    assert outcome.finished == 160
    seen, patches_left = dict.fromkeys((True, False), 0.0), 0.8 * 80 * patches  # while both kinds have work
    for step in outcome.steps:
        streams = [chunk.stream for chunk in step.prefills] + list(step.decodes)
        for stream in streams if patches_left > 0 else ():
            seen[stream.live] += step.predicted / len(streams)
        patches_left -= sum(stream.live for stream in step.emitting)
    assert 0.17 <= seen[False] / (seen[True] + seen[False]) <= 0.35


@settings(deadline=None, max_examples=15)
@given(st.lists(ARRIVALS, min_size=1, max_size=25), st.integers(1, 12), st.integers(60, 400), st.floats(0.2, 30))
def test_every_stream_ends_and_the_gpu_never_waits(trace: list[Arrival], slots: int, pages: int, scale: float) -> None:
    """Any trace, any number of slots and pages, also on hardware slower than real time: all streams end, nothing leaks.

    Simulation.run asserts what every step must be, and fails to finish when a step is withheld from runnable streams.
    """
    simulation = Simulation(trace, slots=slots, pages=pages, scale=scale)
    outcome = simulation.run()
    assert outcome.finished + len(outcome.refused) == len(trace)
    assert not simulation.scheduler.running and not simulation.scheduler.waiting
    simulation.pages.check()
    assert simulation.pages.num_used == 0


def test_a_launch_that_was_held_up_counts_little_and_a_change_all_the_way() -> None:
    """Of a known size and of a new one; of a kind that was never measured the first one counts as it is."""
    costs = measured_costs()
    prefill, new = eager_cost_key(1300)
    for kind, steps, size, most in (("decode", 10, 8, 1.5), (prefill, 0, new, 3.01)):
        before = costs.mean(kind, steps, size)
        costs.observe(kind, steps, size, 30.0)
        assert costs.mean(kind, steps, size) < most * before
        for _ in range(40):
            costs.observe(kind, steps, size, 20 * before)
        assert costs.mean(kind, steps, size) == pytest.approx(20 * before, rel=0.01)
    unknown = SpeechCosts()
    for steps, seconds in ((4, 0.001), (64, 0.5)):
        unknown.observe("decode", steps, 8, seconds)
        assert unknown.mean("decode", steps, 8) == seconds


def test_eager_prefills_have_few_sizes_which_hold_their_tokens() -> None:
    sizes = [eager_cost_key(tokens)[1] for tokens in range(1, 4097)]
    assert len(set(sizes)) < 48
    assert all(tokens <= size < 1.25 * tokens + 1 for tokens, size in enumerate(sizes, start=1))
