"""The worker on the golden checkpoint: equal to the reference, and each stream equal to itself alone."""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.voxcpm2.model import VoxCPM2
from service.link.messages import (
    Abort,
    Control,
    EncodeReference,
    Pause,
    Request,
    SpeechAppend,
    SpeechRequest,
    SpeechSegment,
)
from tests.engine.speech.rig import Heard, WorkerRig, same, same_audio, same_patches
from tests.models.voxcpm2 import golden
from tests.support.slow import slow

SAMPLES = 7680
TEXTS = ("A tiny voice says hello.", "Two red boats.", "你好", "Yes", "One more sentence to speak here.")


@pytest.fixture(scope="module")
def rig(model: VoxCPM2) -> Iterator[WorkerRig]:
    rig = WorkerRig(model)
    yield rig
    rig.assert_clean()


def segment(text: str, patches: int = 5, min_patches: int = 2) -> SpeechSegment:
    return SpeechSegment(tuple(golden.processor().tokenize(text)), min_patches, patches)


def request(name: str, *segments: SpeechSegment, **changes: object) -> SpeechRequest:
    fields = {"seed": 7, "cfg_value": 2.0, "solver_steps": 4, "live": True, "arrival": 0.0, **changes}
    return SpeechRequest(name, "tts", segments or (segment(TEXTS[0]),), **fields)  # type: ignore[arg-type]


def golden_request(mode: str, **changes: object) -> SpeechRequest:
    utterance = golden.utterance(mode)
    options = golden.INPUTS["modes"][mode]
    patches = utterance.patches.numpy()
    prompt = patches[len(patches) - utterance.prompt_patches :] if utterance.prompt_patches else None
    reference = patches[: len(patches) - utterance.prompt_patches]
    transcript = golden.processor().tokenize(options.get("prompt_text", "") + golden.INPUTS["target_text"])
    return request(
        mode,
        segment(golden.INPUTS["target_text"], utterance.max_patches, utterance.min_patches),
        seed=utterance.seed,
        solver_steps=10,
        reference=reference if len(reference) else None,
        prompt=prompt,
        transcript_ids=tuple(transcript) if prompt is not None else (),
        **changes,
    )


def test_the_first_audio_says_when_its_phases_were(rig: WorkerRig) -> None:
    began = time.monotonic()
    heard = rig.alone(request("timed", segment(TEXTS[0], 3, 3), segment(TEXTS[1], 3, 3)))
    first, *others = heard.deltas
    assert first.times is not None and not any(delta.times for delta in others)
    assert began <= first.times.scheduled <= first.times.computed <= time.monotonic()
    assert first.times.encoder is None


def test_other_models_may_go_first_for_long_if_all_hear_and_have_audio_in_hand() -> None:
    clock = [100.0]
    rig = WorkerRig(golden.model(), graphs=False, clock=lambda: clock[0])
    worker = rig.worker
    worker.submit(request("live", segment(TEXTS[0], 40, 40), arrival=clock[0]))
    assert not worker.can_wait(clock[0], 1.0)
    while len(rig.heard["live"].patches) < 12:
        assert rig.turn()
    assert worker.can_wait(clock[0], 1.0) and not worker.can_wait(clock[0], 10.0)
    assert not worker.can_wait(clock[0] + 1.5, 1.0)
    for waiting in (
        request("in silence", arrival=clock[0]),
        request("download", live=False, arrival=clock[0]),
        EncodeReference("clip", "tts", np.zeros(4000, np.float32), "right", clock[0]),
    ):
        worker.submit(waiting)
        assert not worker.can_wait(clock[0], 1.0)
        worker.control(Abort(waiting.request_id))
        assert worker.can_wait(clock[0], 1.0)


