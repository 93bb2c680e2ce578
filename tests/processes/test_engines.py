"""`reprise serve --engines 2 --api-processes 2`: two engines on one port, each with its own pictures, deaths and
figures."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.servers.footprint import children, inspect
from tests.support.api_processes import api_pids, only
from tests.support.processes import ROOT, ServerProcess, served, stand_still
from tests.support.victims import CHAT, chat, endless, image_part, small_and_endless
from tests.support.waiting import GENEROUS, wait

pytestmark = pytest.mark.slow

FLAGS = ("--engines", "2", "--device", "cpu", "--api-processes", "2", "--hang-timeout", "600")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    models = small_and_endless(tmp_path_factory.mktemp("models"))
    with served(*models, *FLAGS, "--voices-dir", str(tmp_path_factory.mktemp("voices"))) as running:
        yield running


def page(server: ServerProcess) -> str:
    return httpx.get(f"{server.url}/metrics", headers={"connection": "close"}, timeout=GENEROUS).text


def metric(server: ServerProcess, start: str, *parts: str) -> float:
    """The sum of the samples whose lines begin so and hold all parts. What a busy process has just counted may come to
    the page late."""
    lines = (line for line in page(server).splitlines() if line.startswith(start))
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(part in line for part in parts))


def of_each(server: ServerProcess, name: str, model: str = CHAT) -> list[float]:
    return [metric(server, f"{name}{{", f'engine="{index}"', f'model="{model}"') for index in range(2)]


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> httpx.Response:
    response = httpx.post(server.url + path, json=body, headers={"connection": "close"}, timeout=2 * GENEROUS)
    assert response.status_code == 200, response.text
    return response


def ask(server: ServerProcess, *media: dict[str, Any], text: str = "And?") -> str:
    answer = post(server, "/v1/chat/completions", chat(text, *media)).json()
    return str(answer["choices"][0]["message"]["content"])


def engine_pids(server: ServerProcess) -> list[int]:
    """In the order of their indexes, unless one was restarted."""
    found = [(pid, inspect(pid)) for pid in children(server.process.pid)]
    return sorted(pid for pid, process in found if process is not None and process.role == "engine")


def phases(server: ServerProcess) -> Any:
    return httpx.get(f"{server.url}/ready", headers={"connection": "close"}, timeout=GENEROUS).json()["engines"]


class Stream(threading.Thread):
    """A streamed answer, read until it ends or nobody wants it any more."""

    def __init__(self, server: ServerProcess, body: dict[str, Any]) -> None:
        super().__init__()
        self.data = b""
        self._left = False
        self._url, self._body = f"{server.url}/v1/chat/completions", body | {"stream": True}
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=4 * GENEROUS) as response:
            for piece in response.iter_bytes():
                self.data += piece
                if self._left:
                    return

    def events(self) -> list[dict[str, Any]]:
        lines = self.data.decode().split("\n\n")[:-1]
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]

    def error(self) -> str:
        """Code of the error that ended it; empty without one."""
        events = self.events()
        return str(events[-1].get("error", {}).get("code", "")) if events else ""

    def text(self) -> str:
        pieces = (choice["delta"].get("content") for event in self.events() for choice in event["choices"])
        return "".join(piece or "" for piece in pieces)

    def goes_on(self) -> None:
        seen = len(self.data)
        wait(lambda: len(self.data) > seen, what="the stream goes on")

    def leave(self) -> None:
        self._left = True
        self.join(GENEROUS)


@contextlib.contextmanager
def endless_streams(server: ServerProcess, count: int) -> Iterator[list[Stream]]:
    """So many chats that do not end, all of which have begun."""
    streams: list[Stream] = []
    try:
        for _ in range(count):
            streams.append(Stream(server, endless()))
            wait(lambda: streams[-1].data, what="the stream begins")
        yield streams
    finally:
        for stream in streams:
            stream.leave()


def test_a_picture_is_encoded_by_one_engine_whichever_process_is_asked(server: ServerProcess) -> None:
    pictures = [image_part(seed=seed) for seed in range(4)]
    usual = [ask(server, picture) for picture in pictures]
    for pid in api_pids(server.process.pid):
        with only(pid, server.process.pid):
            assert [ask(server, picture) for picture in pictures] == usual

    def chosen() -> float:
        return metric(server, 'reprise_engine_choices_total{reason="affinity"}')

    wait(lambda: chosen() >= 3 * len(pictures), what="all are counted")
    assert chosen() == 3 * len(pictures)
    assert sum(of_each(server, "reprise_encoder_cache_misses_total")) == len(pictures)


def test_a_dead_engine_takes_its_own_streams_and_the_other_takes_what_had_not_begun(server: ServerProcess) -> None:
    usual = ask(server)
    with endless_streams(server, 3) as streams:
        wait(lambda: sorted(of_each(server, "reprise_requests_running")) == [1, 2], what="three run")
        doomed = of_each(server, "reprise_requests_running").index(1)  # the next request goes there
        pid = engine_pids(server)[doomed]
        moved = metric(server, 'reprise_engine_choices_total{reason="moved"}')
        stand_still(pid)
        waiting = Stream(server, chat("And?"))
        wait(
            lambda: metric(server, 'reprise_http_requests_in_progress{endpoint="chat"}') == 4,
            what="the request is at the engine that stands still",
        )
        os.kill(pid, signal.SIGKILL)
        waiting.join(2 * GENEROUS)
        assert waiting.text() == usual
        wait(
            lambda: metric(server, 'reprise_engine_choices_total{reason="moved"}') == moved + 1, what="that is counted"
        )
        wait(lambda: [stream.error() for stream in streams if stream.error()], what="its own stream is told")
        alive = [stream for stream in streams if not stream.error()]
        assert len(alive) == 2
        for stream in alive:
            stream.goes_on()
        assert ask(server) == usual
        wait(lambda: phases(server) == ["ready", "ready"], 2 * GENEROUS, "it is there again")
    well = {"status": "ok", "engine": "ready", "restarts": 1, "engines": ["ready", "ready"]}
    # Whichever process answers: the other one may have heard of it first.
    wait(lambda: httpx.get(f"{server.url}/health", timeout=GENEROUS).json().items() >= well.items(), what="both know")
    restarts = [metric(server, "reprise_engine_restarts_total", f'engine="{index}"') for index in range(2)]
    assert restarts == [float(index == doomed) for index in range(2)]


def test_an_engine_that_cannot_start_is_named_and_ends_the_server(tmp_path: Path) -> None:
    """Weights of another model: the API processes read its tokenizer, the engines do not get far."""
    broken = tmp_path / "qwen2_vl"
    shutil.copytree(ROOT / "tests/golden/qwen2_vl", broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    command = [sys.executable, "-m", "service.cli", "serve", "--port", "0", "--engines", "2", "--device", "cpu"]
    command += ["--model", str(broken), "--log-format", "text"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=4 * GENEROUS)
    assert done.returncode == 1
    assert "engine 0: cannot be started" in done.stderr or "engine 1: cannot be started" in done.stderr
    assert re.search(r"reprise\.engine: .+ engine=[01]\n", done.stderr), done.stderr
