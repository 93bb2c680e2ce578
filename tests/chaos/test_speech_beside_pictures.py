"""A listener who comes into a crowd of questions on one engine hears everything, and the questions go on.

What is judged is how many questions are answered between two pieces of audio, which take the same way through the same
processes. That hangs neither on how fast the machine is nor on who else works on it.
"""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest

from tests.support.processes import served
from tests.support.victims import (
    REQUEST_SECONDS,
    Listener,
    Patient,
    chat,
    endless,
    image_part,
    small_and_endless,
    speech,
)
from tests.support.waiting import wait

FLAGS = ("--max-running", "4", "--drain-timeout", "1")
PATCH_BYTES = 0.16 * 96_000
TEXT = "A long breath, and then a story that takes its time, as stories do that are told at night to those who listen."
PATCHES = 60
"""Of a listener's utterance."""
LISTENERS = 3
CROWD = 3
"""And an answer that goes on beside them: the four that may run."""
MOST_BEFORE_AUDIO = 40
"""Questions answered between a listener's request and the first audio; one or none where nothing is wrong. Each takes
several launches of its own, and the listener's turn comes after one launch or two."""
MOST_PER_PATCH = 4
"""Questions answered for each patch that a listener hears, on an average; less than one half where launches take
turns."""
TIMEOUT = 5 * REQUEST_SECONDS
"""Seconds after which a test that has failed ends, if neither happens: what it waits for, or too much of the other."""

pytestmark = pytest.mark.slow


def test_a_listener_who_comes_into_a_crowd_of_questions(tmp_path: Path) -> None:
    """Questions that keep the model busy all the time do not keep a new stream from its first audio, nor from more, and
    are answered beside it. An answer goes on and on beside them, so that the chat always has a step to launch."""
    over, statuses = threading.Event(), list[int]()

    def crowd(patient: Patient, first: int) -> None:
        for seed in itertools.count(first, 1000):
            body = chat("?", image_part(448, 448, seed), tokens=4)
            statuses.append(patient.post("/v1/chat/completions", body, TIMEOUT).status_code)
            if over.is_set():
                return

    with served(*small_and_endless(tmp_path), *FLAGS) as server:
        patient = Patient(server, tmp_path)
        answer = Listener(patient, "/v1/chat/completions", endless())
        threads = [threading.Thread(target=crowd, args=(patient, seed)) for seed in range(CROWD)]
        for thread in threads:
            thread.start()
        try:
            wait(lambda: answer.begun.is_set() and len(statuses) >= CROWD, TIMEOUT, "the crowd asks")
            before = len(statuses)
            for seed in range(LISTENERS):
                assert_heard(patient, seed, statuses)
            assert len(statuses) > before, "no question is answered beside speech"
            answer.goes_on()
        finally:
            over.set()
            for thread in threads:
                thread.join(TIMEOUT)
    assert set(statuses) == {200}


def assert_heard(patient: Patient, seed: int, statuses: list[int]) -> None:
    """Fails once too many questions were answered, whether or not there is any audio."""
    before = len(statuses)
    body = speech(TEXT, seed=seed, min_len=PATCHES, max_len=PATCHES, sample_rate=48_000)
    listener = Listener(patient, "/v1/audio/speech", body)

    def patches() -> float:
        return len(listener.data) / PATCH_BYTES

    def overtaken() -> bool:
        return len(statuses) - before > MOST_BEFORE_AUDIO + MOST_PER_PATCH * patches()

    wait(lambda: overtaken() or not listener.is_alive(), TIMEOUT, "a listener hears everything")
    assert not overtaken(), f"{len(statuses) - before} questions were answered during {patches():.0f} patches"
    assert (listener.status, patches()) == (200, pytest.approx(PATCHES, abs=1))
