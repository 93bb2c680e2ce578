"""Segments that run to their cap: retried where nobody has heard them, sent to the end where somebody has.

The model's stop head never fires; which takes stop at their last patch, the tests say. Time stands still unless a test
moves it, so that a listener has in hand what was sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from models.voxcpm2.model import VoxCPM2
from service.engine.speech.requests import UnsentAudio
from service.engine.speech.runner import Launch, Outcome
from service.link.messages import Abort, SpeechDelta, SpeechRequest, SpeechSegment
from tests.engine.speech.rig import Heard, WorkerRig, same_audio, same_patches
from tests.engine.speech.test_worker import request as usual_request
from tests.engine.speech.test_worker import segment
from tests.models.voxcpm2 import golden
from tests.support.slow import slow

FIRST, LATER = "A tiny voice says hello.", "Two red boats."
LONG = 10
"""Patches, 1.6 s: with them in hand a listener can wait for the next segment."""


class Rig(WorkerRig):
    """runaways: attempts at each segment that do not stop; others stop at their last patch."""

    def __init__(self, model: VoxCPM2) -> None:
        self.now = 0.0
        super().__init__(model, clock=lambda: self.now)
        self.runaways: dict[int, int] = {}
        outcomes = self.worker._runner.outcomes

        def ending(launch: Launch) -> list[Outcome]:
            return [
                replace(one, stopped=one.finished and one.sequence.attempt >= self.runaways.get(one.segment, 0))
                for one in outcomes(launch)
            ]

        self.worker._runner.outcomes = ending  # type: ignore[method-assign]

    def say(self, request: SpeechRequest, **runaways: int) -> Heard:
        """runaways: by the segment's name, s0, s1."""
        self.heard.clear()
        self.observations.drain()
        self.runaways = {int(name[1:]): count for name, count in runaways.items()}
        return self.alone(request)

    @property
    def retried(self) -> float:
        return sum(event.value for event in self.events("speech_retries_total"))

    def sent(self) -> list[int]:
        """Segments of the audio that was sent so far, patch by patch."""
        return [delta.segment for heard in self.heard.values() for delta in heard.deltas if len(delta.audio)]


@pytest.fixture(scope="module")
def shared(model: VoxCPM2) -> Rig:
    return Rig(model)


@pytest.fixture
def rig(shared: Rig) -> Iterator[Rig]:
    shared.now = 0.0
    shared.heard.clear()
    yield shared
    shared.assert_clean()
    unsent = shared.worker._requests._unsent
    assert not unsent._deltas and not unsent._bytes


def request(*segments: SpeechSegment, **changes: object) -> SpeechRequest:
    return usual_request("one", *segments, **{"retries": 2, **changes})


@pytest.mark.parametrize(("runaways", "retries", "retried"), [(1, 2, 1), slow(9, 2, 2), slow(9, 0, 0)])
def test_offline_speech_is_retried_with_the_next_seeds(rig: Rig, runaways: int, retries: int, retried: int) -> None:
    heard = rig.say(request(segment(FIRST, 4), live=False, retries=retries), s0=runaways)
    assert rig.retried == retried
    assert len(heard.deltas) == 4 and heard.deltas[-1].finished
    assert heard.deltas[-1].truncated == (runaways > retried)
    same_audio(rig.say(request(segment(FIRST, 4), seed=7 + retried)).audio, heard.audio)


@pytest.mark.slow
def test_one_segment_alone_is_retried(rig: Rig) -> None:
    """The first stays, and the codec goes on from its end as if there had been no other attempt."""
    segments = segment(FIRST, 4), segment(LATER, 3)
    heard = rig.say(request(*segments, live=False), s1=1)
    assert rig.retried == 1 and [delta.segment for delta in heard.deltas] == [0] * 4 + [1] * 3
    patches = heard.latents
    assert len(patches) == 4 + 3 + 3, "those of the attempt that nobody heard, too"
    untouched = rig.say(request(*segments))
    same_audio(of_segment(heard, 0), of_segment(untouched, 0))
    same_patches(patches[:7], untouched.latents)
    assert np.abs(patches[7:] - patches[4:7]).max() > 0.01, "another attempt"
    with torch.inference_mode():
        latents = torch.from_numpy(np.concatenate([patches[:4], patches[7:]])).flatten(0, 1).T[None]
        whole = rig.worker._model.vae.decoder(latents)[0, 0].numpy()  # type: ignore[attr-defined]
    same_audio(heard.audio, whole)


def of_segment(heard: Heard, segment: int) -> np.ndarray:
    return np.concatenate([delta.audio for delta in heard.deltas if delta.segment == segment])


def test_a_continued_clip_is_continued_again(rig: Rig) -> None:
    clip = np.random.default_rng(1).standard_normal((5, *golden.PATCH_SHAPE)).astype(np.float32)
    voice = {"prompt": clip, "transcript_ids": segment(LATER, 3).text_ids}
    heard = rig.say(request(segment(LATER, 3), live=False, **voice), s0=1)
    assert rig.retried == 1
    same_audio(rig.say(request(segment(LATER, 3), seed=8, **voice)).audio, heard.audio)


def test_a_streams_first_segment_is_sent_as_it_is_made(rig: Rig) -> None:
    heard = rig.say(request(segment(FIRST, LONG), segment(LATER, 3)), s0=1)
    assert rig.retried == 0
    assert [delta.truncated for delta in heard.deltas if delta.segment_done] == [True, False]


def test_audio_of_a_later_segment_is_held_back_while_the_listener_has_audio(rig: Rig) -> None:
    heard = rig.say(request(segment(FIRST, LONG), segment(LATER, 4)), s1=2)
    assert rig.retried == 2
    assert [delta.segment for delta in heard.deltas] == [0] * LONG + [1] * 4
    assert not any(delta.truncated for delta in heard.deltas)


@pytest.mark.slow
def test_held_back_audio_is_sent_when_the_listeners_audio_runs_low(rig: Rig) -> None:
    rig.runaways = {1: 1}
    rig.worker.submit(request(segment(FIRST, LONG), segment(LATER, 8)))
    while len(rig.heard["one"].patches) < LONG + 3:
        assert rig.turn()
    assert rig.sent() == [0] * LONG
    (stream,) = rig.worker._scheduler.running
    assert stream.playback.in_hand(rig.now) == pytest.approx(0.16 * LONG)
    rig.now = 0.16 * LONG - 1.0
    rig.turn()
    assert rig.sent()[: LONG + 3] == [0] * LONG + [1] * 3
    rig.run({})
    assert rig.retried == 0 and rig.heard["one"].deltas[-1].truncated
    assert stream.playback.underrun == 0


def test_an_abort_drops_held_back_audio(rig: Rig) -> None:
    rig.worker.submit(request(segment(FIRST, LONG), segment(LATER, 30)))
    while len(rig.heard["one"].patches) < LONG + 3:
        assert rig.turn()
    rig.run({0: [Abort("one")]})
    assert rig.sent() == [0] * LONG


def test_held_back_audio_has_a_limit_in_bytes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.worker._requests, "_unsent", UnsentAudio(max_bytes=2 * 7680 * 4))
    heard = rig.say(request(segment(FIRST, 4), live=False), s0=1)
    assert rig.retried == 0 and heard.deltas[-1].truncated and len(heard.deltas) == 4
    assert isinstance(heard.deltas[0], SpeechDelta)
    assert not rig.worker._requests._unsent._bytes
