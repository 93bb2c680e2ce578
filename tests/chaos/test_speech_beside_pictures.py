"""A listener who comes into a crowd of questions on one engine hears everything, and the questions go on.

What is judged is how many questions are answered between two pieces of audio, which take the same way through the same
processes. That hangs neither on how fast the machine is nor on who else works on it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.media.samples import data_url, encoded, picture
from tests.support.processes import served
from tests.support.victims import REQUEST_SECONDS
from tests.support.waiting import wait

CHAT = "reprise/qwen2_vl"
SPEECH = "reprise/voxcpm2"
FLAGS = ("--max-running", "4")
PATCH_BYTES = 0.16 * 96_000
TEXT = "A long breath, and then a story that takes its time, as stories do that are told at night to those who listen."
PATCHES = 60
"""Of a listener's utterance."""
LONG_ANSWER = 8000
"""Tokens: the embedded model's context."""
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


def ask(url: str, image: str) -> int:
    part = {"type": "image_url", "image_url": {"url": image}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]
    body = {"model": CHAT, "messages": messages, "max_tokens": 4, "ignore_eos": True}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT).status_code


def go_on(url: str, begun: threading.Event, over: threading.Event) -> None:
    """A long answer, and another one if it ends before `over` is set."""
    body = {"model": CHAT, "messages": [{"role": "user", "content": "Tell me more."}], "stream": True}
    body |= {"max_tokens": LONG_ANSWER, "ignore_eos": True}
    while not over.is_set():
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT) as response:
            assert response.status_code == 200
            for _ in response.iter_bytes():
                begun.set()
                if over.is_set():
                    break


class Listener(threading.Thread):
    """Hears one utterance."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__()
        self.patches = 0.0
        self._url, self._seed = url, seed
        self.start()

    def run(self) -> None:
        """As the pieces come."""
        body = {"model": SPEECH, "input": TEXT, "response_format": "pcm", "sample_rate": 48_000, "seed": self._seed}
        body |= {"min_len": PATCHES, "max_len": PATCHES}
        with httpx.stream("POST", f"{self._url}/v1/audio/speech", json=body, timeout=TIMEOUT) as response:
            assert response.status_code == 200
            for piece in response.iter_bytes():
                self.patches += len(piece) / PATCH_BYTES


@contextlib.contextmanager
def running(threads: list[threading.Thread], over: threading.Event) -> Iterator[None]:
    """Threads that end by themselves once `over` is set."""
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(TIMEOUT)


def test_a_listener_who_comes_into_a_crowd_of_questions() -> None:
    """Questions that keep the model busy all the time do not keep a new stream from its first audio, nor from more, and
    are answered beside it. An answer goes on and on beside them, so that the chat always has a step to launch."""
    begun, over = threading.Event(), threading.Event()
    statuses: list[int] = []

    def answered() -> int:
        return len(statuses)

    with served(*FLAGS) as server:

        def crowd(first: int) -> None:
            for seed in itertools.count(first, 1000):
                statuses.append(ask(server.url, data_url(encoded(picture(448, 448, seed), "JPEG"), "image/jpeg")))
                if over.is_set():
                    return

        threads = [threading.Thread(target=go_on, args=(server.url, begun, over))]
        threads += [threading.Thread(target=crowd, args=(seed,)) for seed in range(CROWD)]
        with running(threads, over):
            wait(lambda: begun.is_set() and answered() >= CROWD, TIMEOUT, "the crowd asks")
            before = answered()
            for seed in range(LISTENERS):
                assert_heard(server.url, 9 + seed, answered)
            assert answered() > before, "no question is answered beside speech"
    assert set(statuses) == {200}


def assert_heard(url: str, seed: int, answered: Callable[[], int]) -> None:
    """Fails once too many questions were answered, whether or not there is any audio."""
    asked, listener = answered(), Listener(url, seed)

    def overtaken() -> bool:
        return answered() - asked > MOST_BEFORE_AUDIO + MOST_PER_PATCH * listener.patches

    wait(lambda: overtaken() or not listener.is_alive(), TIMEOUT, "a listener hears everything")
    assert not overtaken(), f"{answered() - asked} questions were answered during {listener.patches:.0f} patches"
    assert listener.patches == pytest.approx(PATCHES, abs=1)
