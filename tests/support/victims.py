"""What a chaos test does to a server: work whose answers are known, and clients that listen to it."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from benchmarks.servers.footprint import Footprint, footprint, wait_settled
from service.api.structured.grammar import EACH
from tests.media.samples import data_url, encoded, picture, sound, tone, video
from tests.support.endless import ENDLESS_TOKENS, endless_checkpoint
from tests.support.endless import FLAGS as ENDLESS_FLAGS
from tests.support.miniature import talker
from tests.support.processes import ROOT, ServerProcess
from tests.support.waiting import GENEROUS, wait

CHAT = "qwen2_vl"
SPEECH = "voxcpm2"
SMALL = (*("--model", str(ROOT / "tests/golden/qwen2_vl"), "--model", str(talker())), *("--max-running", "8"))
"""Two small models: ready within seconds."""


def small_and_endless(target: Path) -> tuple[str, ...]:
    """SMALL with the checkpoint that `endless` needs, written to `target`."""
    return ("--model", str(endless_checkpoint(target)), *SMALL[2:], *ENDLESS_FLAGS)


QUESTION = "What is to be seen?"
REQUEST_SECONDS = 2 * GENEROUS
HEARTBEAT_SECONDS = 1.2
"""Longer than between two heartbeats of an idle engine, or two settings of the event loop's gauges."""
TEXT = "A short sentence, spoken while others fall."


def chat(text: str = QUESTION, *media: dict[str, Any], tokens: int = 24, **fields: Any) -> dict[str, Any]:
    content = [*media, {"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}]
    return {
        "model": CHAT, "messages": messages, "temperature": 0, "max_tokens": tokens, "ignore_eos": True, **fields,
    }  # fmt: skip


def image_part(width: int = 56, height: int = 56, seed: int = 0) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(encoded(picture(width, height, seed), "PNG"))}}


def video_part(frames: int = 8) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(video(frames=frames, rate=4), "video/mp4")}}


def endless(**fields: Any) -> dict[str, Any]:
    """A stream that lasts longer than any test lets it, of a server on tests.support.endless' checkpoint."""
    return chat(tokens=ENDLESS_TOKENS, stream=True, **fields)


def speech(text: str = TEXT, **fields: Any) -> dict[str, Any]:
    return {"model": SPEECH, "input": text, "response_format": "pcm", "seed": 7, "max_len": 12, **fields}


def long_speech(**fields: Any) -> dict[str, Any]:
    """Minutes of audio."""
    sentence = "This goes on and on, and nobody will hear the end of it. "
    return speech(sentence * 200, min_len=200, max_len=200, **fields)


class Patient:
    """A server under test; once it is examined, the answers that it gives while it is well, and what it then holds.
    temporary: its TMPDIR."""

    def __init__(self, server: ServerProcess, temporary: Path) -> None:
        self.url = server.url
        self.pid = server.process.pid
        self.temporary = temporary
        self._grammars = itertools.count()

    def examine(self) -> Patient:
        """Warm it up, and keep what `assert_well` compares with."""
        self._warm_up()
        self._steady()  # Captures take memory, and in 16 bits what is replayed in another bucket rounds differently.
        self.answer = self.ask()
        self.sound = self.speak()
        self.before = self._steady()
        return self

    def _warm_up(self) -> None:
        """Everything that is started with its first use."""
        clip = sound(tone(220, 16_000, 1.5), 16_000, "WAV")
        work: list[Callable[[], Any]] = [self.ask, self.speak]
        work += [lambda: self.post("/v1/chat/completions", chat("And?", image_part(), video_part()))] * 2
        work += [
            lambda: self.post("/v1/audio/speech", speech(ref_audio=data_url(clip, "audio/wav"), response_format="mp3"))
        ]
        threads = [threading.Thread(target=step) for step in work * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(REQUEST_SECONDS)
        wait(self._both_checkers, what="both processes that check grammars run")

    def _both_checkers(self) -> bool:
        """The second one starts when a grammar comes while the first is busy with another."""

        def check() -> None:
            words = [f"word{next(self._grammars)}-{index}" for index in range(500)]
            self.post("/v1/chat/completions", chat("Yes?", tokens=1, structured_outputs={"choice": words}))

        threads = [threading.Thread(target=check) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(REQUEST_SECONDS)
        return footprint(self.pid, self.url, self.temporary).processes.get("grammars") == EACH

    def _steady(self) -> Footprint:
        """What an idle server holds that has captured its graphs: two looks a heartbeat apart that agree, gauges
        included."""
        seen = [self._look()]

        def settled() -> bool:
            time.sleep(HEARTBEAT_SECONDS)
            seen.append(self._look())
            (before, captured), (now, captures) = seen[-2:]
            return captures == captured and not now.left_over(before) and not before.left_over(now)

        wait(settled, what="an idle server holds the same from heartbeat to heartbeat")
        return seen[-1][0]

    def _look(self) -> tuple[Footprint, float]:
        """What the server holds, and the number of its captures."""
        return footprint(self.pid, self.url, self.temporary), self.metric("reprise_graph_captures_total")

    def post(self, path: str, body: dict[str, Any], timeout: float = REQUEST_SECONDS) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=timeout)

    def ask(self) -> str:
        response = self.post("/v1/chat/completions", chat("Tell me.", image_part()))
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])

    def speak(self) -> bytes:
        response = self.post("/v1/audio/speech", speech())
        assert response.status_code == 200, response.text
        return response.content

    def assert_well(self, seconds: float = GENEROUS) -> None:
        """Nothing is left over, and answers are what they were."""
        wait_settled(self.pid, self.url, self.temporary, self.before, seconds)
        assert self.ask() == self.answer
        assert same_sound(self.speak(), self.sound)

    @contextlib.contextmanager
    def survivors(self) -> Iterator[None]:
        """Two clients that work all the while; their answers must be the usual ones."""
        heard: list[bool] = []
        over = threading.Event()

        def work(is_usual: Callable[[], bool]) -> None:
            while True:
                heard.append(is_usual())
                if over.is_set():
                    return

        clients = [
            threading.Thread(target=work, args=(lambda: self.ask() == self.answer,)),
            threading.Thread(target=work, args=(lambda: same_sound(self.speak(), self.sound),)),
        ]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            over.set()
            for client in clients:
                client.join(REQUEST_SECONDS)
        assert len(heard) >= 2 and all(heard), f"{heard.count(False)} of {len(heard)} survivors got another answer"

    def status(self, path: str) -> int:
        return httpx.get(self.url + path, headers={"connection": "close"}, timeout=GENEROUS).status_code

    def wait_status(self, path: str, status: int, seconds: float = REQUEST_SECONDS) -> None:
        wait(lambda: self.status(path) == status, seconds, f"{path} turns {status}")

    def metric(self, start: str) -> float:
        text = httpx.get(f"{self.url}/metrics", headers={"connection": "close"}, timeout=GENEROUS).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(start))

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)


