"""`reprise serve --engines 2 --api-processes 2`: one port, one set of limits and one page of metrics; each engine has
its own pictures, deaths and figures."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.servers.footprint import children, inspect
from tests.support.api_processes import api_pids, only
from tests.support.miniature import talker
from tests.support.processes import ROOT, served, stand_still
from tests.support.victims import CHAT, Listener, Patient, chat, endless, image_part, raw_request, small_and_endless
from tests.support.waiting import GENEROUS, wait

pytestmark = pytest.mark.slow

TWO = ("--engines", "2", "--device", "cpu", "--api-processes", "2", "--max-in-flight", "8")
PATIENT = ("--hang-timeout", "600", "--drain-timeout", "1")
"""Processes are stopped for as long as a test needs, and streams do not end."""
CHAT_PLACES = 6
"""Of 8 requests in flight chat may take three quarters."""
COUNTED = f'reprise_requests_total{{endpoint="chat",model="{CHAT}",outcome="ok",status="200"}}'
IN_PROGRESS = 'reprise_http_requests_in_progress{endpoint="chat"}'
MOVED = 'reprise_engine_choices_total{reason="moved"}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Patient]:
    models, voices = small_and_endless(tmp_path_factory.mktemp("models")), tmp_path_factory.mktemp("voices")
    with served(*models, *TWO, *PATIENT, "--voices-dir", str(voices)) as running:
        yield Patient(running, tmp_path_factory.mktemp("tmp"))


def get(server: Patient, path: str) -> dict[str, Any]:
    return httpx.get(server.url + path, headers={"connection": "close"}, timeout=GENEROUS).json()


def ask(server: Patient, *media: dict[str, Any]) -> str:
    body = chat("And?", *media)
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers={"connection": "close"}, timeout=120)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def running(server: Patient) -> list[float]:
    """Requests of each engine."""
    return [server.metric(f'reprise_requests_running{{engine="{index}",model="{CHAT}"}}') for index in range(2)]


def test_each_process_answers_and_their_metrics_are_one_page(server: Patient) -> None:
    before, answers, pids = server.metric(COUNTED), set(), api_pids(server.pid)
    assert len(pids) == 2
    for pid in pids:
        with only(pid, server.pid):
            assert get(server, "/ready")["status"] == "ready"
            health = get(server, "/health")
            assert health.pop("background").keys() == {"captures_left"}
            assert health == {"status": "ok", "engine": "ready", "restarts": 0, "engines": ["ready", "ready"]}
            answers.add(ask(server))
    assert len(answers) == 1
    # What a process has just counted comes late while the machine is busy.
    wait(lambda: server.metric(COUNTED) == before + 2, what="the answers of both are counted")
    assert server.metric("reprise_ready ") == 1 and server.metric("reprise_engine_up{") == 2
    for pid in pids:
        with only(pid, server.pid):  # of a process that does not answer the last figures count
            assert server.metric(COUNTED) == before + 2


def test_limits_count_the_requests_of_all_processes(server: Patient) -> None:
    with contextlib.ExitStack() as streams:
        for pid in api_pids(server.pid):
            with only(pid, server.pid):
                for _ in range(CHAT_PLACES // 2):
                    stream = streams.enter_context(socket.create_connection(server.address, GENEROUS))
                    stream.sendall(raw_request("/v1/chat/completions", endless()))
                    assert stream.recv(12) == b"HTTP/1.1 200"
        for pid in api_pids(server.pid):
            with only(pid, server.pid):
                refused = server.post("/v1/chat/completions", chat())
                assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
        wait(lambda: running(server) == [CHAT_PLACES / 2] * 2, what="all run, as many in each engine")
    wait(lambda: server.metric(IN_PROGRESS) == 0, what="the streams have ended")
    assert ask(server)


def test_a_picture_is_encoded_by_one_engine_whichever_process_is_asked(server: Patient) -> None:
    pictures, chosen = [image_part(seed=seed) for seed in range(4)], 'reprise_engine_choices_total{reason="affinity"}'
    usual = [ask(server, picture) for picture in pictures]
    for pid in api_pids(server.pid):
        with only(pid, server.pid):
            assert [ask(server, picture) for picture in pictures] == usual
    wait(lambda: server.metric(chosen) >= 3 * len(pictures), what="all are counted")
    assert server.metric(chosen) == 3 * len(pictures)
    assert server.metric("reprise_encoder_cache_misses_total") == len(pictures)


def test_a_dead_engine_takes_its_own_streams_and_the_other_takes_what_had_not_begun(server: Patient) -> None:
    usual, moved, streams = ask(server), server.metric(MOVED), list[Listener]()
    for _ in range(3):
        streams.append(Listener(server, "/v1/chat/completions", endless()))
        assert streams[-1].begun.wait(GENEROUS)
    wait(lambda: sorted(running(server)) == [1, 2], what="three run")
    doomed = running(server).index(1)  # the next request goes there
    found = sorted(pid for pid in children(server.pid) if (process := inspect(pid)) and process.role == "engine")
    stand_still(found[doomed])
    waiting = Listener(server, "/v1/chat/completions", chat("And?"))
    wait(lambda: server.metric(IN_PROGRESS) == 4, what="the request is at the engine that stands still")
    os.kill(found[doomed], signal.SIGKILL)
    waiting.join(2 * GENEROUS)
    assert json.loads(waiting.data)["choices"][0]["message"]["content"] == usual
    wait(lambda: server.metric(MOVED) == moved + 1, what="that is counted")
    wait(lambda: any(stream.told for stream in streams), what="its own stream is told")
    assert sorted(stream.told for stream in streams) == ["", "", "engine_unavailable"]
    for stream in streams:
        if not stream.told:
            stream.goes_on()
    assert ask(server) == usual
    well = {"status": "ok", "engine": "ready", "restarts": 1, "engines": ["ready", "ready"]}
    # Whichever process answers: the other one may have heard of it first.
    wait(lambda: get(server, "/health").items() >= well.items(), 2 * GENEROUS, "it is there again")
    restarts = [server.metric(f'reprise_engine_restarts_total{{engine="{index}"}}') for index in range(2)]
    assert restarts == [float(index == doomed) for index in range(2)]


def ended(*arguments: str | Path) -> str:
    """What a server says that cannot start."""
    command = [sys.executable, "-m", "service.cli", "serve", "--port", "0", "--log-format", "text"]
    done = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, timeout=4 * GENEROUS
    )
    assert done.returncode == 1
    return done.stderr


def test_an_engine_that_cannot_start_is_named_and_ends_the_server(tmp_path: Path) -> None:
    """Weights of another model: the API processes read its tokenizer, the engines do not get far."""
    broken = tmp_path / "qwen2_vl"
    shutil.copytree(ROOT / "tests/golden/qwen2_vl", broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    said = ended("--engines", "2", "--device", "cpu", "--model", broken)
    assert "The engine 0 could not be started" in said or "The engine 1 could not be started" in said
    assert re.search(r"reprise\.engine: .+ engine=[01]\n", said), said


def test_processes_that_cannot_start_say_why_and_end_the_server(tmp_path: Path) -> None:
    """Their directory of voices is a file."""
    (tmp_path / "voices").touch()
    said = ended("--api-processes", "2", "--voices-dir", tmp_path / "voices", "--model", talker())
    assert "voices_dir" in said and "API process" in said