@pytest.mark.parametrize(
    ("graphs", "tail"),
    [(True, True), slow(True, False), slow(False, True)],
    ids=["replayed", "replayed without tail", "eager"],
)
def test_the_four_modes_equal_the_reference(graphs: bool, tail: bool) -> None:
    """All modes in one worker, arriving one after the other, with the recorded noise."""
    rig = WorkerRig(golden.model(), graphs=graphs)
    asked = list[bool]()

    def in_rows() -> bool:
        asked.append(True)
        return not tail

    rig.first_patches_in_rows(in_rows)
    heard = rig.run({i: [golden_request(mode)] for i, mode in enumerate(golden.MODES)})
    expected = golden.expected()
    for mode in golden.MODES:
        same_patches(heard[mode].latents, expected[f"{mode}.patches"].numpy())
        stops = bool(expected[f"{mode}.stop_logits"][-1].argmax())
        assert heard[mode].deltas[-1].finished and heard[mode].deltas[-1].truncated != stops
    for recorded in golden.captured(r"(\w+)\.audio(_first\d+)?"):
        samples = expected[recorded[0]][0].numpy()
        same_audio(heard[recorded[1]].audio[: len(samples)], samples)
    rig.assert_clean()
    steps = [event.labels for event in rig.events("steps_total")]
    routes = {(labels["kind"], labels["route"]) for labels in steps}
    # The longer prompts are prefilled eagerly, and those have a tail in any case.
    assert bool(asked) == graphs
    assert {kind for kind, route in routes if route == "replay"} == (
        {"prefill", "tail", "decode", "vae"} if graphs else set()
    )
    assert graphs or {labels["reason"] for labels in steps} == {"disabled"}


def test_a_listeners_clock_runs_at_the_speed_asked_for(model: VoxCPM2) -> None:
    rig = WorkerRig(model, graphs=False)
    rig.worker.submit(request("fast", segment(TEXTS[0], 40), speed=4.0))
    for _ in range(6):
        rig.turn()
    (stream,) = rig.worker._scheduler.running
    heard = stream.playback.delivered + stream.playback.pending
    assert heard == pytest.approx(0.04 * stream.launched) and stream.launched > 2
    rig.run({0: [Abort("fast")]})
    rig.assert_clean()


def test_a_natural_stop_ends_the_stream_without_its_overrun_patch() -> None:
    rig = WorkerRig(golden.model(), graphs=False)
    case, patches = golden.INPUTS["stop_case"], golden.expected()["stop_case.patches"].numpy()
    spoken = segment(golden.INPUTS["target_text"], golden.INPUTS["max_len"], case["min_len"])
    steps = golden.INPUTS["inference_timesteps"]
    heard = rig.alone(request("stop", spoken, seed=golden.MODES.index(case["mode"]), solver_steps=steps))
    same_patches(heard.latents, patches)
    assert len(heard.audio) == len(patches) * SAMPLES
    assert heard.deltas[-1].finished and not heard.deltas[-1].truncated
    assert rig.ticks == len(patches) + 1
    rig.assert_clean()


def streams(count: int) -> list[SpeechRequest]:
    """Streams that differ in text, length, seed, guidance, solver steps, clips and the number of segments."""
    rng = np.random.default_rng(0)
    requests = []
    for i in range(count):
        clip = rng.standard_normal((1 + i % 4, *golden.PATCH_SHAPE)).astype(np.float32)
        lengths = [2 + i % 3, 2][: 1 + (i % 5 == 0)]
        segments = [segment(TEXTS[(i + k) % len(TEXTS)], patches) for k, patches in enumerate(lengths)]
        requests.append(
            request(
                f"stream {i}",
                *segments,
                seed=100 + i,
                cfg_value=1.5 + i % 3 * 0.5,
                solver_steps=(4, 6)[i % 7 == 3],
                live=i % 4 != 2,
                reference=clip if i % 3 == 1 else None,
                prompt=clip if i % 6 == 2 else None,
                transcript_ids=segments[0].text_ids if i % 6 == 2 else (),
            )
        )
    return requests


