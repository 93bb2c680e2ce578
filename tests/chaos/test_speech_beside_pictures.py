"""Chat and speech beside each other on one engine: neither starves.

What is judged is how much of the one is done while the other waits: by the engine's own counts of launches, or by
questions answered between two pieces of audio, which take the same way through the same processes. Neither hangs on how
fast the machine is, nor on who else works on it, nor on which of the processes the others leave more time.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from benchmarks.servers.footprint import footprint, wait_settled
from tests.media.samples import data_url, encoded, picture
from tests.support.processes import ServerProcess, served
from tests.support.victims import REQUEST_SECONDS
from tests.support.waiting import GENEROUS, wait

CHAT = "reprise/qwen2_vl"
SPEECH = "reprise/voxcpm2"
FLAGS = ("--max-running", "4")
PATCH_BYTES = 0.16 * 96_000
TEXT = "A long breath, and then a story that takes its time, as stories do that are told at night to those who listen."
UTTERANCES = (60, 75, 95)
"""Patches of the listeners' utterances. They do not end together, so that the speech hardly ever pauses."""
QUESTIONS = 4
LONG_ANSWER = 8000
"""Tokens, each of a launch of its own: the embedded model's context."""
MOST_PER_LAUNCH = 100
"""Launches of speech for one of chat, which has work all the while. They take turns, but for an engine that is late
with its speech: it launches chat after a second at most, and speech 20 times in it or less, or it were not late."""
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
LARGEST = 1400
"""Pixels of a side: every model of the package scales it down to its largest grid."""

pytestmark = pytest.mark.slow


def pieces(url: str, seed: int, patches: int) -> Iterator[int]:
    """Bytes of each piece of an utterance, as it comes."""
    body = {"model": SPEECH, "input": TEXT, "response_format": "pcm", "sample_rate": 48_000, "seed": seed}
    body |= {"min_len": patches, "max_len": patches}
    with httpx.stream("POST", f"{url}/v1/audio/speech", json=body, timeout=TIMEOUT) as response:
        assert response.status_code == 200
        yield from map(len, response.iter_bytes())


def ask(url: str, image: str) -> int:
    part = {"type": "image_url", "image_url": {"url": image}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]
    body = {"model": CHAT, "messages": messages, "max_tokens": 4, "ignore_eos": True}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT).status_code


def large_picture(seed: int) -> str:
    return data_url(encoded(picture(LARGEST, LARGEST, seed), "JPEG"), "image/jpeg")


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


@dataclass(frozen=True)
class Launches:
    """Of which the results had arrived at one moment of the engine's."""

    chat: int
    speech: int

    @classmethod
    def of(cls, url: str) -> Launches:
        text = httpx.get(f"{url}/metrics", headers={"connection": "close"}, timeout=TIMEOUT).text
        counts = [line for line in text.splitlines() if line.startswith("reprise_step_duration_seconds_count{")]

        def total(model: str) -> int:
            return int(sum(float(line.split()[-1]) for line in counts if f'model="{model}"' in line))

        return cls(total(CHAT), total(SPEECH))


class Speech(threading.Thread):
    """Utterances one after another until it is told to end, each heard to its last byte."""

    def __init__(self, url: str, seed: int, patches: int, over: threading.Event) -> None:
        super().__init__()
        self.heard = 0
        """Bytes."""
        self.utterances: list[float] = []
        """Patches that were heard of each."""
        self._url, self._seed, self._patches, self._over = url, seed, patches, over

    def run(self) -> None:
        while not self._over.is_set():
            before = self.heard
            for size in pieces(self._url, self._seed, self._patches):
                self.heard += size
            self.utterances.append((self.heard - before) / PATCH_BYTES)


class Question(threading.Thread):
    """Asked when it is made; its status stays None until the answer is there."""

    def __init__(self, url: str, image: str) -> None:
        super().__init__()
        self.status: int | None = None
        self._url, self._image = url, image
        self.start()

    def run(self) -> None:
        self.status = ask(self._url, self._image)