def same_sound(one: bytes, other: bytes) -> bool:
    """Batch-mates change the order of sums, which may round a 16-bit sample to its neighbour."""
    if len(one) != len(other):
        return False
    left, right = (np.frombuffer(pcm, np.int16).astype(np.int32) for pcm in (one, other))
    return int(np.abs(left - right).max(initial=0)) <= 2


def raw_request(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


class Listener(threading.Thread):
    """One request in a thread: its status or None when the connection was cut, and its bytes."""

    def __init__(self, patient: Patient, path: str, body: dict[str, Any]) -> None:
        super().__init__()
        self.status: int | None = None
        self.retry_after: str | None = None
        self.data = b""
        self.cut = False
        self.begun = threading.Event()
        self._patient, self._path, self._body = patient, path, body
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream(
                "POST", self._patient.url + self._path, json=self._body, timeout=REQUEST_SECONDS
            ) as response:
                self.status = response.status_code
                self.retry_after = response.headers.get("retry-after")
                for piece in response.iter_bytes():
                    self.data += piece
                    self.begun.set()
        except httpx.HTTPError:
            self.cut = True
        self.begun.set()

    def goes_on(self) -> None:
        seen = len(self.data)
        wait(lambda: len(self.data) > seen, what="the stream goes on")

    @property
    def told(self) -> str:
        """The error object's code, from the body or the last event of the stream; empty without one."""
        last = self.data.strip().split(b"\n")[-1].removeprefix(b"data: ")
        try:
            return str(json.loads(last)["error"]["code"])
        except (ValueError, KeyError, TypeError):
            return ""


class SocketListener(threading.Thread):
    """An utterance over the WebSocket: the messages that came, and the code that closed it (None: still open)."""

    def __init__(self, patient: Patient, text: str, **config: Any) -> None:
        super().__init__()
        self.messages: list[dict[str, Any]] = []
        self.num_bytes = 0
        self.code: int | None = None
        self.begun = threading.Event()
        self._url = patient.url.replace("http", "ws", 1) + "/v1/audio/speech/stream"
        self._text, self._config = text, config
        self.start()

    def run(self) -> None:
        with connect(self._url, open_timeout=GENEROUS, ping_interval=None) as ws, contextlib.suppress(ConnectionClosed):
            config = {"model": SPEECH, "response_format": "pcm", "seed": 7, **self._config}
            ws.send(json.dumps({"type": "session.config", **config}))
            ws.send(json.dumps({"type": "input.text", "text": self._text}))
            ws.send(json.dumps({"type": "input.done"}))
            while True:
                message = ws.recv()
                if isinstance(message, bytes):
                    self.num_bytes += len(message)
                    self.begun.set()
                else:
                    self.messages.append(json.loads(message))
        self.code = ws.close_code
        self.begun.set()

    def types(self) -> list[str]:
        return [message["type"] for message in self.messages]