class Alone(dict[str, Heard]):
    """Each of 33 streams as it is when nobody else is there, eagerly; made when it is asked for."""

    def __init__(self, model: VoxCPM2) -> None:
        super().__init__()
        self._rig = WorkerRig(model, graphs=False)
        self._requests = {one.request_id: one for one in streams(33)}

    def __missing__(self, name: str) -> Heard:
        self[name] = self._rig.alone(self._requests[name])
        return self[name]


@pytest.fixture(scope="module")
def alone(model: VoxCPM2) -> dict[str, Heard]:
    return Alone(model)


@pytest.mark.parametrize("count, buckets", [(3, (1, 4)), slow(33, (12, 34))])
def test_streams_that_come_and_go_equal_themselves_alone(
    model: VoxCPM2, alone: dict[str, Heard], count: int, buckets: tuple[int, ...]
) -> None:
    """A few arrivals a turn, prefills in chunks among decodes, scratch rows full of NaN."""
    rig = WorkerRig(model, max_running=count, buckets=buckets, tokens=8192, step_tokens=48)
    for table in rig.worker._runner.state.values():
        if table.is_floating_point():
            table[0] = torch.nan
    for layer in rig.worker._runner.caches:
        for values in layer.values():
            values[: rig.worker._context.config.page_size] = torch.nan
    arrivals, a_turn = streams(count), 1 + count // 8
    heard = rig.run({i: arrivals[a_turn * i : a_turn * (i + 1)] for i in range(-(-count // a_turn))})
    for name, got in heard.items():
        same(got, alone[name])
    assert len(heard) == count
    rig.assert_clean()
    assert {(kind, "replay") for kind in ("prefill", "decode", "tail", "vae")} <= rig.routes()


FULL = 64
"""Positions of a captured prefill on a CPU, text and patches with a mark before speech."""


PROMPTS = [
    [(1, 0)] * 16,
    [(FULL - 1, 0)],
    [(FULL - 2, 0)],
    [(FULL, 0)],
    [(1, FULL - 2)],
    [(12, 20), (3, 1), (8, 17)],
    [(30, 15), (1, 16)],
]
"""Tokens, and patches that are continued."""


@pytest.mark.parametrize("prompts", PROMPTS, ids=str)
def test_prompts_around_the_sizes_of_captured_prefills(model: VoxCPM2, prompts: list[tuple[int, int]]) -> None:
    replayed_as_eagerly(model, prompts)


def replayed_as_eagerly(model: VoxCPM2, prompts: list[tuple[int, int]], device: str = "cpu") -> None:
    """Together, and in chunks that are cut at the bucket."""
    rng = np.random.default_rng(len(prompts))
    asked = []
    for number, (tokens, patches) in enumerate(prompts):
        ids = tuple(rng.integers(3, 90, tokens).tolist())
        clip = rng.standard_normal((patches, *golden.PATCH_SHAPE)).astype(np.float32)
        voice = {"prompt": clip, "transcript_ids": ids} if patches else {}
        asked.append(request(f"{number}", SpeechSegment(ids, 2, 2), seed=number, **voice))
    sizes = {"max_running": 16, "buckets": (1, 16), "step_tokens": FULL, "device": device, "capture_all": True}
    replayed, eager = (WorkerRig(model, graphs=graphs, **sizes) for graphs in (True, False))
    replayed.observations.drain()
    heard, expected = replayed.run({0: asked}), eager.run({0: asked})
    for one in asked:
        same(heard[one.request_id], expected[one.request_id])
    assert {route for kind, route in replayed.routes() if kind == "prefill"} == {"replay"}


def decoded(model: VoxCPM2, patches: np.ndarray) -> np.ndarray:
    """One decode of all latents from silence."""
    latents = torch.from_numpy(patches).flatten(0, 1).T[None]
    with torch.inference_mode():
        return model.vae.decoder(latents)[0, 0].numpy()


def test_segments_join_as_one_decode_of_their_latents(model: VoxCPM2, rig: WorkerRig) -> None:
    heard = rig.alone(request("long", *(segment(text, 3) for text in TEXTS)))
    assert [delta.segment for delta in heard.deltas if delta.segment_done] == [0, 1, 2, 3, 4]
    assert [delta.finished for delta in heard.deltas].count(True) == 1
    same_audio(heard.audio, decoded(model, heard.latents))


def test_a_continuation_starts_from_the_end_of_its_clip(model: VoxCPM2, rig: WorkerRig) -> None:
    clip = np.random.default_rng(1).standard_normal((5, *golden.PATCH_SHAPE)).astype(np.float32)
    ids = segment(TEXTS[1]).text_ids
    heard = rig.alone(request("continue", segment(TEXTS[1], 3), prompt=clip, transcript_ids=ids))
    whole = decoded(model, np.concatenate([clip[-3:], heard.latents]))
    same_audio(heard.audio, whole[3 * SAMPLES :])


@pytest.mark.parametrize("clips", ["none", slow("prompt"), slow("reference and prompt")])
def test_later_segments_take_the_first_ones_voice(rig: WorkerRig, clips: str) -> None:
    """The second segment's patches are those of a request whose reference is the first segment, behind the request's
    own clip."""
    texts = segment(TEXTS[0], 4), segment(TEXTS[1], 3)
    reference, prompt = np.random.default_rng(2).standard_normal((2, 3, *golden.PATCH_SHAPE)).astype(np.float32)
    continued = {"prompt": prompt, "transcript_ids": texts[0].text_ids}
    voice, own = {
        "none": ({}, []),
        "prompt": (continued, [prompt]),
        "reference and prompt": ({**continued, "reference": reference}, [reference]),
    }[clips]
    heard = rig.alone(request(f"two, {clips}", *texts, **voice)).latents
    again = request(f"again, {clips}", texts[1], reference=np.concatenate([*own, heard[:4]]), seed=derived_seed(7, 1))
    same_patches(rig.alone(again).latents, heard[4:])


def derived_seed(seed: int, index: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little") >> 1


def test_text_that_comes_in_pieces_sounds_like_text_that_came_whole(rig: WorkerRig) -> None:
    pieces = [segment(text, 3) for text in TEXTS[:4]]
    whole = rig.alone(request("whole", *pieces))
    heard = rig.run(
        {
            0: [request("pieces", pieces[0], open=True)],
            2: [SpeechAppend("pieces", (pieces[1],), last=False)],
            30: [SpeechAppend("pieces", (pieces[2], pieces[3]), last=False)],
            60: [SpeechAppend("pieces", (), last=True)],
        }
    )["pieces"]
    same_audio(heard.audio, whole.audio)
    assert heard.deltas[-1].finished and not len(heard.deltas[-1].audio)


@pytest.mark.parametrize("slack", [math.inf, slow(0.0)])
def test_clips_are_encoded_piece_by_piece_between_the_steps_of_a_live_stream(
    model: VoxCPM2, monkeypatch: pytest.MonkeyPatch, slack: float
) -> None:
    """slack: seconds that the stream can spare. With none, clips wait for it, as long as their share of the time, which
    depends on what steps take here, is not due."""
    rig = WorkerRig(model, graphs=False, clock=lambda: 0.0)
    monkeypatch.setattr(rig.worker, "slack", lambda now: slack)
    monkeypatch.setattr(rig.worker._reference_share, "owes", lambda cost: False)
    monkeypatch.setattr("models.voxcpm2.audio_vae._ENCODE_SECONDS", 1)
    wave = np.tile(golden.clip("prompt.wav").numpy(), 5)
    rig.observations.drain()
    heard = rig.run(
        {
            0: [request("talking", segment(TEXTS[0], 12))],
            3: [
                EncodeReference("clip", "tts", wave, "left", 0.0),
                EncodeReference("clip 2", "tts", wave, "right", 0.0),
            ],
        }
    )
    encoded = heard["clip"].encoded
    assert encoded is not None and heard["clip 2"].encoded is not None
    with torch.inference_mode():
        expected = torch.cat(list(model.encode_reference_pieces(torch.from_numpy(wave), "left"))).numpy()
    same_patches(encoded.patches, expected)
    assert len(heard["talking"].deltas) == 12
    kinds = [event.labels["kind"] for event in rig.events("step_duration_seconds")]
    clips = [index for index, kind in enumerate(kinds) if kind == "clip"]
    between = kinds[clips[0] : clips[-1]].count("decode")
    assert len(clips) > 6 and (between >= 6 if slack else between == 0)


def test_clips_wait_in_a_queue_with_an_end_and_not_for_ever(model: VoxCPM2, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.voxcpm2.audio_vae._ENCODE_SECONDS", 1)
    rig = WorkerRig(model, graphs=False, max_waiting=2)
    wave = np.tile(golden.clip("prompt.wav").numpy(), 2)
    clips = [EncodeReference(f"clip {i}", "tts", wave, "right", float(i)) for i in range(4)]
    for clip in clips[:3]:
        rig.worker.submit(clip)
    rig.turn()
    rig.worker.submit(clips[3])  # There is room for it: the first has begun.
    timeout = rig.worker._context.config.queue_timeout
    rig.worker.fail_timed_out(timeout + 1.5)
    heard = rig.run({})
    failures = [
        (one.failed.status, one.failed.code) if (one := heard[clip.request_id]).failed else None for clip in clips
    ]
    assert failures == [None, (503, "queue_timeout"), (503, "overloaded"), None]
    assert all(failed.retry_after for clip in clips if (failed := heard[clip.request_id].failed) is not None)
    assert [heard[clip.request_id].encoded is not None for clip in clips] == [True, False, False, True]
    assert len(rig.worker._references) == 0
    rig.assert_clean()


@pytest.mark.parametrize("cut", [slow(False), True])
def test_every_step_that_includes_a_request_is_counted(model: VoxCPM2, cut: bool) -> None:
    """Also one that computes a part of its prompt, or all of it without the first patch."""
    rig = WorkerRig(model, graphs=not cut, max_running=1, buckets=(1,), step_tokens=64, capture_all=True)
    rig.first_patches_in_rows(lambda: not cut)
    text = " ".join(3 * TEXTS) if cut else TEXTS[0]
    counts = rig.alone(request("counted", segment(text, 6, 6))).deltas[-1].steps
    assert counts is not None and counts.steps == counts.rows == rig.ticks > 6
    assert counts.replayed == (0 if cut else counts.steps)


def test_a_request_waits_from_when_the_engine_has_it(model: VoxCPM2) -> None:
    """Not from its arrival: its reference may have taken long to upload and to decode."""
    clock = [1000.0]
    rig = WorkerRig(model, graphs=False, max_running=1, buckets=(1,), clock=lambda: clock[0])
    timeout = rig.worker._context.config.queue_timeout
    rig.worker.submit(request("late", segment("Two red boats."), arrival=clock[0] - 2 * timeout))
    rig.worker.fail_timed_out(clock[0])
    assert not rig.worker.collect().failed
    clock[0] += timeout + 1
    rig.worker.fail_timed_out(clock[0])
    (failed,) = rig.worker.collect().failed
    assert (failed.request_id, failed.code) == ("late", "queue_timeout")
    rig.assert_clean()


def test_a_clip_for_which_there_is_no_memory_fails_alone(rig: WorkerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is copied to the device when it is launched, where an error is its own."""

    wave, to = np.zeros(3217, dtype=np.float32), torch.Tensor.to

    def full(tensor: torch.Tensor, *where: object, **how: object) -> torch.Tensor:
        if tensor.shape == wave.shape:
            raise torch.OutOfMemoryError("no memory")
        return to(tensor, *where, **how)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch.Tensor, "to", full)
    heard = rig.run({0: [EncodeReference("no memory", "tts", wave, "left", 0.0), request("with it")]})
    failed = heard["no memory"].failed
    assert failed is not None and failed.status == 503
    assert heard["with it"].failed is None and heard["with it"].deltas[-1].finished
    rig.assert_clean()


def test_what_cannot_be_spoken_is_refused_by_name(rig: WorkerRig) -> None:
    clip = np.zeros((4000, *golden.PATCH_SHAPE), dtype=np.float32)
    failed = rig.alone(request("clip", reference=clip)).failed
    assert failed is not None and (failed.status, failed.field) == (400, "input")
    failed = rig.alone(request("other", reference=np.zeros((3, 4, 2), dtype=np.float32))).failed
    assert failed is not None and (failed.status, failed.field) == (400, "voice")
    small = WorkerRig(rig.worker._model, graphs=False, tokens=128)  # type: ignore[arg-type]
    failed = small.alone(request("long", segment(TEXTS[0], 300))).failed
    assert failed is not None and (failed.status, failed.code) == (400, "context_length_exceeded")
    small.assert_clean()


def test_a_later_segment_that_cannot_be_long_enough_is_refused_alone(rig: WorkerRig) -> None:
    """When it is submitted or appended, not when its turn comes: that would end the engine."""
    endless = segment(TEXTS[1], 100_000, min_patches=100_000)
    failed = rig.alone(request("whole", segment(TEXTS[0], 3), endless)).failed
    assert failed is not None and (failed.status, failed.field) == (400, "input")
    first = request("pieces", segment(TEXTS[0], 3), open=True)
    heard = rig.run({0: [first, request("beside")], 2: [SpeechAppend("pieces", (endless,), last=True)]})
    failed = heard["pieces"].failed
    assert failed is not None and (failed.status, failed.field) == (400, "input")
    assert heard["beside"].failed is None and heard["beside"].deltas[-1].finished
    rig.assert_clean()


def test_overload_is_answered_with_503_and_a_time(model: VoxCPM2) -> None:
    rig = WorkerRig(model, graphs=False, max_running=1, buckets=(1,), target=0.01)
    rig.worker.submit(request("first", segment(TEXTS[0], 40)))
    rig.worker.submit(request("second"))
    for _ in range(4):
        rig.turn()
    failed = rig.heard["second"].failed
    assert failed is not None and failed.status == 503 and failed.retry_after is not None and failed.retry_after >= 1
    assert [event.labels["reason"] for event in rig.events("speech_rejections_total")] == ["first_audio"]


EVENTS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5), st.sampled_from(["abort", "pause", "go on"])))


@pytest.mark.slow
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrivals=st.lists(st.integers(0, 8), min_size=6, max_size=6), events=EVENTS, seed=st.integers(0, 99))
def test_whoever_leaves_or_waits_the_others_are_as_if_alone(
    rig: WorkerRig,
    alone: dict[str, Heard],
    arrivals: list[int],
    events: list[tuple[int, int, str]],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lot = random.Random(seed)
    monkeypatch.setattr(rig.worker._scheduler, "_tail_costs_more", lambda chunks: lot.random() < 0.5)
    requests = streams(6)
    script: dict[int, list[Request | Control]] = defaultdict(list)
    for one, turn in zip(requests, arrivals, strict=True):
        script[turn].append(one)
    for turn, number, event in events:
        name = requests[number].request_id
        script[turn].append(Abort(name) if event == "abort" else Pause(name, event == "pause"))
    script[40] += [Pause(one.request_id, False) for one in requests]
    aborted = {requests[number].request_id for turn, number, event in events if event == "abort"}
    rig.heard.clear()
    heard = rig.run(script)
    for one in requests:
        got, other = heard[one.request_id], alone[one.request_id]
        if one.request_id not in aborted:
            assert got.deltas[-1].finished
        if got.patches:
            same_patches(got.latents, other.latents[: len(got.patches)])
            same_audio(got.audio, other.audio[: len(got.audio)])
    rig.assert_clean()
