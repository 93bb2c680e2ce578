"""`reprise serve --api-processes 2`: one port, one engine, one set of limits, one page of metrics."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.api_processes import api_pids, only
from tests.support.miniature import talker
from tests.support.processes import ROOT, ServerProcess, served
from tests.support.victims import CHAT, chat, endless, raw_request, small_and_endless
from tests.support.waiting import GENEROUS, wait

pytestmark = pytest.mark.slow

CHAT_PLACES = 6
"""Of 8 requests in flight chat may take three quarters."""
COUNTED = f'reprise_requests_total{{endpoint="chat",model="{CHAT}",outcome="ok",status="200"}}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    models = small_and_endless(tmp_path_factory.mktemp("models"))
    voices = str(tmp_path_factory.mktemp("voices"))
    patient = ("--hang-timeout", "600")  # processes are stopped for as long as a test needs
    limits = ("--api-processes", "2", "--max-in-flight", "8", "--voices-dir", voices, *patient)
    with served(*models, *limits) as running:
        yield running


@pytest.fixture
def pids(server: ServerProcess) -> list[int]:
    found = api_pids(server.process.pid)
    assert len(found) == 2
    return found


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=2 * GENEROUS)


def get(server: ServerProcess, path: str) -> httpx.Response:
    return httpx.get(server.url + path, timeout=GENEROUS)


def ask(server: ServerProcess) -> str:
    response = post(server, "/v1/chat/completions", chat())
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def metric(page: str, line: str) -> float:
    return next((float(found.rpartition(" ")[2]) for found in page.splitlines() if found.startswith(line + " ")), 0.0)


def test_each_process_answers_and_their_metrics_are_one_page(server: ServerProcess, pids: list[int]) -> None:
    before = metric(get(server, "/metrics").text, COUNTED)
    answers = set()
    for pid in pids:
        with only(pid, server.process.pid):
            assert get(server, "/ready").json()["status"] == "ready"
            health = get(server, "/health").json()
            assert health.pop("background").keys() == {"captures_left"}
            assert health == {"status": "ok", "engine": "ready", "restarts": 0}
            answers.add(ask(server))
    assert len(answers) == 1
    # What a process has just counted comes late while the machine is busy.
    wait(lambda: metric(get(server, "/metrics").text, COUNTED) >= before + 2, what="both answers are counted")
    page = get(server, "/metrics").text
    assert metric(page, COUNTED) == before + 2
    assert metric(page, "reprise_ready") == 1 and metric(page, "reprise_engine_up") == 1
    assert metric(page, f'reprise_steps_total{{kind="decode",model="{CHAT}",reason="captured",route="replay"}}') > 0
    for pid in pids:
        with only(pid, server.process.pid):  # of a process that does not answer the last figures count
            assert metric(get(server, "/metrics").text, COUNTED) == before + 2


def test_limits_count_the_requests_of_all_processes(server: ServerProcess, pids: list[int]) -> None:
    with contextlib.ExitStack() as streams:
        for pid in pids:
            with only(pid, server.process.pid):
                for _ in range(CHAT_PLACES // 2):
                    stream = streams.enter_context(socket_of(server))
                    stream.sendall(raw_request("/v1/chat/completions", endless()))
                    assert stream.recv(12) == b"HTTP/1.1 200"
        for pid in pids:
            with only(pid, server.process.pid):
                refused = post(server, "/v1/chat/completions", chat())
                assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
        in_slots = f'reprise_slots_used{{model="{CHAT}"}}'
        wait(lambda: metric(get(server, "/metrics").text, in_slots) == CHAT_PLACES, what="all are in the one engine")
    wait(
        lambda: metric(get(server, "/metrics").text, 'reprise_http_requests_in_progress{endpoint="chat"}') == 0,
        what="the streams have ended",
    )
    assert ask(server)


@contextlib.contextmanager
def socket_of(server: ServerProcess) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), GENEROUS) as connection:
        yield connection


def test_processes_that_cannot_start_say_why_and_end_the_server(tmp_path: Path) -> None:
    """Their directory of voices is a file."""
    (tmp_path / "voices").touch()
    command = [sys.executable, "-m", "service.cli", "serve", "--port", "0", "--api-processes", "2"]
    command += ["--voices-dir", str(tmp_path / "voices"), "--model", str(talker())]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=4 * GENEROUS)
    assert done.returncode == 1 and "voices_dir" in done.stderr and "API process" in done.stderr