class Listener(threading.Thread):
    """Hears one utterance. `answered` holds how many questions had been answered at its request and at each piece."""

    def __init__(self, url: str, seed: int, patches: int, answered: Callable[[], int]) -> None:
        super().__init__()
        self.answered = [answered()]
        self.patches = 0.0
        self._url, self._seed, self._num_patches, self._answered = url, seed, patches, answered
        self.start()

    def run(self) -> None:
        for size in pieces(self._url, self._seed, self._num_patches):
            self.answered.append(self._answered())
            self.patches += size / PATCH_BYTES


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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    """Everything that is started with its first use has been."""
    temporary = tmp_path_factory.mktemp("tmp")
    with served(*FLAGS, TMPDIR=str(temporary)) as running_server:
        assert ask(running_server.url, large_picture(999)) == 200
        assert sum(pieces(running_server.url, 0, 4)) == pytest.approx(4 * PATCH_BYTES, abs=PATCH_BYTES)
        yield running_server, temporary


def test_a_flow_of_the_largest_pictures_beside_live_speech(server: tuple[ServerProcess, Path]) -> None:
    """No question waits for the speech to end, which does not end before the last answer, and all of the speech is
    heard. Every picture is new to the caches."""
    process, temporary = server
    before = footprint(process.process.pid, process.url, temporary)
    begun, over = threading.Event(), threading.Event()
    speeches = [Speech(process.url, seed, patches, over) for seed, patches in enumerate(UTTERANCES)]

    began = Launches.of(process.url)
    with running([threading.Thread(target=go_on, args=(process.url, begun, over)), *speeches], over):
        wait(lambda: begun.is_set() and all(speech.heard for speech in speeches), TIMEOUT, "everybody has begun")
        for seed in range(QUESTIONS):
            assert_answered(process.url, Question(process.url, large_picture(seed)), began)
    for speech, patches in zip(speeches, UTTERANCES, strict=True):
        assert speech.utterances and speech.utterances == pytest.approx([patches] * len(speech.utterances), abs=1)
    after = wait_settled(process.process.pid, process.url, temporary, before, GENEROUS)
    assert after.processes == before.processes


def assert_answered(url: str, question: Question, began: Launches) -> None:
    """Fails once there were too many launches of speech for those of chat, whether or not there is an answer. began:
    before the long answer, which has not ended while there were fewer launches than it has tokens."""
    asked, seen = Launches.of(url), [began]

    def starves() -> bool:
        seen.append(Launches.of(url))
        if seen[-1].chat - began.chat >= LONG_ANSWER:
            return False
        return seen[-1].speech - asked.speech > MOST_PER_LAUNCH * (1 + seen[-1].chat - asked.chat)

    wait(lambda: starves() or not question.is_alive(), TIMEOUT, "an answer")
    assert not starves(), f"chat has work and starves: from {asked} to {seen[-1]}"
    assert question.status == 200


def test_a_listener_who_comes_into_a_crowd_of_questions(server: tuple[ServerProcess, Path]) -> None:
    """Questions that keep the model busy all the time do not keep a new stream from its first audio, nor from more.
    Beside them an answer goes on and on, so that the chat always has a step to launch."""
    url = server[0].url
    begun, over = threading.Event(), threading.Event()
    statuses: list[int] = []

    def crowd(first: int) -> None:
        for seed in itertools.count(first, 1000):
            statuses.append(ask(url, data_url(encoded(picture(448, 448, seed), "JPEG"), "image/jpeg")))
            if over.is_set():
                return

    def answered() -> int:
        return len(statuses)

    threads = [threading.Thread(target=go_on, args=(url, begun, over))]
    threads += [threading.Thread(target=crowd, args=(seed,)) for seed in range(CROWD)]
    with running(threads, over):
        wait(lambda: begun.is_set() and answered() >= CROWD, TIMEOUT, "the crowd asks")
        for seed in range(LISTENERS):
            assert_heard(Listener(url, 9 + seed, UTTERANCES[0], answered), answered)
    assert set(statuses) == {200}


def assert_heard(listener: Listener, answered: Callable[[], int]) -> None:
    """Fails once too many questions were answered, whether or not there is any audio."""
    asked = listener.answered[0]

    def overtaken() -> bool:
        return answered() - asked > MOST_BEFORE_AUDIO + MOST_PER_PATCH * listener.patches

    wait(lambda: overtaken() or not listener.is_alive(), TIMEOUT, "a listener hears everything")
    assert not overtaken(), f"{answered() - asked} questions were answered during {listener.patches:.0f} patches"
    assert listener.patches == pytest.approx(UTTERANCES[0], abs=1)
