"""What the world does to a server: killed clients, a killed and a hung engine, readers that stop, peers that vanish.

Each test ends with nothing left over and with the answers that the server gave before.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.churn import churn
from benchmarks.servers.footprint import children, engine_pid, inspect
from service.hub import EMBEDDED
from tests.support import miniature
from tests.support.api_processes import api_pids, only
from tests.support.processes import ServerProcess, served, stand_still
from tests.support.victims import (
    REQUEST_SECONDS,
    SMALL,
    TEXT,
    Listener,
    Patient,
    SocketListener,
    chat,
    endless,
    long_speech,
    raw_request,
    small_and_endless,
    speech,
    video_part,
)
from tests.support.waiting import GENEROUS, wait

pytestmark = pytest.mark.slow

LIMITS = (*("--write-timeout", "6", "--hang-timeout", "30"), *("--max-connections", "60"))
"""Long enough for good clients on a busy machine, short enough to wait for."""


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Patient]:
    temporary, voices = tmp_path_factory.mktemp("tmp"), tmp_path_factory.mktemp("voices")
    models = small_and_endless(tmp_path_factory.mktemp("models"))
    with served(*models, *LIMITS, "--voices-dir", str(voices), TMPDIR=str(temporary)) as server:
        yield Patient(server, temporary).examine()


@pytest.fixture(autouse=True)
def ready(patient: Patient) -> None:
    """One failure must not fail the next tests."""
    patient.wait_status("/ready", 200)


@contextlib.contextmanager
def no_engine_starts(patient: Patient) -> Iterator[None]:
    """SIGSTOPs each replacement engine as soon as it appears; SIGCONT at the end."""
    first, over = engine_pid(patient.pid), threading.Event()
    stopped: set[int] = set()

    def stop() -> None:
        while not over.wait(0.01):
            with contextlib.suppress(LookupError, ProcessLookupError):
                if (pid := engine_pid(patient.pid)) != first and pid not in stopped:
                    os.kill(pid, signal.SIGSTOP)
                    stopped.add(pid)

    watcher = threading.Thread(target=stop)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


def test_clients_vanish_in_mid_stream(patient: Patient) -> None:
    """As if killed: their ends of the connections are closed with bytes that nobody reads."""
    requests = [
        ("/v1/chat/completions", endless()),
        ("/v1/chat/completions", endless(n=2, logprobs=True, top_logprobs=5)),
        ("/v1/audio/speech", long_speech()),
        ("/v1/audio/speech", long_speech(stream_format="sse", response_format="opus")),
    ]
    with patient.survivors(), contextlib.ExitStack() as clients:
        for path, body in requests:
            client = clients.enter_context(socket.create_connection(patient.address, REQUEST_SECONDS))
            client.sendall(raw_request(path, body))
            assert client.recv(1000)
    patient.assert_well()


def test_the_engine_is_killed(patient: Patient) -> None:
    """All who wait hear of it at once, each in the way of its protocol, and the server comes back by itself."""
    restarts = patient.metric("reprise_engine_restarts_total")
    streams = [Listener(patient, "/v1/chat/completions", endless()) for _ in range(2)]
    events = Listener(patient, "/v1/audio/speech", long_speech(stream_format="sse"))
    plain = Listener(patient, "/v1/audio/speech", long_speech())
    talk = SocketListener(patient, long_speech()["input"], min_len=200, max_len=200)
    for listener in (*streams, events, plain, talk):
        assert listener.begun.wait(2 * GENEROUS)
    whole = Listener(patient, "/v1/chat/completions", {**endless(), "stream": False})
    wait(lambda: patient.metric('reprise_http_requests_in_progress{endpoint="chat"}') == 3, what="the answer runs")
    with no_engine_starts(patient):
        os.kill(engine_pid(patient.pid), signal.SIGKILL)
        for listener in (*streams, events, plain, whole, talk):
            listener.join(GENEROUS)
            assert not listener.is_alive(), "it waits for the next engine"
        assert patient.status("/ready") == 503
        refused = patient.post("/v1/chat/completions", chat())
        assert refused.status_code == 503 and refused.headers["retry-after"]
    assert [listener.told for listener in (*streams, events, whole)] == ["engine_unavailable"] * 4
    assert whole.status == 503 and whole.retry_after is not None
    assert plain.status == 200 and plain.cut, "a body that is cut off must not look complete"
    assert talk.types()[-1] == "error" and talk.code == 1013
    patient.wait_status("/ready", 200)
    assert patient.metric("reprise_engine_restarts_total") == restarts + 1
    patient.assert_well()


def test_the_engine_hangs(patient: Patient) -> None:
    """Stopped, not dead: the watchdog sees it, says so, and replaces it."""
    hung = engine_pid(patient.pid)
    stream = Listener(patient, "/v1/chat/completions", endless())
    assert stream.begun.wait(GENEROUS)
    stand_still(hung)
    wait(lambda: patient.status("/health") == 503, what="liveness tells of the hung engine")
    stream.join(GENEROUS)
    assert stream.told == "engine_unavailable"
    wait(lambda: inspect(hung) is None, what="the hung engine is gone")
    patient.wait_status("/ready", 200)
    patient.assert_well()


REQUESTS = 320
"""Twenty of each kind, as many before as during the round that is judged. `python -m benchmarks.churn` sends more."""
CLIENTS = 8


def test_requests_leave_nothing_behind() -> None:
    result = churn(REQUESTS, CLIENTS, ["--model", str(EMBEDDED / "qwen2_vl"), "--model", str(miniature.talker())])
    assert result["faults"] == []
    counts = {row["kind"]: row["requests"] for row in result["rows"]}
    assert len(counts) == 16 and sum(counts.values()) == REQUESTS, "each kind of request was sent"


IN_PROGRESS = "reprise_http_requests_in_progress"
processes = pytest.mark.parametrize("processes", [1, 2])
"""Of the API."""


def warm(server: ServerProcess, temporary: Path) -> Patient:
    """A server that has answered: its first requests are admitted later than they are counted."""
    patient = Patient(server, temporary)
    assert patient.ask() and patient.speak()
    return patient


def assert_gone(family: list[int], temporary: Path) -> None:
    wait(lambda: not any(Path(f"/proc/{child}").exists() for child in family), what="no child outlives the server")
    assert not list(temporary.glob("reprise-*"))


def each_process(patient: Patient) -> Iterator[None]:
    """One API process after another, while it alone accepts connections."""
    for pid in api_pids(patient.pid) or [patient.pid]:
        with only(pid, patient.pid):
            yield


@processes
def test_what_was_asked_before_a_drain_is_answered(tmp_path: Path, processes: int) -> None:
    """Also by a signal to all processes, as systemd sends it. The engine stands still until the drain has begun:
    nothing asked before ends before, however fast the machine."""
    drain = ("--drain-delay", "1", "--drain-timeout", "120", "--hang-timeout", "600")
    with served(*SMALL, *drain, "--api-processes", str(processes), TMPDIR=str(tmp_path)) as server:
        patient = warm(server, tmp_path)
        engine = engine_pid(patient.pid)
        stand_still(engine)
        family = children(patient.pid)
        asked, talks = list[Listener](), list[SocketListener]()
        for number, _ in enumerate(each_process(patient), 1):
            asked += [
                Listener(patient, "/v1/chat/completions", chat(tokens=80, stream=True)),
                Listener(patient, "/v1/chat/completions", chat(tokens=80)),
                Listener(patient, "/v1/audio/speech", speech()),
            ]
            talks.append(SocketListener(patient, TEXT, max_len=12))
            wait(lambda number=number: patient.metric(IN_PROGRESS) > 4 * number, what="four each, and the look at them")
        for process in (*family, patient.pid):
            os.kill(process, signal.SIGTERM)
        wait(lambda: "".join(server.log).count("draining 4 requests") == processes, what="the log tells of the drain")
        os.kill(engine, signal.SIGCONT)
        assert server.process.wait(3 * GENEROUS) == 0
        for thread in (*asked, *talks):
            thread.join(GENEROUS)
            assert not thread.is_alive()
        assert {listener.status for listener in asked} == {200} and not any(listener.cut for listener in asked)
        assert b"[DONE]" in asked[0].data and asked[2].data
        for talk in talks:
            assert talk.types()[-1] == "session.done" and talk.num_bytes and talk.code == 1001
        assert_gone(family, tmp_path)


def test_a_drain_of_what_does_not_end(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    flags = ("--drain-delay", "20", "--drain-timeout", "5", "--voices-dir", str(tmp_path / "voices"))
    with served(*small_and_endless(tmp_path), *flags, TMPDIR=str(temporary)) as server:
        patient = Patient(server, temporary).examine()
        family = children(patient.pid)
        endless_ones = [
            Listener(patient, "/v1/chat/completions", endless()),
            Listener(patient, "/v1/audio/speech", long_speech(stream_format="sse")),
        ]
        plain = Listener(patient, "/v1/audio/speech", long_speech())
        endless_talk = SocketListener(patient, long_speech()["input"], min_len=200, max_len=200)
        for listener in (*endless_ones, plain, endless_talk):
            assert listener.begun.wait(2 * GENEROUS)
        server.process.send_signal(signal.SIGTERM)
        patient.wait_status("/ready", 503)
        assert patient.status("/health") == 200
        refused = patient.post("/v1/chat/completions", chat())
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert server.process.wait(2 * GENEROUS) == 0
        for thread in (*endless_ones, plain, endless_talk):
            thread.join(GENEROUS)
            assert not thread.is_alive()
        assert [listener.told for listener in endless_ones] == ["engine_unavailable"] * 2
        assert plain.cut
        assert endless_talk.types()[-1] == "error"
        assert_gone(family, temporary)


@processes
def test_the_second_signal_ends_at_once(tmp_path: Path, processes: int) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    models = small_and_endless(tmp_path)
    drain = ("--drain-delay", "0", "--drain-timeout", "3600", "--hang-timeout", "600")
    with served(*models, *drain, "--api-processes", str(processes), TMPDIR=str(temporary)) as server:
        patient = warm(server, temporary)
        family = children(patient.pid)
        streams = []
        for _ in each_process(patient):
            streams.append(Listener(patient, "/v1/chat/completions", endless()))
            assert streams[-1].begun.wait(GENEROUS)
        server.process.send_signal(signal.SIGTERM)
        wait(lambda: "".join(server.log).count("draining") == processes, what="the first signal is told in the log")
        assert server.process.poll() is None and all(stream.is_alive() for stream in streams)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(GENEROUS)
        for stream in streams:
            stream.join(GENEROUS)
            assert not stream.is_alive()
        assert_gone(family, temporary)
        server.stop()  # until its log has been read
        assert not [line for line in server.log if "Traceback" in line]


@processes
def test_a_server_killed_outright_leaves_no_process(tmp_path: Path, processes: int) -> None:
    """kill -9 of the first process: engine and decoders notice and end, and nothing is left in the file system."""
    with served(*SMALL, "--api-processes", str(processes), TMPDIR=str(tmp_path)) as server:
        patient = warm(server, tmp_path)
        patient.post("/v1/chat/completions", chat("And?", video_part()))
        family = children(patient.pid)
        assert len(family) >= 1 + processes
        server.process.kill()
        server.process.wait(GENEROUS)
        assert_gone(family, tmp_path)
