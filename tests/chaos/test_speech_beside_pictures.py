"""Chat and speech beside each other on one engine: neither starves."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.footprint import engine_pid, footprint, wait_settled
from tests.media.samples import encoded, picture
from tests.support.processes import ServerProcess, served
from tests.support.victims import REQUEST_SECONDS, data_url
from tests.support.waiting import GENEROUS, wait

CHAT = "reprise/qwen2_vl"
SPEECH = "reprise/voxcpm2"
FLAGS = ("--decode-buckets", "1", "--decode-buckets", "2", "--max-running", "4")
PATCH_SECONDS = 0.16
BYTES_PER_SECOND = 96_000
SHARE = 0.15
"""Of the speed at which the engine speaks to one listener alone: no CPU that runs tests is one for real time, so the
listeners' clocks run slower. The rest is for the other listeners and the questions."""
PATIENCE = 2
"""Patches that a listener may lack in all: what a client that comes late to its socket on a busy machine misses."""
LISTENERS = 2
CROWD = 4
TEXT = "A long breath, and then a story that takes its time, as stories do that are told at night to those who listen."
AUDIO_SECONDS = 9.6
LARGEST = 1400
"""Pixels of a side: every model of the package scales it down to its largest grid."""

pytestmark = pytest.mark.slow


class EngineClock:
    """Seconds that the engine has computed. It stands still while other programs have the processors, so that only
    what the engine does instead of speaking makes a listener wait."""

    def __init__(self, server_pid: int) -> None:
        # Linux: the processor time of all threads of another process.
        self._clock = (~engine_pid(server_pid) << 3) | 2

    def __call__(self) -> float:
        return time.clock_gettime(self._clock)


class Listener(threading.Thread):
    """Plays a live stream by a clock: starts with the first bytes, stands still when they run out."""

    def __init__(self, url: str, seed: int, rate: float, clock: Callable[[], float]) -> None:
        super().__init__()
        self.silence = 0.0
        self.seconds = 0.0
        self.listened = 0.0
        """Seconds of the clock from the first piece to the last."""
        self._url, self._seed, self._rate, self._clock = url, seed, rate, clock
        self.start()

    def run(self) -> None:
        patches = round(AUDIO_SECONDS / PATCH_SECONDS)
        body = {"model": SPEECH, "input": TEXT, "response_format": "pcm", "seed": self._seed}
        body |= {"min_len": patches, "max_len": patches}
        began = heard_until = 0.0
        with httpx.stream("POST", f"{self._url}/v1/audio/speech", json=body, timeout=REQUEST_SECONDS) as response:
            assert response.status_code == 200
            for piece in response.iter_bytes():
                now = self._clock()
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
def clock(server: tuple[ServerProcess, Path]) -> EngineClock:
    return EngineClock(server[0].process.pid)


@pytest.fixture(scope="module")
def rate(server: tuple[ServerProcess, Path], clock: EngineClock) -> float:
    """Seconds of audio that a listener plays in a second of the clock."""
    alone = Listener(server[0].url, 0, math.inf, clock)
    alone.join(REQUEST_SECONDS)
    return SHARE * alone.seconds / alone.listened


def ask(url: str, image: str) -> int:
    part = {"type": "image_url", "image_url": {"url": image}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]
    body = {"model": CHAT, "messages": messages, "max_tokens": 4, "ignore_eos": True}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=REQUEST_SECONDS).status_code


def assert_heard(listener: Listener, rate: float) -> None:
    listener.join(REQUEST_SECONDS)
    assert listener.seconds == pytest.approx(AUDIO_SECONDS, abs=PATCH_SECONDS)
    assert listener.silence <= PATIENCE * PATCH_SECONDS / rate


def test_live_speech_beside_a_flow_of_the_largest_pictures(
    server: tuple[ServerProcess, Path], rate: float, clock: EngineClock
) -> None:
    """No listener hears a gap, and no question waits for the speech to end. Every picture is new to the caches."""
    process, temporary = server
    images = [data_url(encoded(picture(LARGEST, LARGEST, seed), "JPEG"), "image/jpeg") for seed in range(12)]
    assert ask(process.url, images.pop()) == 200
    before = footprint(process.process.pid, process.url, temporary)
    listeners = [Listener(process.url, seed, rate, clock) for seed in range(LISTENERS)]
    beside = 0
    for image in images:
        if not any(listener.is_alive() for listener in listeners):
            break
        assert ask(process.url, image) == 200
        beside += any(listener.is_alive() for listener in listeners)
    for listener in listeners:
        assert_heard(listener, rate)
    assert beside >= 2, "the questions were to be answered while the listeners listened"
    after = footprint(process.process.pid, process.url, temporary)
    assert after.processes == before.processes
    wait_settled(process.process.pid, process.url, temporary, before, GENEROUS)


def test_a_listener_who_comes_into_a_crowd_of_questions(
    server: tuple[ServerProcess, Path], rate: float, clock: EngineClock
) -> None:
    """Questions that keep the model busy all the time do not keep a new stream from its first audio, nor from more."""
    process, _ = server
    over = threading.Event()
    statuses: list[int] = []

    def crowd(seed: int) -> None:
        while not over.is_set():
            statuses.append(ask(process.url, data_url(encoded(picture(448, 448, seed), "JPEG"), "image/jpeg")))
            seed += 1000

    threads = [threading.Thread(target=crowd, args=(seed,)) for seed in range(CROWD)]
    for thread in threads:
        thread.start()
    try:
        wait(lambda: len(statuses) >= CROWD, what="the crowd asks")
        for seed in range(3):
            assert_heard(Listener(process.url, 9 + seed, rate, clock), rate)
    finally:
        over.set()
        for thread in threads:
            thread.join(REQUEST_SECONDS)
    assert set(statuses) == {200}
