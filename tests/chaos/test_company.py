"""Chat and speech beside each other on one engine: neither starves."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.footprint import footprint, wait_settled
from tests.media.samples import encoded, picture
from tests.support.processes import ServerProcess, served
from tests.support.victims import data_url

CHAT = "reprise/qwen2_vl"
SPEECH = "reprise/voxcpm2"
FLAGS = ("--decode-buckets", "1", "--decode-buckets", "2", "--max-running", "4")
PATCH_SECONDS = 0.16
BYTES_PER_SECOND = 96_000
SHARE = 0.15
"""Of the speed at which this machine speaks to one listener alone: no CPU that runs tests is one for real time, so the
listeners' clocks run slower. The rest is for the other listeners and the questions."""
LISTENERS = 2
TEXT = "A long breath, and then a story that takes its time, as stories do that are told at night to those who listen."
AUDIO_SECONDS = 9.6
LARGEST = 1400
"""Pixels of a side: every model of the package scales it down to its largest grid."""
LONGEST_ANSWER = 20.0

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]


class Listener(threading.Thread):
    """Plays a live stream by its own clock: starts with the first bytes, stands still when they run out."""

    def __init__(self, url: str, seed: int, rate: float) -> None:
        super().__init__()
        self.silence = 0.0
        self.seconds = 0.0
        self.listened = 0.0
        """Seconds from the first piece to the last."""
        self._url, self._seed, self._rate = url, seed, rate
        self.start()

    def run(self) -> None:
        patches = round(AUDIO_SECONDS / PATCH_SECONDS)
        body = {"model": SPEECH, "input": TEXT, "response_format": "pcm", "seed": self._seed}
        body |= {"min_len": patches, "max_len": patches}
        began = heard_until = 0.0
        with httpx.stream("POST", f"{self._url}/v1/audio/speech", json=body, timeout=60) as response:
            assert response.status_code == 200
            for piece in response.iter_bytes():
                now = time.monotonic()
                if heard_until:
                    self.silence += max(0.0, now - heard_until)
                began = began or now
                self.listened = now - began
                duration = len(piece) / BYTES_PER_SECOND
                self.seconds += duration
                heard_until = max(heard_until, now) + duration / self._rate


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    temporary = tmp_path_factory.mktemp("tmp")
    with served(*FLAGS, TMPDIR=str(temporary)) as running:
        yield running, temporary


@pytest.fixture(scope="module")
def rate(server: tuple[ServerProcess, Path]) -> float:
    """Seconds of audio that a listener's clock plays in one of the machine's."""
    alone = Listener(server[0].url, 0, rate=math.inf)
    alone.join(100)
    return SHARE * alone.seconds / alone.listened


def ask(url: str, image: str) -> tuple[int, float]:
    part = {"type": "image_url", "image_url": {"url": image}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]
    body = {"model": CHAT, "messages": messages, "max_tokens": 4, "ignore_eos": True}
    began = time.monotonic()
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    return response.status_code, time.monotonic() - began


def test_live_speech_beside_a_flow_of_the_largest_pictures(server: tuple[ServerProcess, Path], rate: float) -> None:
    """No listener hears a gap, and no question waits for the speech to end. Every picture is new to the caches."""
    process, temporary = server
    images = [data_url(encoded(picture(LARGEST, LARGEST, seed), "JPEG"), "image/jpeg") for seed in range(12)]
    assert ask(process.url, images.pop())[0] == 200
    before = footprint(process.process.pid, process.url, temporary)
    listeners = [Listener(process.url, seed, rate) for seed in range(LISTENERS)]
    answers: list[tuple[int, float]] = []
    beside = 0
    for image in images:
        if not any(listener.is_alive() for listener in listeners):
            break
        answers.append(ask(process.url, image))
        beside += any(listener.is_alive() for listener in listeners)
    for listener in listeners:
        listener.join(90)
        assert listener.seconds == pytest.approx(AUDIO_SECONDS, abs=PATCH_SECONDS)
        assert listener.silence == 0.0
    assert beside >= 2, "the questions were to be answered while the listeners listened"
    assert all(status == 200 and seconds < LONGEST_ANSWER for status, seconds in answers), answers
    after = footprint(process.process.pid, process.url, temporary)
    assert after.processes == before.processes
    wait_settled(process.process.pid, process.url, temporary, before)


def test_a_listener_who_comes_into_a_crowd_of_questions(server: tuple[ServerProcess, Path], rate: float) -> None:
    """Questions that keep the model busy all the time do not keep a new stream from its first audio."""
    process, _ = server
    over = threading.Event()
    failed: list[int] = []

    def crowd(seed: int) -> None:
        while not over.is_set():
            status, _ = ask(process.url, data_url(encoded(picture(448, 448, seed), "JPEG"), "image/jpeg"))
            if status != 200:
                failed.append(status)
            seed += 1000

    threads = [threading.Thread(target=crowd, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(1)
        silences = []
        for seed in range(3):
            began = time.monotonic()
            listener = Listener(process.url, 9 + seed, rate)
            listener.join(90)
            assert not listener.is_alive() and time.monotonic() - began < AUDIO_SECONDS / rate + 10
            silences.append(listener.silence)
        assert statistics.median(silences) < 0.5, "one pause may be the machine's"
    finally:
        over.set()
        for thread in threads:
            thread.join(30)
    assert not failed
